"""Training loop around the steps: log, evaluation, checkpoints, and reasons to stop before the last step.

    step -> log -> evaluate, if it is due -> save, if it is due or the run stops -> next step

All ranks decide the same: signals and time limits of one rank reach all in the all-gather of the step's numbers.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from tqdm import tqdm

from mobius.checkpoint.folders import checkpoint_path
from mobius.checkpoint.resume import LAUNCH, REPLICAS, TRACKER_RUN
from mobius.checkpoint.saver import CheckpointSaver, StepMetadata
from mobius.config.config import Config, EvalStrategy, SaveStrategy, steps_between
from mobius.errors import NonFiniteLossError
from mobius.log import RANK_ZERO_ONLY
from mobius.ranks import launch_id
from mobius.reporting.events import Evaluated, StepMetrics
from mobius.reporting.run_log import METRICS_FILE, RunLog
from mobius.reporting.summary import StepTotals
from mobius.reporting.trainer_state import TrainerState
from mobius.signal_handling import RunStatus
from mobius.training.evaluation.best_evaluation import BEST, BEST_SAVED, BestEvaluation, metric_value
from mobius.training.evaluation.evaluator import EvaluationResult, Evaluator
from mobius.training.trainer import Trainer

logger = logging.getLogger(__name__)

_NOTHING_SAVED: Final = "training is lost: no checkpoint is complete"


class StopReason(StrEnum):
    """Reason for which a run ends."""

    LAST_STEP = "last step"
    EARLY_STOPPING = "early stopping"
    SIGNAL = "signal"
    TIME = "time"


_FOLLOWS: Final = {
    None: "training goes on",
    StopReason.LAST_STEP: "the model is saved next",
    StopReason.EARLY_STOPPING: "the model is saved next",
    StopReason.SIGNAL: "the run ends",
    StopReason.TIME: "the run ends",
}
"""Text that a failed save prints about the next step of the run."""


def numbers_of(result: EvaluationResult) -> dict[str, float]:
    """Return the numbers of an evaluation by their names in logs and trackers."""
    numbers: dict[str, float] = {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "token_accuracy": result.token_accuracy,
        "runtime": result.seconds,
        "samples_per_second": result.num_samples / result.seconds,
        "tokens_per_second": result.tokens_per_second,
    }
    for name, scores in result.by_dataset.items():
        numbers |= {f"{name}_{key}": getattr(scores, key) for key in ("loss", "perplexity", "token_accuracy")}
    return numbers


def early_stopping_line(step: int, best: BestEvaluation, patience: int) -> str:
    """Return the log line of a run that stops early after `step`."""
    name, number = best.metric.value.replace("_", " "), best.evaluations_since
    reason = f"none of {number} evaluations had a finite {name}"
    if best.value is not None:
        reason = f"none of the last {number} evaluations had a better {name} than {best.value:.4f} of step {best.step}"
    return f"early stopping after step {step}: {reason} (--early_stopping_patience {patience})"


@dataclass
class _LoopGather:
    """Numbers that ranks gather after each step: progress of saves, and requests to stop."""

    saver: CheckpointSaver | None
    run_status: RunStatus
    is_time_up: Callable[[], bool]
    ending: StopReason | None = None

    def local(self) -> Sequence[float]:
        name = self.run_status.stop_signal
        requests = [float(signal.Signals[name]) if name else 0.0, float(self.is_time_up())]
        return [*requests, *(self.saver.local() if self.saver else ())]

    def gathered(self, table: Tensor) -> None:
        number, is_time_up = table[:, :2].amax(0).tolist()
        if number:
            self.run_status.request_stop(signal.Signals(int(number)).name)
            self.ending = StopReason.SIGNAL
        elif is_time_up:
            self.ending = StopReason.TIME
        if self.saver is not None:
            self.saver.gathered(table[:, 2:])


@dataclass(kw_only=True)
class TrainingLoop:
    """Log, evaluations and checkpoints between steps. `log` is None except on the first rank."""

    config: Config
    trainer: Trainer
    saver: CheckpointSaver | None
    evaluator: Evaluator | None
    log: RunLog | None
    run_status: RunStatus
    folder: Path
    """Folder of the run's files from the first step on."""
    save_dir: Path
    started: float
    """Time of `time.monotonic` at which the process began."""
    num_steps_done: int = 0
    epoch: float = 0.0
    best: BestEvaluation
    num_replicas: int = 1
    best_saved: BestEvaluation
    """Best evaluation among those with a checkpoint."""
    older: str | None = None
    """Text that an interruption prints about older results in the folder, if any."""
    recreate_run_folder: Callable[[], None] = lambda: None
    """Called after each step on the first rank to create the run's folder again if it is missing."""
    steps: StepTotals = field(default_factory=StepTotals)
    evaluated_step: int | None = None
    """Step whose weights were evaluated last."""
    result_step: int | None = None
    """Step whose weights are the result, if it is not the last one."""

    def run(self) -> StopReason:
        """Train to the last step or an earlier stop; a signal or time limit saves a checkpoint first; collective.

        When it returns, all updates and saves are complete.
        """
        total = self.config.optim.num_steps
        step_gather = _LoopGather(self.saver, self.run_status, self._is_time_up)
        self.trainer.step_gather = step_gather
        if self.saver is not None and self.log is not None:
            self.saver.on_saved = self.log.emit
        if self.evaluator is not None and self.config.evaluation.eval_on_start and self.num_steps_done == 0:
            self._update_run_status(0, can_save=False)
            self.evaluate(0)
        self._update_run_status(self.num_steps_done)
        progress = tqdm(
            total=total,
            initial=self.num_steps_done,
            desc="training",
            unit="step",
            leave=False,
            disable=True if self.log is None else None,
        )
        ending = StopReason.LAST_STEP
        try:
            for metrics in self.trainer.train():
                progress.update()
                if (reason := self._after_step(metrics, step_gather)) is not None:
                    ending = reason
                    break
        except NonFiniteLossError as error:
            if self.saver is not None:
                self.saver.finish()  # all ranks raise this error
            error.add_note(self._after_failure())
            raise
        except torch.OutOfMemoryError as error:
            error.add_note(self._after_failure())
            raise
        finally:
            progress.close()
        self.trainer.drain()
        if self.saver is not None:
            self.saver.finish()
        return ending

    def evaluate(self, step: int) -> EvaluationResult:
        """Evaluate the current weights and record the result; collective."""
        assert self.evaluator is not None, "there is nothing to evaluate on"
        result = self.evaluator.evaluate(show_progress=self.log is not None)
        if self.log is not None:
            self.log.emit(Evaluated(step=step, numbers=numbers_of(result), num_samples=result.num_samples))
        if self.best.update(result, step) and self.log is not None and self.best.value is not None:
            self.log.state.set_best(self.best.value, step)
        self.evaluated_step = step
        self.trainer.restart_step_timer()
        return result

    def evaluate_final(self) -> None:
        """Make the results those of the run's final weights; collective.

        Evaluates them with --do_eval unless that was just done. The best weights have an evaluation already.
        """
        step = self.trainer.num_steps_done if self.result_step is None else self.result_step
        if step == self.evaluated_step:
            return
        if self.config.evaluation.do_eval:
            self.evaluate(step)
        elif self.result_step is not None and self.log is not None:
            self.log.report_evaluation(step)

    def _after_step(self, metrics: StepMetrics, step_gather: _LoopGather) -> StopReason | None:
        """Log, evaluate and save after a step; returns the reason to stop now, if any."""
        config, step, is_last = self.config, metrics.step, metrics.step == self.config.optim.num_steps
        ends_epoch = math.floor(metrics.epoch) > math.floor(self.epoch)
        self.epoch = metrics.epoch
        self.steps.add(metrics)
        if self.log is not None:
            self.recreate_run_folder()
            self.log.emit(metrics)
        ending = None if is_last else step_gather.ending
        evaluation, saving = config.evaluation, config.saving
        result = None
        if self.evaluator is not None and (
            (evaluation.eval_strategy is EvalStrategy.EPOCH and (ends_epoch or is_last))
            or (evaluation.eval_strategy is EvalStrategy.STEPS and self._is_due(step, evaluation.eval_steps))
        ):
            result = self.evaluate(step)
            patience = evaluation.early_stopping_patience
            if patience is not None and self.best.evaluations_since >= patience and not is_last and ending is None:
                ending = StopReason.EARLY_STOPPING
                logger.info("%s", early_stopping_line(step, self.best, patience), extra=RANK_ZERO_ONLY)
        is_due = (saving.save_strategy is SaveStrategy.EPOCH and ends_epoch) or (
            saving.save_strategy is SaveStrategy.STEPS and self._is_due(step, saving.save_steps)
        )
        if self.saver is not None and (is_due or ending in (StopReason.SIGNAL, StopReason.TIME)):
            self._save(metrics, result, ending or (StopReason.LAST_STEP if is_last else None))
        self._update_run_status(step)
        return ending

    def _save(self, metrics: StepMetrics, result: EvaluationResult | None, ending: StopReason | None) -> None:
        assert self.saver is not None, "nothing is saved"
        is_best = result is not None and self.best_saved.update(result, metrics.step)
        state: TrainerState | str = ""
        if self.log is not None:
            if self.best.step == metrics.step and self.best.value is not None and result is not None:
                self.log.state.set_best(self.best.value, metrics.step, checkpoint_path(self.save_dir, metrics.step))
            state = self.log.state.snapshot()
        metric = None if result is None else metric_value(self.best.metric, result)
        self.saver.save(
            StepMetadata(
                step=metrics.step,
                counts=self.trainer.counts,
                epoch=metrics.epoch,
                metric=metric if metric is not None and math.isfinite(metric) else None,
                is_best=is_best,
                trainer_state=state,
                loop_state=self._loop_state(),
                follows=_FOLLOWS[ending],
            )
        )

    def _loop_state(self) -> dict[str, Any]:
        both = {BEST: self.best, BEST_SAVED: self.best_saved}
        return {
            LAUNCH: launch_id(),
            REPLICAS: self.num_replicas,
            TRACKER_RUN: None if self.log is None else self.log.tracker_run_id,
            **{key: {**asdict(best), "metric": best.metric.value} for key, best in both.items()},
        }

    def _is_due(self, step: int, every: float) -> bool:
        return step % steps_between(every, self.config.optim.num_steps) == 0

    def _is_time_up(self) -> bool:
        limit = self.config.saving.max_run_time
        return limit is not None and time.monotonic() - self.started >= 60 * limit

    def _update_run_status(self, step: int, *, can_save: bool = True) -> None:
        """Set the text that an interruption prints from now on; a pending save may be complete by then."""
        total = self.config.optim.num_steps
        where = f"after step {step} of {total}" if step else f"in step 1 of {total}"
        numbers = f"every step's numbers are in {self.folder / METRICS_FILE}"
        if self.saver is None:
            lost = f"{where}: training is lost, because only the end is saved; {numbers}"
            self.run_status.set_status(f"{lost}, and {self.older}" if self.older else lost)
            return
        saver = self.saver

        def left() -> str:
            saved = f"the newest checkpoint is {saver.newest}"
            return f"{where}: {saved if saver.newest else _NOTHING_SAVED}; {numbers}"

        def lost_now() -> str:
            return f"training since step {saver.newest_step} would be lost"

        self.run_status.set_status(left)
        if step < total and can_save:
            self.run_status.save_on_signal(lost_now, seconds=self._seconds_to_save())
        else:
            self.run_status.stop_saving_on_signal()

    def _seconds_to_save(self) -> float | None:
        """Return the seconds from a request to stop to the end of the save; None if unknown."""
        assert self.saver is not None, "nothing is saved"
        seconds = self.saver.seconds
        return None if seconds is None or not self.steps else seconds + self.steps.last.step_seconds

    def _after_failure(self) -> str:
        numbers = f"the numbers of the steps before it are in {self.folder / METRICS_FILE}"
        if self.saver is None or self.saver.newest is None:
            return f"Nothing is saved; {numbers}."
        return f"The newest checkpoint is {self.saver.newest}; {numbers}."
