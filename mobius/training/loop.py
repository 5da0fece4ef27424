"""Between the steps of a run: records, evaluations, checkpoints, and the ends that come before the last step.

    step -> log -> evaluate, if it is due -> save, if it is due or the run is to end -> next step

All ranks decide alike: what only one knows, a signal or the time, is told to all in the step's exchange of numbers.
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

_NOTHING_KEPT: Final = "what was trained is lost: no checkpoint is complete"


class StopReason(StrEnum):
    """Reasons for which a run ends."""

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
"""Words of a failed save about what follows it."""


def numbers_of(result: EvaluationResult) -> dict[str, float]:
    """Numbers of an evaluation under the names that logs and trackers get."""
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
    """The reason why a run ends after `step`, for the log."""
    name, number = best.metric.value.replace("_", " "), best.evaluations_since
    reason = f"none of {number} evaluations had a finite {name}"
    if best.value is not None:
        reason = f"none of the last {number} evaluations had a better {name} than {best.value:.4f} of step {best.step}"
    return f"early stopping after step {step}: {reason} (--early_stopping_patience {patience})"


@dataclass
class _LoopGather:
    """Numbers that ranks tell each other with each step's: saves, and wishes to end."""

    saver: CheckpointSaver | None
    run_status: RunStatus
    is_time_up: Callable[[], bool]
    ending: StopReason | None = None

    def local(self) -> Sequence[float]:
        name = self.run_status.stop_signal
        told = [float(signal.Signals[name]) if name else 0.0, float(self.is_time_up())]
        return [*told, *(self.saver.local() if self.saver else ())]

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
    """Owns what happens between steps. `log` is the first rank's; `saver` and `evaluator` are there if wanted."""

    config: Config
    trainer: Trainer
    saver: CheckpointSaver | None
    evaluator: Evaluator | None
    log: RunLog | None
    run_status: RunStatus
    folder: Path
    """Where the run's files are from the first step on."""
    save_dir: Path
    started: float
    """Time of `time.monotonic` at which the process began."""
    num_steps_done: int = 0
    epoch: float = 0.0
    best: BestEvaluation
    num_replicas: int = 1
    best_saved: BestEvaluation
    """Best evaluation of those whose weights were to be saved."""
    older: str | None = None
    """Word of an interruption about the results that this run would have replaced, if there are any."""
    recreate_run_folder: Callable[[], None] = lambda: None
    """Called after each step on the first rank, which sees to it that the folder of the run is there."""
    steps: StepTotals = field(default_factory=StepTotals)
    evaluated_step: int | None = None
    """Step whose weights were evaluated last."""
    result_step: int | None = None
    """Step whose weights are the result, where that is not the last one."""

    def run(self) -> StopReason:
        """Train to the end, or until something ends the run before; collective. A checkpoint is saved for the latter.

        All updates are done when it returns, and no save is under way.
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
                if (found := self._after_step(metrics, step_gather)) is not None:
                    ending = found
                    break
        except NonFiniteLossError as error:
            if self.saver is not None:
                self.saver.finish()  # all ranks are here
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
        """Evaluate as the weights are now, and record it; collective."""
        assert self.evaluator is not None, "there is nothing to evaluate on"
        result = self.evaluator.evaluate(show_progress=self.log is not None)
        if self.log is not None:
            self.log.emit(Evaluated(step=step, numbers=numbers_of(result), num_samples=result.num_samples))
        if self.best.update(result, step) and self.log is not None and self.best.value is not None:
            self.log.note_best(self.best.value, step, None)
        self.evaluated_step = step
        self.trainer.restart_step_timer()
        return result

    def evaluate_final(self) -> None:
        """See to it that results tell of the weights that the run ends with; collective.

        They are evaluated if that is wanted and was not just done. The best weights were evaluated when they were made.
        """
        step = self.trainer.num_steps_done if self.result_step is None else self.result_step
        if step == self.evaluated_step:
            return
        if self.config.evaluation.do_eval:
            self.evaluate(step)
        elif self.result_step is not None and self.log is not None:
            self.log.take_evaluation(step)

    def _after_step(self, metrics: StepMetrics, step_gather: _LoopGather) -> StopReason | None:
        """Everything that follows a step; the reason to end now, if there is one."""
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
                self.log.note_best(self.best.value, metrics.step, checkpoint_path(self.save_dir, metrics.step))
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
        """Say what an interruption from now on would lose; a save that is under way may be complete by then."""
        total = self.config.optim.num_steps
        where = f"after step {step} of {total}" if step else f"in step 1 of {total}"
        numbers = f"every step's numbers are in {self.folder / METRICS_FILE}"
        if self.saver is None:
            lost = f"{where}: what was trained is lost, for only the end is saved; {numbers}"
            self.run_status.set_status(f"{lost}, and {self.older}" if self.older else lost)
            return
        saver = self.saver

        def left() -> str:
            kept = f"the newest checkpoint is {saver.newest}"
            return f"{where}: {kept if saver.newest else _NOTHING_KEPT}; {numbers}"

        def lost_now() -> str:
            return f"what was trained since step {saver.newest_step} would be lost"

        self.run_status.set_status(left)
        if step < total and can_save:
            self.run_status.save_on_signal(lost_now, seconds=self._seconds_to_save())
        else:
            self.run_status.stop_saving_on_signal()

    def _seconds_to_save(self) -> float | None:
        """Time from a request to stop to the end of the save, where both are known."""
        assert self.saver is not None, "nothing is saved"
        seconds = self.saver.seconds
        return None if seconds is None or self.steps.last is None else seconds + self.steps.last.step_seconds

    def _after_failure(self) -> str:
        numbers = f"the numbers of the steps before it are in {self.folder / METRICS_FILE}"
        if self.saver is None or self.saver.newest is None:
            return f"Nothing is saved; {numbers}."
        return f"The newest checkpoint is {self.saver.newest}; {numbers}."
