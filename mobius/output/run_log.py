"""Owns what a run tells of itself while it trains: the step's line, files of its folder, and trackers.

metrics.jsonl        every step with all that is measured
trainer_log.jsonl    steps that are shown, in the names that LLaMA-Factory's boards read
trainer_state.json   the same in transformers' TrainerState; whole, at the end and with each checkpoint
*_results.json       the last numbers of train, eval, ...; all_results.json has all of them

A run that goes on from a checkpoint in its folder cuts the two logs behind that step and appends to them.
"""

from __future__ import annotations

import logging
import math
import statistics
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from mobius.atomic_files import atomic_write
from mobius.config.config import Config
from mobius.errors import CheckpointError, reason_of
from mobius.excerpt import quoted
from mobius.output.metrics import (
    JsonLines,
    LogHistory,
    StepMetrics,
    as_numbers,
    filter_lines,
    format_clock,
    json_text,
    step_line,
)
from mobius.output.trackers import Trackers
from mobius.regular_files import parse_json, typed_object

logger = logging.getLogger(__name__)

METRICS_FILE: Final = "metrics.jsonl"
LOG_FILE: Final = "trainer_log.jsonl"
STATE_FILE: Final = "trainer_state.json"
_HISTORY: Final = '"log_history": '
_RECENT_STEPS: Final = 20
"""Steps whose median tells the time left."""


