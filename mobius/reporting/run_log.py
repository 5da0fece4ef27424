"""Log of a run: receives all its events and writes the log lines and files.

    event -> events.jsonl          every event unchanged, for other programs
          -> the log               a line of each shown step, evaluation and checkpoint
          -> metrics.jsonl         every step with all measurements
          -> trainer_log.jsonl     shown steps and evaluations, with the names that LLaMA-Factory's boards read
          -> trainer_state.json    the same in transformers' TrainerState; rewritten at the end and by each checkpoint
          -> trackers              shown steps and evaluations
          -> *_results.json        the last numbers of train, eval, ...; all_results.json has all these numbers

A run that resumes from a checkpoint in its folder removes the lines after that step and appends to the files.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from mobius.errors import CheckpointError, reason_of
from mobius.files.atomic_files import atomic_write
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

METRICS_FILE: Final = "metrics.jsonl"
_FILES: Final = (METRICS_FILE, "trainer_log.jsonl", "events.jsonl")
_SHOWN: Final = (
    *("loss", "aux_loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds"),
    *("peak_gpu_memory_gib", "peak_host_memory_gib", "loss_scale"),
)
"""Numbers of a step that go to trackers and into the history."""
_RECENT_STEPS: Final = 20
"""Number of recent steps whose median time predicts the time left."""
_WAITING_WARNINGS: Final = 100
"""Maximum number of warnings that wait for a log."""


class WarningRecorder(logging.Handler):
    """Context in which warnings of the program become events; the events wait until a log is connected."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._waiting: deque[WarningLogged] = deque(maxlen=_WAITING_WARNINGS)  # ranks without a log never connect
        self._take: Callable[[WarningLogged], None] = self._waiting.append
        # A warning that the event file cannot be written would itself be written to this file.
        self.addFilter(lambda record: record.name != json_lines.__name__)

    def __enter__(self) -> Self:
        logging.getLogger("mobius").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("mobius").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a warning on as an event."""
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
        """Take the state to update; a resumed run passes the checkpoint's state (`TrainerState.continued`).

        Lines after the state's steps are removed from the files in `folder`; raises CheckpointError if that fails.
        `ideal_step_seconds` is the time of a step at the data sheet's peak speed, if known.
        """
        self.state = state
        self._folder, self._trackers, self._ideal_step_seconds = folder, trackers, ideal_step_seconds
        self._first_step = state.global_step
        self._steps, self._earlier = StepTotals(), StepTotals()  # of this process, and of the run's earlier processes
        self._unshown: list[tuple[float, float]] = []
        """Losses and router losses of the steps since the last shown step."""
        self._cut_files()
        self._metrics, self._lines, self._feed = (JsonLines(folder / name) for name in _FILES)
        self._feed_lock = threading.Lock()
        self.results: dict[str, dict[str, object]] = {}
        """Latest numbers of each kind of event."""
        self.report_evaluation()
        self._is_open, self._has_ended = True, False

    @property
    def tracker_run_id(self) -> str | None:
        """Id of this run on the trackers' servers, which a run that resumes from it needs."""
        return self._trackers.run_id

    def emit(self, event: Event) -> None:
        """Record an event and show it; any thread may call this, except for steps and evaluations.

        Every `logging_steps`-th step, the first and the last are shown and passed to trackers. Shown losses are means
        of the steps since the last shown step, with equal weights, as in transformers' Trainer. All other numbers
        belong to the shown step alone.
        """
        if not self._is_open:
            return
        if isinstance(event, StepMetrics):
            self._take_step(event)
        place = {"event": event.kind, "time": round(time.time(), 3), "step": self.state.global_step}
        with self._feed_lock:
            if self._is_open:
                self._feed.append({**place, **(event.record() if isinstance(event, StepMetrics) else asdict(event))})
        if isinstance(event, StepMetrics):
            if self._is_shown(event):
                self._show_step(event)
        elif isinstance(event, Evaluated):
            logger.info("%s", event.line)
            self._take_evaluation(event)
        elif not isinstance(event, WarningLogged | RunEnded):  # the other two kinds are logged elsewhere
            logger.info("%s", event.line)

    def _take_step(self, metrics: StepMetrics) -> None:
        self._metrics.append(metrics.record())
        self._steps.add(metrics)
        self._unshown.append((metrics.loss, metrics.aux_loss or 0.0))
        self.state.global_step, self.state.epoch = metrics.step, metrics.epoch
        self.state.num_input_tokens_seen += metrics.num_tokens

    def _is_shown(self, metrics: StepMetrics) -> bool:
        return not metrics.step % self.state.logging_steps or metrics.step in (1, self.state.max_steps)

    def _show_step(self, metrics: StepMetrics) -> None:
        losses, aux_losses = zip(*self._unshown, strict=True)
        metrics = replace(metrics, loss=_mean(losses), aux_loss=metrics.aux_loss and _mean(aux_losses))
        self._unshown = []
        logger.info("%s", step_line(metrics, self.state.max_steps, self._seconds_left()))
        logger.debug("%s", detail_line(metrics))
        numbers = {name: value for name in _SHOWN if (value := getattr(metrics, name)) is not None}
        numbers |= metrics.numbers
        if self._ideal_step_seconds is not None:
            numbers["mfu"] = self._ideal_step_seconds / metrics.step_seconds
        waits = dict(metrics.wait_seconds)
        self._add({**numbers, "wait_seconds": waits}, {"loss": metrics.loss, "lr": metrics.learning_rate})
        causes = {f"wait_seconds/{cause}": seconds for cause, seconds in waits.items()}
        self._track("train", {**numbers, **causes, "epoch": metrics.epoch})

    def _take_evaluation(self, event: Evaluated) -> None:
        """Record the numbers of an evaluation after the last step; `finish` writes the latest to eval_results.json."""
        named: dict[str, object] = {f"eval_{key}": value for key, value in event.numbers.items()}
        self.results["eval"] = {**named, "epoch": self.state.epoch}
        self._add(named, {"eval_loss": named["eval_loss"]})
        self._track("eval", event.numbers)

    def report_evaluation(self, step: int | None = None) -> None:
        """Report the evaluation after `step`, whose weights are the run's result; None: the latest evaluation."""
        self.results.pop("eval", None)
        found = (entry for entry in self.state.evaluations() if step is None or entry["step"] == step)
        if entry := next(found, None):
            numbers = {name: value for name, value in entry.items() if name.startswith("eval_") or name == "epoch"}
            self.results["eval"] = numbers

    def write_state(self, folder: Path) -> None:
        """Write trainer_state.json into `folder`, a checkpoint's or the run's. Raises OSError."""
        _write_whole(folder / STATE_FILE, self.state.to_json())

    def finish(self, reason: str = "last step") -> OSError | None:
        """Write the state and the results after the last step; if that fails, logs a warning and returns the error."""
        self._end(reason)
        if self._steps:
            self.results = {"train": self._train_results(), **self.results}
        everything = {key: value for part in self.results.values() for key, value in part.items()}
        everything["epoch"] = self.state.epoch
        try:
            for lines in (self._feed, self._metrics, self._lines):
                lines.flush()
            self.write_state(self._folder)
            if "eval" not in self.results:  # a resumed run's folder may have a file about an earlier model
                (self._folder / "eval_results.json").unlink(missing_ok=True)
            for name, own in {**self.results, "all": everything}.items():
                _write_whole(self._folder / f"{name}_results.json", json_text(own, indent=2))
        except OSError as error:
            logger.warning("cannot write all results of the run to %s (%s)", self._folder, reason_of(error))
            return error
        return None

    def _train_results(self) -> dict[str, object]:
        """Numbers of all steps of this process, with totals for a resumed run; adds them to the history."""
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
            if len(self._earlier.losses) == self._first_step:  # else the lines of earlier steps are in another folder
                numbers["train_loss_total"] = _mean([*self._earlier.losses, *steps.losses])
                numbers["train_runtime_total"] = self._total_seconds
        self._add(numbers, None)
        return {**numbers, "epoch": self.state.epoch, "num_input_tokens_seen": self.state.num_input_tokens_seen}

    def close(self) -> None:
        """Close files and trackers; without `finish`, the run ended with an error. A second call does nothing."""
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
        """Loss of the last step; None if this process has done no step."""
        return self._steps.losses[-1] if self._steps else None

    @property
    def _total_seconds(self) -> float:
        return self._earlier.total_seconds + self._steps.total_seconds

    def _cut_files(self) -> None:
        """Remove lines after the state's last step, since these steps are repeated, and count the remaining steps."""
        last = self._first_step
        for name in _FILES:
            path, known = self._folder / name, (entry for entry in self.state.evaluations() if entry["step"] == last)
            try:
                num_lines = filter_lines(path, partial(self._keeps_line, name == METRICS_FILE, known))
            except OSError as error:
                raise CheckpointError(
                    f"cannot cut {path} to the {last} steps of the checkpoint ({reason_of(error)}). Free some space, "
                    "or move the file away."
                ) from error
            if num_lines:
                logger.info("%s: %d lines after step %d are removed; the run continues there", path, num_lines, last)
        if len(self._earlier) != last:  # the lines of earlier steps are in another folder
            self._unshown = []

    def _keeps_line(self, is_step: bool, known_evaluations: Iterator[object], line: Mapping[str, Any]) -> bool:
        """Whether the state includes the line's event; for an evaluation after its last step, whether it is listed."""
        step = line.get("current_steps", line.get("step"))
        if type(step) is not int or step > self._first_step:
            return False
        if is_step:
            with suppress(TypeError):  # a line of another version is not counted
                metrics = StepMetrics.from_record(as_numbers(line))
                self._earlier.add(metrics)
                self._unshown.append((metrics.loss, metrics.aux_loss or 0.0))
                self._unshown = [] if self._is_shown(metrics) else self._unshown
        is_evaluation = "eval_loss" in line or line.get("event") == Evaluated.kind
        return step < self._first_step or not is_evaluation or next(known_evaluations, None) is not None

    def _seconds_left(self) -> float:
        recent = self._steps.seconds[-_RECENT_STEPS:]
        return statistics.median(recent) * (self.state.max_steps - self.state.global_step)

    def _add(self, numbers: Mapping[str, object], shown: Mapping[str, object] | None) -> None:
        """Append `numbers` to the history, and `shown`, if any, as a line to trainer_log.jsonl."""
        state = self.state
        state.add({**numbers, "epoch": state.epoch, "step": state.global_step})
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
                "remaining_time": format_clock(self._seconds_left()) if self._steps else None,
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
