"""Loop around the training steps: log, evaluation, checkpoints, and stops before the last step.

    step -> log -> evaluate, if it is due -> save, if it is due or the run stops -> next step

All ranks make the same decisions: the all-gather of a step's numbers tells all ranks if one of them got a signal or
reached the time limit.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from tqdm import tqdm

from mobius.checkpoint.contents import StepMetadata
from mobius.checkpoint.durable_steps import DurableSteps
from mobius.checkpoint.folders import checkpoint_path
from mobius.checkpoint.resume import LAUNCH, REPLICAS, TRACKER_RUN
from mobius.checkpoint.run_folder import OutputFolder
from mobius.checkpoint.saver import CheckpointSaver
from mobius.config.config import BestMetric, EvalStrategy, SaveStrategy, steps_between
from mobius.errors import CheckpointError, NonFiniteLossError, quoted
from mobius.files.regular_files import typed_object
from mobius.process.log import RANK_ZERO_ONLY
from mobius.process.ranks import launch_id
from mobius.process.signal_handling import RunStatus
from mobius.reporting.events import Evaluated, StepMetrics
from mobius.reporting.run_log import METRICS_FILE, RunLog
from mobius.reporting.summary import StepTotals
from mobius.training.evaluation.evaluator import EvaluationResult, Evaluator
from mobius.training.session import Session
from mobius.training.trainer import Trainer

logger = logging.getLogger(__name__)

BEST: Final = "best"
"""Key of the best evaluation in a checkpoint's loop state."""
BEST_SAVED: Final = "best_saved"
"""Key of the best evaluation with a checkpoint; it differs from `BEST` if the best evaluation has no checkpoint."""
_NOTHING_SAVED: Final = "training is lost: no checkpoint is complete"


class StopReason(StrEnum):
    """Reason why the training steps end."""

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
"""Text in the message of a failed save: the next action of the run, by stop reason."""


def _early_stopping_line(step: int, best: BestEvaluation, patience: int) -> str:
    """Return the log line of a run that stops early after `step`."""
    name, number = best.metric.value.replace("_", " "), best.evaluations_since
    reason = f"none of {number} evaluations had a finite {name}"
    if best.value is not None:
        reason = f"none of the last {number} evaluations had a better {name} than {best.value:.4f} of step {best.step}"
    return f"early stopping after step {step}: {reason} (--early_stopping_patience {patience})"


@dataclass
class BestEvaluation:
    """Best evaluation, and the number of later evaluations; equal on all ranks, and saved in checkpoints."""

    metric: BestMetric
    value: float | None = None
    step: int | None = None
    evaluations_since: int = 0
    data: str | None = None
    """Fingerprint of the evaluation data; values on different data cannot be compared."""

    @classmethod
    def from_loop_state(
        cls, metric: BestMetric, loop_state: Mapping[str, Any], key: str, *, data: str | None
    ) -> BestEvaluation:
        """Read the best evaluation of a checkpoint's `loop_state`; empty if this run has another metric or other data.

        `data`: fingerprint of this run's evaluation data; None if the run does not evaluate. Raises CheckpointError.
        """
        saved = loop_state.get(key) or loop_state.get(BEST) or {}
        if not isinstance(saved, dict):
            raise CheckpointError(
                f"the checkpoint's best evaluation is {quoted(saved)}. Resume from another checkpoint."
            )
        own = saved.get("data") or data
        if saved.get("metric") != metric.value or (data is not None and own != data):
            return cls(metric, data=data)
        try:
            return typed_object(cls, {**saved, "metric": metric, "data": own})
        except ValueError as problem:
            raise CheckpointError(
                f"the checkpoint's best evaluation {problem}. Resume from another checkpoint."
            ) from None

    def update(self, result: EvaluationResult, step: int) -> bool:
        """Record `result`; return whether it is the best so far."""
        value = result.numbers[self.metric.value]
        sign = 1 if self.metric.is_higher_better else -1
        if math.isfinite(value) and (self.value is None or sign * value > sign * self.value):
            self.value, self.step, self.evaluations_since = value, step, 0
            return True
        self.evaluations_since += 1
        return False