@dataclass
class TrainerState:
    """Where a run is and what was shown of it; the fields are those of transformers' class, which reads the file.

    Tokens count no padding; `log_history` has raw numbers.
    """

    max_steps: int
    num_train_epochs: int
    logging_steps: int
    train_batch_size: int
    """Rows of a step."""
    global_step: int = 0
    epoch: float = 0.0
    num_input_tokens_seen: int = 0
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    log_history: LogHistory = field(default_factory=LogHistory)
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True

    @classmethod
    def at_start(cls, config: Config) -> TrainerState:
        """The state of a run that has made no step."""
        optim = config.optim
        return cls(
            max_steps=optim.num_steps,
            num_train_epochs=math.ceil(optim.num_train_epochs or 0),  # where they are not given: those done, counted up
            logging_steps=config.output.logging_steps,
            train_batch_size=config.pipeline.batch_size,
        )

    @classmethod
    def from_json(cls, text: str, *, path: Path = Path(STATE_FILE)) -> TrainerState:
        """The state that `to_json` gave as `text`; raises CheckpointError, which names `path`, for anything else."""
        found = as_numbers(parse_json(text, path))
        try:
            state = typed_object(cls, found, log_history=list)
        except ValueError as problem:
            raise _no_state(path, f"it {problem}") from None
        for number, entry in enumerate(state.log_history):
            step = entry.get("step") if isinstance(entry, dict) else None
            if type(step) is not int or not 0 <= step <= state.global_step:
                raise _no_state(path, f"entry {number} of log_history is none of a step of the run: {quoted(entry)}")
            if wrong := [name for name, value in entry.items() if isinstance(value, str | list)]:
                raise _no_state(path, f"entry {number} of log_history has {quoted(entry[wrong[0]])} for {wrong[0]}")
        return replace(state, log_history=LogHistory(state.log_history))

    def to_json(self) -> str:
        """JSON that transformers reads; numbers that JSON does not have are words that `float` reads."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        state |= {"num_train_epochs": self.num_train_epochs or math.ceil(self.epoch), "log_history": []}
        before, name, behind = json_text(state, indent=2).partition(_HISTORY)
        return self.log_history.to_json(before + name, behind.removeprefix("[]"))

    def snapshot(self) -> TrainerState:
        """The state as it is now, which does not change with the run."""
        return replace(self, log_history=self.log_history.copy())

    def continued(self, config: Config) -> TrainerState:
        """The state under the options of the run that goes on from it."""
        options = ("max_steps", "num_train_epochs", "logging_steps", "train_batch_size")
        start = TrainerState.at_start(config)
        return replace(self, **{name: getattr(start, name) for name in options}, log_history=self.log_history.copy())


@dataclass
class _PreviousSteps:
    """Steps of earlier processes of the run, as metrics.jsonl has them."""

    seconds: float = 0.0
    num_tokens: int = 0
    losses: array[float] = field(default_factory=lambda: array("d"))
    aux_losses: array[float] = field(default_factory=lambda: array("d"))

    def add(self, line: Mapping[str, Any]) -> bool:
        """Count a step; False if `line` is none."""
        try:
            seconds, num_tokens, loss = float(line["step_seconds"]), int(line["num_tokens"]), float(line["loss"])
            aux_loss = float(line.get("aux_loss") or 0.0)
        except (KeyError, TypeError, ValueError):
            return False
        self.seconds, self.num_tokens = self.seconds + seconds, self.num_tokens + num_tokens
        self.losses.append(loss)
        self.aux_losses.append(aux_loss)
        return True


class RunLog:
    """The log of one run, on its first rank: `step` after each step, `event` for all else, `finish`, `close`."""

    def __init__(
        self, folder: Path, state: TrainerState, trackers: Trackers, *, ideal_step_seconds: float | None = None
    ) -> None:
        """`state` is carried on: a run that goes on from a checkpoint hands in what that holds, `continued`.

        The logs in `folder` are cut to its steps; raises CheckpointError where that fails. `ideal_step_seconds`: time
        of a step at the full speed of the data sheet, where that is known.
        """
        self.state = state
        self._folder, self._trackers, self._ideal_step_seconds = folder, trackers, ideal_step_seconds
        self._first_step, self._earlier = state.global_step, _PreviousSteps()
        self._cut_logs()
        self._metrics = JsonLines(folder / METRICS_FILE)
        self._lines = JsonLines(folder / LOG_FILE)
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._losses = array("d")
        self._unshown, self._unshown_aux = self._losses_since_last_line()
        self._seconds, self._num_tokens, self._num_samples = 0.0, 0, 0
        self.results: dict[str, dict[str, object]] = _last_evaluation(state)
        """Latest numbers of each kind of event."""
        self._is_open = True

    @property
    def tracker_run_id(self) -> str | None:
        """Text by which the trackers' servers know this run, for a run that goes on from it."""
        return self._trackers.run_id

    def step(self, metrics: StepMetrics) -> None:
        """Record a step; every `logging_steps`-th, the first and the last are shown and handed to trackers.

        The losses that are shown are means over the steps since the last line, each of which counts the same, as in
        transformers' Trainer; everything else is the step's own.
        """
        state = self.state
        self._metrics.append(asdict(metrics))
        self._recent.append(metrics.step_seconds)
        self._losses.append(metrics.loss)
        self._unshown.append(metrics.loss)
        self._unshown_aux.append(metrics.aux_loss or 0.0)
        self._seconds += metrics.step_seconds
        self._num_tokens += metrics.num_tokens
        self._num_samples += metrics.num_samples
        state.global_step, state.epoch = metrics.step, metrics.epoch
        state.num_input_tokens_seen += metrics.num_tokens
        if metrics.step % state.logging_steps and metrics.step not in (1, state.max_steps):
            return
        aux_loss = None if metrics.aux_loss is None else _mean(self._unshown_aux)
        metrics = replace(metrics, loss=_mean(self._unshown), aux_loss=aux_loss)
        self._unshown, self._unshown_aux = array("d"), array("d")
        logger.info("%s", step_line(metrics, state.max_steps, self._seconds_left()))
        numbers: dict[str, float] = {
            name: getattr(metrics, name)
            for name in (
                *("loss", "aux_loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds"),
                *("peak_gpu_memory_gib", "peak_host_memory_gib", "loss_scale"),
            )
            if getattr(metrics, name) is not None
        }
        if self._ideal_step_seconds is not None:
            numbers["mfu"] = self._ideal_step_seconds / metrics.step_seconds
        waits = dict(metrics.wait_seconds)
        self._add({**numbers, "wait_seconds": waits}, {"loss": metrics.loss, "lr": metrics.learning_rate})
        causes = {f"wait_seconds/{cause}": seconds for cause, seconds in waits.items()}
        self._track("train", {**numbers, **causes, "epoch": metrics.epoch})

    def event(self, name: str, numbers: Mapping[str, float]) -> None:
        """Record numbers that are no step's, such as `loss` of `eval`; they belong to the last step.

        The latest ones of a name are left in `<name>_results.json`.
        """
        named: dict[str, object] = {f"{name}_{key}": value for key, value in numbers.items()}
        self.results[name] = {**named, "epoch": self.state.epoch}
        self._add(named, {"eval_loss": named["eval_loss"]} if "eval_loss" in named else None)
        self._track(name, numbers)

    def note_best(self, metric: float, step: int, checkpoint: Path | None) -> None:
        """From now on the state tells that the best evaluation so far was `metric`, after `step`.

        `checkpoint` has the weights of that step; None if they were not saved.
        """
        state = self.state
        state.best_metric, state.best_global_step = metric, step
        state.best_model_checkpoint = None if checkpoint is None else str(checkpoint)

    def forget_best(self) -> None:
        """From now on the state tells of no best evaluation: those to come do not compare with those before."""
        state = self.state
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def take_evaluation(self, step: int) -> None:
        """Make the evaluation behind `step`, whose weights are the run's result, the one that results tell of."""
        found = next((entry for entry in self.state.log_history.evaluations() if entry["step"] == step), None)
        self.results.pop("eval", None)
        if found is not None:
            self.results["eval"] = _numbers_of_evaluation(found)

    def write_state(self, folder: Path) -> None:
        """Write trainer_state.json into `folder`: a checkpoint's, or the run's own. Raises OSError."""
        _write_whole(folder / STATE_FILE, self.state.to_json())

    def finish(self) -> OSError | None:
        """After the last step: leave the state and the results; returns what kept them from being written, told."""
        if self._losses:
            self.results = {"train": self._train_results(), **self.results}
        everything = {key: value for part in self.results.values() for key, value in part.items()}
        everything["epoch"] = self.state.epoch
        try:
            for lines in (self._metrics, self._lines):
                lines.flush()
            self.write_state(self._folder)
            if "eval" not in self.results:  # that of the model before, where a run went on behind its end
                (self._folder / "eval_results.json").unlink(missing_ok=True)
            for name, own in {**self.results, "all": everything}.items():
                _write_whole(self._folder / f"{name}_results.json", json_text(own, indent=2))
        except OSError as error:
            logger.warning("cannot write all results of the run to %s (%s)", self._folder, reason_of(error))
            return error
        return None

    def _train_results(self) -> dict[str, object]:
        """Numbers of all steps of this process, which go into the history too; with totals for a resumed run."""
        numbers: dict[str, object] = {
            "train_loss": _mean(self._losses),
            "train_runtime": self._seconds,
            "train_samples_per_second": self._num_samples / self._seconds,
            "train_steps_per_second": len(self._losses) / self._seconds,
            "train_tokens_per_second": self._num_tokens / self._seconds,
        }
        if self._first_step:
            numbers |= {"train_resumed_from_step": self._first_step, "train_steps_total": self.state.global_step}
            if len(self._earlier.losses) == self._first_step:  # else the steps before are in another folder
                numbers["train_loss_total"] = _mean([*self._earlier.losses, *self._losses])
                numbers["train_runtime_total"] = self._total_seconds
        self._add(numbers, None)
        return {**numbers, "epoch": self.state.epoch, "num_input_tokens_seen": self.state.num_input_tokens_seen}

    def close(self) -> None:
        """Close files and trackers; nothing can be recorded any more. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._metrics.close()
            self._lines.close()
            self._trackers.close()

    @property
    def last_loss(self) -> float | None:
        """Loss of the last step by itself; None if this process made none."""
        return self._losses[-1] if self._losses else None

    def _losses_since_last_line(self) -> tuple[array[float], array[float]]:
        """Losses, and those over routers, of steps before a resume that no line has told of, as far as they are here.

        Without routers the latter mean nothing.
        """
        done, earlier = self._first_step, self._earlier
        if len(earlier.losses) != done:
            return array("d"), array("d")
        shown = max(min(1, done), done - done % self.state.logging_steps)
        return earlier.losses[shown:], earlier.aux_losses[shown:]

    @property
    def _total_seconds(self) -> float:
        return self._earlier.seconds + self._seconds

    def _cut_logs(self) -> None:
        """Remove lines of steps that the state does not have: they are made again."""
        last, earlier = self._first_step, self._earlier
        num_known = sum(
            "eval_loss" in entry and entry["step"] == last for entry in self.state.log_history.evaluations()
        )

        def is_earlier(line: Mapping[str, Any]) -> bool:
            return type(line.get("step")) is int and line["step"] <= last and earlier.add(line)

        def is_shown_before(line: Mapping[str, Any]) -> bool:
            nonlocal num_known
            step, is_evaluation = line.get("current_steps"), "eval_loss" in line
            if type(step) is not int or step > last:
                return False
            num_known -= is_evaluation and step == last
            return step < last or not is_evaluation or num_known >= 0

        for name, keeps in ((METRICS_FILE, is_earlier), (LOG_FILE, is_shown_before)):
            path = self._folder / name
            try:
                num_lines = filter_lines(path, keeps)
            except OSError as error:
                raise CheckpointError(
                    f"cannot cut {path} to the {last} steps of the checkpoint ({reason_of(error)}). Free some space, "
                    "or move it away."
                ) from error
            if num_lines:
                logger.info("%s: %d lines behind step %d are removed; the run goes on there", path, num_lines, last)

    def _seconds_left(self) -> float:
        return statistics.median(self._recent) * (self.state.max_steps - self.state.global_step)

    def _add(self, numbers: Mapping[str, object], shown: Mapping[str, object] | None) -> None:
        """Put `numbers` into the history, and a line of what is `shown` of them into trainer_log.jsonl."""
        state = self.state
        state.log_history.append({**numbers, "epoch": state.epoch, "step": state.global_step})
        if shown is None:
            return
        seconds = self._total_seconds
        self._lines.append(
            {
                "current_steps": state.global_step,
                "total_steps": state.max_steps,
                **shown,
                "epoch": state.epoch,
                "percentage": round(100 * state.global_step / state.max_steps, 2),
                "elapsed_time": format_clock(seconds),
                "remaining_time": format_clock(self._seconds_left()) if self._recent else None,
                "throughput": round((self._earlier.num_tokens + self._num_tokens) / seconds, 2) if seconds else None,
                "total_tokens": state.num_input_tokens_seen,
            }
        )

    def _track(self, name: str, numbers: Mapping[str, float]) -> None:
        self._trackers.log(self.state.global_step, {f"{name}/{key}": value for key, value in numbers.items()})


def _write_whole(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def _mean(losses: Sequence[float]) -> float:
    """Mean of those that are finite; where none is, of all."""
    return statistics.fmean([loss for loss in losses if math.isfinite(loss)] or losses)


def _last_evaluation(state: TrainerState) -> dict[str, dict[str, object]]:
    """The results that `event` left last, of a run that goes on."""
    found = next(state.log_history.evaluations(), None)
    return {} if found is None else {"eval": _numbers_of_evaluation(found)}


def _numbers_of_evaluation(entry: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in entry.items() if name.startswith("eval_") or name == "epoch"}


def _no_state(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a state of a run as this version of Mobius writes it: {problem}. Go on from another checkpoint."
    )
