"""Owns the best evaluation of a run so far: by which number, on which data, and after which step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mobius.config.config import BestMetric
from mobius.errors import CheckpointError, quoted
from mobius.regular_files import typed_object
from mobius.training.evaluation.evaluator import EvaluationResult

BEST: Final = "best"
"""Key in a checkpoint's position of the best evaluation so far."""
BEST_SAVED: Final = "best_saved"
"""Key of the best one of those that came with a checkpoint: another one where evaluations are more frequent."""


@dataclass
class BestEvaluation:
    """The best evaluation, and how many came since; the same on all ranks, and part of a checkpoint."""

    metric: BestMetric
    value: float | None = None
    step: int | None = None
    evaluations_since: int = 0
    data: str | None = None
    """Fingerprint of the evaluation data; values on other data do not compare."""

    @classmethod
    def from_loop_state(
        cls, metric: BestMetric, loop_state: Mapping[str, Any], key: str = BEST, *, data: str | None = None
    ) -> BestEvaluation:
        """The best one of a checkpoint's `loop_state`; none yet if it is of another metric or on other data.

        `data` is the fingerprint of this start's evaluation data; None: it evaluates nothing. Raises CheckpointError.
        """
        saved = loop_state.get(key) or loop_state.get(BEST) or {}
        if not isinstance(saved, dict):
            raise CheckpointError(
                f"the checkpoint's best evaluation is {quoted(saved)}. Go on from another checkpoint."
            )
        own = saved.get("data") or data
        if saved.get("metric") != metric.value or (data is not None and own != data):
            return cls(metric, data=data)
        try:
            return typed_object(cls, {**saved, "metric": metric, "data": own})
        except ValueError as problem:
            raise CheckpointError(
                f"the checkpoint's best evaluation {problem}. Go on from another checkpoint."
            ) from None

    def update(self, result: EvaluationResult, step: int) -> bool:
        """Whether `result` is the best one so far."""
        value = metric_value(self.metric, result)
        sign = 1 if self.metric is BestMetric.TOKEN_ACCURACY else -1
        if math.isfinite(value) and (self.value is None or sign * value > sign * self.value):
            self.value, self.step, self.evaluations_since = value, step, 0
            return True
        self.evaluations_since += 1
        return False


def metric_value(metric: BestMetric, result: EvaluationResult) -> float:
    """Number of an evaluation that `metric` names."""
    return {
        BestMetric.LOSS: result.loss,
        BestMetric.PERPLEXITY: result.perplexity,
        BestMetric.TOKEN_ACCURACY: result.token_accuracy,
    }[metric]