@dataclass(kw_only=True)
class TrainingLoop:
    """Logs, evaluates and saves between steps. `log` is None except on the first rank."""

    session: Session
    trainer: Trainer
    saver: CheckpointSaver | None
    evaluator: Evaluator | None
    log: RunLog | None
    run_status: RunStatus
    output: OutputFolder
    started: float
    """Start of the process, by `time.monotonic`."""
    epoch: float
    best: BestEvaluation
    best_saved: BestEvaluation
    """Best evaluation of which there is a checkpoint."""
    durable: DurableSteps | None = None
    """Makes each step a checkpoint; None unless optimizer states are on disks."""
    steps: StepTotals = field(default_factory=StepTotals, init=False)
    evaluated_step: int | None = field(default=None, init=False)
    """Last step after which the weights were evaluated."""
    result_step: int | None = field(default=None, init=False)
    """Step whose weights are the result; None if it is the last step."""
    requested_stop: StopReason | None = field(default=None, init=False)
    """Reason to stop that a rank reported in the latest step."""

    def __post_init__(self) -> None:
        self._config = self.session.run_setup.config
        self._metrics_file = self.output.save_dir / METRICS_FILE
        older = self.output.older_results
        self._older = "" if older is None else f", and the older results are in {older}"
        """End of an interruption's text if the run saves no checkpoints: the place of the older results."""

    @property
    def newest(self) -> Path | None:
        """Newest complete checkpoint; known on the first rank only."""
        durable = None if self.durable is None else self.durable.newest
        return durable or (None if self.saver is None else self.saver.newest)

    def run(self) -> StopReason:
        """Train to the last step or an earlier stop, and return the stop reason; collective.

        After a signal or at the time limit, a checkpoint is saved first. On return all updates and saves are complete.
        """
        total, done = self._config.optim.num_steps, self.trainer.num_steps_done
        self.trainer.step_gather = self
        if self.saver is not None and self.log is not None:
            self.saver.on_saved = self.log.emit
        if self.evaluator is not None and self._config.evaluation.eval_on_start and done == 0:
            self._update_run_status(0, can_save=False)
            self.evaluate(0)
        self._update_run_status(done)
        progress = tqdm(
            total=total,
            initial=done,
            desc="training",
            unit="step",
            leave=False,
            disable=True if self.log is None else None,
        )
        ending = StopReason.LAST_STEP
        try:
            for metrics in self.trainer.train():
                progress.update()
                if (reason := self._after_step(metrics)) is not None:
                    ending = reason
                    break
        except NonFiniteLossError as error:
            if self.saver is not None:
                self.saver.finish()  # collective: all ranks raise this error
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
        if self.durable is not None:
            self.durable.finish()
        return ending

    def local(self) -> Sequence[float]:
        """Return this rank's requests to stop and the progress of its saves, for the all-gather of a step."""
        name = self.run_status.stop_signal
        requests = [float(signal.Signals[name]) if name else 0.0, float(self._is_time_up())]
        return [*requests, *(self.saver.local() if self.saver else ())]

    def gathered(self, table: Tensor) -> None:
        """Note the requests of all ranks to stop, and finish the saves that are complete on all ranks."""
        number, is_time_up = table[:, :2].amax(0).tolist()
        if number:
            self.run_status.request_stop(signal.Signals(int(number)).name)
            self.requested_stop = StopReason.SIGNAL
        elif is_time_up:
            self.requested_stop = StopReason.TIME
        if self.saver is not None:
            self.saver.gathered(table[:, 2:])

    def evaluate(self, step: int) -> EvaluationResult:
        """Evaluate the current weights and record the result; collective."""
        assert self.evaluator is not None, "there is nothing to evaluate on"
        result = self.evaluator.evaluate(show_progress=self.log is not None)
        if self.log is not None:
            self.log.emit(Evaluated(step=step, numbers=result.numbers, num_samples=result.num_samples))
        if self.best.update(result, step) and self.log is not None and self.best.value is not None:
            self.log.state.set_best(self.best.value, step)
        self.evaluated_step = step
        self.trainer.restart_step_timer()
        return result

    def evaluate_final(self) -> None:
        """Report an evaluation of the run's final weights; collective.

        With --do_eval, evaluates these weights unless they were just evaluated. Without --do_eval, reports the earlier
        evaluation of these weights if they are the best weights.
        """
        step = self.trainer.num_steps_done if self.result_step is None else self.result_step
        if step == self.evaluated_step:
            return
        if self._config.evaluation.do_eval:
            self.evaluate(step)
        elif self.result_step is not None and self.log is not None:
            self.log.report_evaluation(step)

    def _after_step(self, metrics: StepMetrics) -> StopReason | None:
        """Log the step, evaluate and save if due; return the reason to stop now, if any."""
        step, is_last = metrics.step, metrics.step == self._config.optim.num_steps
        ends_epoch = math.floor(metrics.epoch) > math.floor(self.epoch)
        self.epoch = metrics.epoch
        self.steps.add(metrics)
        if self.log is not None:
            self.output.recreate_if_removed()
            self.log.emit(metrics)
        ending = None if is_last else self.requested_stop
        evaluation, saving = self._config.evaluation, self._config.saving
        result = None
        if self.evaluator is not None and (
            (evaluation.eval_strategy is EvalStrategy.EPOCH and (ends_epoch or is_last))
            or (evaluation.eval_strategy is EvalStrategy.STEPS and self._is_due(step, evaluation.eval_steps))
        ):
            result = self.evaluate(step)
            patience = evaluation.early_stopping_patience
            if patience is not None and self.best.evaluations_since >= patience and not is_last and ending is None:
                ending = StopReason.EARLY_STOPPING
                logger.info("%s", _early_stopping_line(step, self.best, patience), extra=RANK_ZERO_ONLY)
        is_due = (saving.save_strategy is SaveStrategy.EPOCH and ends_epoch) or (
            saving.save_strategy is SaveStrategy.STEPS and self._is_due(step, saving.save_steps)
        )
        stops = ending in (StopReason.SIGNAL, StopReason.TIME) and self.durable is None
        if self.saver is not None and (is_due or stops):
            self._save(metrics, result, ending or (StopReason.LAST_STEP if is_last else None))
        if self.durable is not None:
            number = 0 if self.saver is None else self.saver.save_number
            self.durable.after_step(self._metadata(metrics, result), save_number=number)
        self._update_run_status(step)
        return ending

    def _save(self, metrics: StepMetrics, result: EvaluationResult | None, ending: StopReason | None) -> None:
        assert self.saver is not None, "nothing is saved"
        is_best = result is not None and self.best_saved.update(result, metrics.step)
        if (
            self.log is not None
            and self.best.step == metrics.step
            and self.best.value is not None
            and result is not None
        ):
            self.log.state.set_best(self.best.value, metrics.step, checkpoint_path(self.output.save_dir, metrics.step))
        self.saver.save(self._metadata(metrics, result, is_best=is_best, follows=_FOLLOWS[ending]))

    def _metadata(
        self,
        metrics: StepMetrics,
        result: EvaluationResult | None,
        *,
        is_best: bool = False,
        follows: str = _FOLLOWS[None],
    ) -> StepMetadata:
        metric = None if result is None else result.numbers[self.best.metric.value]
        return StepMetadata(
            step=metrics.step,
            counts=self.trainer.counts,
            epoch=metrics.epoch,
            metric=metric if metric is not None and math.isfinite(metric) else None,
            is_best=is_best,
            trainer_state="" if self.log is None else self.log.state.snapshot(),
            loop_state=self._loop_state(),
            follows=follows,
        )

    def _loop_state(self) -> dict[str, Any]:
        both = {BEST: self.best, BEST_SAVED: self.best_saved}
        return {
            LAUNCH: launch_id(),
            REPLICAS: self.session.run_setup.ranks.num_replicas,
            TRACKER_RUN: None if self.log is None else self.log.tracker_run_id,
            **{key: {**asdict(best), "metric": best.metric.value} for key, best in both.items()},
        }

    def _is_due(self, step: int, every: float) -> bool:
        return step % steps_between(every, self._config.optim.num_steps) == 0

    def _is_time_up(self) -> bool:
        limit = self._config.saving.max_run_time
        return limit is not None and time.monotonic() - self.started >= 60 * limit

    def _update_run_status(self, step: int, *, can_save: bool = True) -> None:
        """Set the text of an interruption, if possible as a function: a pending save may complete before the call."""
        total = self._config.optim.num_steps
        where = f"after step {step} of {total}" if step else f"in step 1 of {total}"
        numbers = f"every step's numbers are in {self._metrics_file}"
        if self.saver is None and self.durable is None:
            lost = f"{where}: training is lost, because this run saves only the final model; {numbers}{self._older}"
            self.run_status.set_status(lost)
            return

        def left() -> str:
            newest = self.newest
            return f"{where}: {f'the newest checkpoint is {newest}' if newest else _NOTHING_SAVED}; {numbers}"

        self.run_status.set_status(left)

        def lost_now() -> str:
            steps = [saver.newest_step for saver in (self.durable, self.saver) if saver is not None]
            return f"training since step {max(steps)} would be lost"

        if step < total and can_save:
            self.run_status.save_on_signal(lost_now, seconds=self._seconds_to_save())
        else:
            self.run_status.stop_saving_on_signal()

    def _seconds_to_save(self) -> float | None:
        """Return the expected seconds from a request to stop until the save is complete; None if unknown."""
        if self.durable is not None:
            return self.steps.last.step_seconds if self.steps else None
        assert self.saver is not None, "nothing is saved"
        seconds = self.saver.seconds
        return None if seconds is None or not self.steps else seconds + self.steps.last.step_seconds

    def _after_failure(self) -> str:
        numbers = f"the numbers of the steps before it are in {self._metrics_file}"
        if self.saver is None or self.saver.newest is None:
            return f"Nothing is saved; {numbers}."
        return f"The newest checkpoint is {self.saver.newest}; {numbers}."
