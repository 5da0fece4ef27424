"""Owns what a run tells of itself while it trains: the step's line, files of its folder, and trackers.

metrics.jsonl        every step with all that is measured
trainer_log.jsonl    steps that are shown, in the names that LLaMA-Factory's boards read
trainer_state.json   the same in transformers' TrainerState; whole, at the end and with each checkpoint
*_results.json       the last numbers of train, eval, ...; all_results.json has all of them
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from mobius.config.config import Config
from mobius.output.metrics import JsonLines, StepMetrics, clock_text, json_text, step_line
from mobius.output.trackers import Trackers
from mobius.writing import replaced_whole

logger = logging.getLogger(__name__)

METRICS_FILE: Final = "metrics.jsonl"
STATE_FILE: Final = "trainer_state.json"
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
    log_history: list[dict[str, object]] = field(default_factory=list)
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


class RunLog:
    """The log of one run, on its first rank: `step` after each step, `event` for all else, `finish`, `close`."""

    def __init__(
        self, folder: Path, state: TrainerState, trackers: Trackers, *, ideal_step_seconds: float | None = None
    ) -> None:
        """`state` is carried on: a run that goes on from a checkpoint hands in what that holds.

        `ideal_step_seconds`: time of a step at the full speed of the data sheet, where that is known.
        """
        self.state = state
        self._folder, self._trackers, self._ideal_step_seconds = folder, trackers, ideal_step_seconds
        self._metrics = JsonLines(folder / METRICS_FILE)
        self._lines = JsonLines(folder / "trainer_log.jsonl")
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._losses: list[float] = []
        self._seconds, self._num_tokens, self._num_samples = 0.0, 0, 0
        self.results: dict[str, dict[str, object]] = {}
        """Latest numbers of each kind of event."""
        self._is_open = True

    def step(self, metrics: StepMetrics) -> None:
        """Record a step; every `logging_steps`-th, the first and the last are shown and handed to trackers."""
        state = self.state
        self._metrics.append(asdict(metrics))
        self._recent.append(metrics.step_seconds)
        self._losses.append(metrics.loss)
        self._seconds += metrics.step_seconds
        self._num_tokens += metrics.num_tokens
        self._num_samples += metrics.num_samples
        state.global_step, state.epoch = metrics.step, metrics.epoch
        state.num_input_tokens_seen += metrics.num_tokens
        if metrics.step % state.logging_steps and metrics.step not in (1, state.max_steps):
            return
        logger.info("%s", step_line(metrics, state.max_steps, self._seconds_left()))
        numbers: dict[str, float] = {
            name: getattr(metrics, name)
            for name in (
                *("loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds"),
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

    def write_state(self, folder: Path) -> None:
        """Write trainer_state.json into `folder`: a checkpoint's, or the run's own. Raises OSError."""
        state = asdict(self.state)
        state["num_train_epochs"] = self.state.num_train_epochs or math.ceil(self.state.epoch)
        _write_whole(folder / STATE_FILE, json_text(state, indent=2))

    def finish(self) -> None:
        """After the last step: leave the state and the results. What cannot be written is told, and ends nothing."""
        if self._losses:
            self.results = {"train": self._train_results(), **self.results}
        everything = {key: value for part in self.results.values() for key, value in part.items()}
        everything["epoch"] = self.state.epoch
        try:
            self.write_state(self._folder)
            for name, own in {**self.results, "all": everything}.items():
                _write_whole(self._folder / f"{name}_results.json", json_text(own, indent=2))
        except OSError as error:
            logger.warning("cannot write all results of the training to %s (%s)", self._folder, error.strerror)

    def _train_results(self) -> dict[str, object]:
        """Numbers of all steps of this process, which go into the history too."""
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        numbers: dict[str, object] = {
            "train_loss": statistics.fmean(finite) if finite else math.nan,
            "train_runtime": self._seconds,
            "train_samples_per_second": self._num_samples / self._seconds,
            "train_steps_per_second": len(self._losses) / self._seconds,
            "train_tokens_per_second": self._num_tokens / self._seconds,
        }
        self._add(numbers, None)
        return {**numbers, "epoch": self.state.epoch, "num_input_tokens_seen": self.state.num_input_tokens_seen}

    def close(self) -> None:
        """Close files and trackers; nothing can be recorded any more. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._metrics.close()
            self._lines.close()
            self._trackers.close()

    def _seconds_left(self) -> float:
        return statistics.median(self._recent) * (self.state.max_steps - self.state.global_step)

    def _add(self, numbers: Mapping[str, object], shown: Mapping[str, object] | None) -> None:
        """Put `numbers` into the history, and a line of what is `shown` of them into trainer_log.jsonl."""
        state = self.state
        state.log_history.append({**numbers, "epoch": state.epoch, "step": state.global_step})
        if shown is None:
            return
        has_steps = bool(self._recent)
        self._lines.append(
            {
                "current_steps": state.global_step,
                "total_steps": state.max_steps,
                **shown,
                "epoch": state.epoch,
                "percentage": round(100 * state.global_step / state.max_steps, 2),
                "elapsed_time": clock_text(self._seconds),
                "remaining_time": clock_text(self._seconds_left()) if has_steps else None,
                "throughput": round(self._num_tokens / self._seconds, 2) if has_steps else None,
                "total_tokens": state.num_input_tokens_seen,
            }
        )

    def _track(self, name: str, numbers: Mapping[str, float]) -> None:
        self._trackers.log(self.state.global_step, {f"{name}/{key}": value for key, value in numbers.items()})


def _write_whole(path: Path, text: str) -> None:
    with replaced_whole(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
