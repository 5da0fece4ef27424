"""Log of a run: receives all its events and writes the log lines and files.

    event -> events.jsonl          every event unchanged, for other programs
          -> the log               a line of a step that is shown, of an evaluation, of a checkpoint
          -> metrics.jsonl         every step with all measurements
          -> trainer_log.jsonl     steps that are shown, in the names that LLaMA-Factory's boards read
          -> trainer_state.json    the same in transformers' TrainerState; rewritten at the end and with each checkpoint
          -> trackers              what is shown
          -> *_results.json        the last numbers of train, eval, ...; all_results.json has all of them

A run that resumes from a checkpoint in its folder removes the lines after that step and appends to the files.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, Self

from mobius.atomic_files import atomic_write
from mobius.errors import CheckpointError, reason_of
from mobius.reporting import json_lines
from mobius.reporting.events import (
    Evaluated,
    Event,
    RunEnded,
    StepMetrics,
    WarningLogged,
    detail_line,
    format_clock,
    step_line,
)
from mobius.reporting.json_lines import JsonLines, as_numbers, filter_lines, json_text
from mobius.reporting.summary import StepTotals
from mobius.reporting.trackers import Trackers
from mobius.reporting.trainer_state import STATE_FILE, TrainerState

logger = logging.getLogger(__name__)

EVENTS_FILE: Final = "events.jsonl"
METRICS_FILE: Final = "metrics.jsonl"
LOG_FILE: Final = "trainer_log.jsonl"
_SHOWN: Final = (
    *("loss", "aux_loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds"),
    *("peak_gpu_memory_gib", "peak_host_memory_gib", "loss_scale"),
)
"""Numbers of a step that trackers and the history get."""
_RECENT_STEPS: Final = 20
"""Number of last steps whose median predicts the time left."""
_WAITING_WARNINGS: Final = 100
"""Maximum number of warnings that wait for a log."""


class WarningRecorder(logging.Handler):
    """Context in which warnings of the program become events; they wait until a log is connected."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._waiting: deque[WarningLogged] = deque(maxlen=_WAITING_WARNINGS)  # ranks without a log connect none
        self._take: Callable[[WarningLogged], None] = self._waiting.append
        # Warnings about an event file that cannot be written would be written to it.
        self.addFilter(lambda record: record.name != json_lines.__name__)

    def __enter__(self) -> Self:
        logging.getLogger("mobius").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("mobius").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a warning on."""
        self._take(WarningLogged(text=record.getMessage()))

    def connect(self, log: RunLog) -> None:
        """Send warnings to `log` from now on, earlier ones first."""
        self._take = log.emit
        for event in self._waiting:
            log.emit(event)


class RunLog:
    """Log of one run, on its first rank: `emit` for each event, then `finish` and `close`."""

    def __init__(
        self, folder: Path, state: TrainerState, trackers: Trackers, *, ideal_step_seconds: float | None = None
    ) -> None:
        """`state` is updated; a resumed run passes the checkpoint's, `continued`.

        The files in `folder` are cut to its steps; raises CheckpointError if that fails. `ideal_step_seconds`: time of
        a step at the data sheet's peak speed, if known.
        """
        self.state = state
        self._folder, self._trackers, self._ideal_step_seconds = folder, trackers, ideal_step_seconds
        self._first_step, self._earlier = state.global_step, StepTotals()  # of earlier processes of the run
        self._cut_files()
        self._feed, self._metrics, self._lines = (
            JsonLines(folder / name) for name in (EVENTS_FILE, METRICS_FILE, LOG_FILE)
        )
        self._feed_lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._steps = StepTotals()
        self._unshown, self._unshown_aux = self._losses_since_last_line()
        self.results: dict[str, dict[str, object]] = _last_evaluation(state)
        """Latest numbers of each kind of event."""
        self._is_open, self._has_ended = True, False

    @property
    def tracker_run_id(self) -> str | None:
        """Id of this run on the trackers' servers, for a run that resumes it."""
        return self._trackers.run_id

    def emit(self, event: Event) -> None:
        """Record an event and show it; any thread may call it for events that are no step or evaluation.

        Every `logging_steps`-th step, the first and the last are shown and handed to trackers. The losses that are
        shown are means over the steps since the last line, each of which counts the same, as in transformers' Trainer;
        everything else is the step's own.
        """
        if not self._is_open:
            return
        if isinstance(event, StepMetrics):
            self._take_step(event)
        place = {"event": event.kind, "time": round(time.time(), 3), "step": self.state.global_step}
        with self._feed_lock:
            if self._is_open:
                self._feed.append({**place, **asdict(event)})
        if isinstance(event, StepMetrics):
            if not event.step % self.state.logging_steps or event.step in (1, self.state.max_steps):
                self._show_step(event)
        elif isinstance(event, Evaluated):
            logger.info("%s", event.line)
            self._take_evaluation(event)
        elif not isinstance(event, WarningLogged | RunEnded):  # these are logged elsewhere
            logger.info("%s", event.line)

    def _take_step(self, metrics: StepMetrics) -> None:
        self._metrics.append(asdict(metrics))
        self._recent.append(metrics.step_seconds)
        self._steps.add(metrics)
        self._unshown.append(metrics.loss)
        self._unshown_aux.append(metrics.aux_loss or 0.0)
        self.state.global_step, self.state.epoch = metrics.step, metrics.epoch
        self.state.num_input_tokens_seen += metrics.num_tokens

    def _show_step(self, metrics: StepMetrics) -> None:
        aux_loss = None if metrics.aux_loss is None else _mean(self._unshown_aux)
        metrics = replace(metrics, loss=_mean(self._unshown), aux_loss=aux_loss)
        self._unshown, self._unshown_aux = array("d"), array("d")
        logger.info("%s", step_line(metrics, self.state.max_steps, self._seconds_left()))
        logger.debug("%s", detail_line(metrics))
        numbers = {name: value for name in _SHOWN if (value := getattr(metrics, name)) is not None}
        if self._ideal_step_seconds is not None:
            numbers["mfu"] = self._ideal_step_seconds / metrics.step_seconds
        waits = dict(metrics.wait_seconds)
        self._add({**numbers, "wait_seconds": waits}, {"loss": metrics.loss, "lr": metrics.learning_rate})
        causes = {f"wait_seconds/{cause}": seconds for cause, seconds in waits.items()}
        self._track("train", {**numbers, **causes, "epoch": metrics.epoch})

    def _take_evaluation(self, event: Evaluated) -> None:
        """Record numbers of the last step's weights; the latest ones are left in eval_results.json."""
        named: dict[str, object] = {f"eval_{key}": value for key, value in event.numbers.items()}
        self.results["eval"] = {**named, "epoch": self.state.epoch}
        self._add(named, {"eval_loss": named["eval_loss"]})
        self._track("eval", event.numbers)

    def note_best(self, metric: float, step: int, checkpoint: Path | None) -> None:
        """Record in the state that the best evaluation so far was `metric`, after `step`.

        `checkpoint` has the weights of that step; None if they were not saved.
        """
        state = self.state
        state.best_metric, state.best_global_step = metric, step
        state.best_model_checkpoint = None if checkpoint is None else str(checkpoint)

    def forget_best(self) -> None:
        """Remove the best evaluation from the state: later evaluations do not compare with it."""
        state = self.state
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def take_evaluation(self, step: int) -> None:
        """Report the evaluation after `step`, whose weights are the result of the run, in the results."""
        found = next((entry for entry in self.state.log_history.evaluations() if entry["step"] == step), None)
        self.results.pop("eval", None)
        if found is not None:
            self.results["eval"] = _numbers_of_evaluation(found)

    def write_state(self, folder: Path) -> None:
        """Write trainer_state.json into `folder`: a checkpoint's, or the run's own. Raises OSError."""
        _write_whole(folder / STATE_FILE, self.state.to_json())

    def finish(self, reason: str = "last step") -> OSError | None:
        """Leave the state and the results after the last step; returns the error that prevented it, after a warning."""
        self._end(reason)
        if self._steps:
            self.results = {"train": self._train_results(), **self.results}
        everything = {key: value for part in self.results.values() for key, value in part.items()}
        everything["epoch"] = self.state.epoch
        try:
            for lines in (self._feed, self._metrics, self._lines):
                lines.flush()
            self.write_state(self._folder)
            if "eval" not in self.results:  # a resumed run has the evaluation of its earlier model
                (self._folder / "eval_results.json").unlink(missing_ok=True)
            for name, own in {**self.results, "all": everything}.items():
                _write_whole(self._folder / f"{name}_results.json", json_text(own, indent=2))
        except OSError as error:
            logger.warning("cannot write all results of the run to %s (%s)", self._folder, reason_of(error))
            return error
        return None

    def _train_results(self) -> dict[str, object]:
        """Numbers of all steps of this process, which go into the history too; with totals for a resumed run."""
        steps, seconds = self._steps, self._steps.total_seconds
        numbers: dict[str, object] = {
            "train_loss": _mean(steps.losses),
            "train_runtime": seconds,
            "train_samples_per_second": steps.num_samples / seconds,
            "train_steps_per_second": len(steps) / seconds,
            "train_tokens_per_second": steps.num_tokens / seconds,
        }
        if self._first_step:
            numbers |= {"train_resumed_from_step": self._first_step, "train_steps_total": self.state.global_step}
            if len(self._earlier.losses) == self._first_step:  # else the steps before are in another folder
                numbers["train_loss_total"] = _mean([*self._earlier.losses, *steps.losses])
                numbers["train_runtime_total"] = self._total_seconds
        self._add(numbers, None)
        return {**numbers, "epoch": self.state.epoch, "num_input_tokens_seen": self.state.num_input_tokens_seen}

    def close(self) -> None:
        """Close files and trackers; without `finish` the run ended by an error. A second call does nothing."""
        if self._is_open:
            if not self._has_ended:
                self._end("error")
            self._is_open = False
            with self._feed_lock:
                self._feed.close()
            self._metrics.close()
            self._lines.close()
            self._trackers.close()

    def _end(self, reason: str) -> None:
        self._has_ended = True
        self.emit(RunEnded(reason=reason, num_steps=len(self._steps), step_seconds=self._steps.total_seconds))

    @property
    def last_loss(self) -> float | None:
        """Loss of the last step; None if this process made no step."""
        return self._steps.losses[-1] if self._steps else None

    def _losses_since_last_line(self) -> tuple[array[float], array[float]]:
        """Losses and router losses of the steps since the last shown line, of a run that resumes; empty if unknown.

        Without routers the latter mean nothing.
        """
        done, earlier = self._first_step, self._earlier
        if len(earlier.losses) != done:
            return array("d"), array("d")
        shown = max(min(1, done), done - done % self.state.logging_steps)
        return earlier.losses[shown:], earlier.aux_losses[shown:]

    @property
    def _total_seconds(self) -> float:
        return self._earlier.total_seconds + self._steps.total_seconds

    def _cut_files(self) -> None:
        """Remove lines of steps that the state does not have: they are made again."""
        last, earlier = self._first_step, self._earlier
        num_known = sum(
            "eval_loss" in entry and entry["step"] == last for entry in self.state.log_history.evaluations()
        )

        def is_earlier(line: Mapping[str, Any]) -> bool:
            if type(line.get("step")) is not int or line["step"] > last:
                return False
            with suppress(TypeError):  # a line of another version is left as it is
                earlier.add(StepMetrics(**as_numbers(line)))
            return True

        def is_shown_before() -> Callable[[Mapping[str, Any]], bool]:
            num_left = num_known

            def keeps(line: Mapping[str, Any]) -> bool:
                nonlocal num_left
                step = line.get("current_steps", line.get("step"))
                is_evaluation = "eval_loss" in line or line.get("event") == Evaluated.kind
                if type(step) is not int or step > last:
                    return False
                num_left -= is_evaluation and step == last
                return step < last or not is_evaluation or num_left >= 0

            return keeps

        for name, keeps in (
            (METRICS_FILE, is_earlier),
            (LOG_FILE, is_shown_before()),
            (EVENTS_FILE, is_shown_before()),
        ):
            path = self._folder / name
            try:
                num_lines = filter_lines(path, keeps)
            except OSError as error:
                raise CheckpointError(
                    f"cannot cut {path} to the {last} steps of the checkpoint ({reason_of(error)}). Free some space, "
                    "or move it away."
                ) from error
            if num_lines:
                logger.info("%s: %d lines after step %d are removed; the run goes on there", path, num_lines, last)

    def _seconds_left(self) -> float:
        return statistics.median(self._recent) * (self.state.max_steps - self.state.global_step)

    def _add(self, numbers: Mapping[str, object], shown: Mapping[str, object] | None) -> None:
        """Append `numbers` to the history, and `shown`, if any, as a line to trainer_log.jsonl."""
        state = self.state
        state.log_history.append({**numbers, "epoch": state.epoch, "step": state.global_step})
        if shown is None:
            return
        seconds, num_tokens = self._total_seconds, self._earlier.num_tokens + self._steps.num_tokens
        self._lines.append(
            {
                "current_steps": state.global_step,
                "total_steps": state.max_steps,
                **shown,
                "epoch": state.epoch,
                "percentage": round(100 * state.global_step / state.max_steps, 2),
                "elapsed_time": format_clock(seconds),
                "remaining_time": format_clock(self._seconds_left()) if self._recent else None,
                "throughput": round(num_tokens / seconds, 2) if seconds else None,
                "total_tokens": state.num_input_tokens_seen,
            }
        )

    def _track(self, name: str, numbers: Mapping[str, float]) -> None:
        self._trackers.log(self.state.global_step, {f"{name}/{key}": value for key, value in numbers.items()})


def _write_whole(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def _mean(losses: Sequence[float]) -> float:
    """Mean of the finite values; of all values if none is finite."""
    return statistics.fmean([loss for loss in losses if math.isfinite(loss)] or losses)


def _last_evaluation(state: TrainerState) -> dict[str, dict[str, object]]:
    """Latest evaluation results of a resumed run."""
    found = next(state.log_history.evaluations(), None)
    return {} if found is None else {"eval": _numbers_of_evaluation(found)}


def _numbers_of_evaluation(entry: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in entry.items() if name.startswith("eval_") or name == "epoch"}
