"""Best evaluation of a run so far: its metric, data and step."""

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
"""Key of the best evaluation in a checkpoint's loop state."""
BEST_SAVED: Final = "best_saved"
"""Key of the best evaluation with a checkpoint, which may differ if evaluations are more frequent."""


@dataclass
class BestEvaluation:
    """Best evaluation and number of evaluations since; equal on all ranks, and part of a checkpoint."""

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
        """Read the best evaluation of a checkpoint's `loop_state`; empty if it has another metric or other data.

        `data` is the fingerprint of this run's evaluation data; None: it does not evaluate. Raises CheckpointError.
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
        """Record `result`; returns whether it is the best so far."""
        value = metric_value(self.metric, result)
        sign = 1 if self.metric is BestMetric.TOKEN_ACCURACY else -1
        if math.isfinite(value) and (self.value is None or sign * value > sign * self.value):
            self.value, self.step, self.evaluations_since = value, step, 0
            return True
        self.evaluations_since += 1
        return False


def metric_value(metric: BestMetric, result: EvaluationResult) -> float:
    """Return the number of `result` that `metric` names."""
    return {
        BestMetric.LOSS: result.loss,
        BestMetric.PERPLEXITY: result.perplexity,
        BestMetric.TOKEN_ACCURACY: result.token_accuracy,
    }[metric]
