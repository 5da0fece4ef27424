"""Supervised fine-tuning: cross entropy of the next token, of which each token may have a weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import torch
from torch import Tensor

from mobius.models.loss import IGNORE_INDEX, LossHead, TargetRows
from mobius.objectives.objective import Objective, StepScale

WEIGHT = "weight"
"""Name of the value that is the weight of each target."""


class CrossEntropy(Objective):
    """Mean cross entropy over the targets of a step; with weights, the weighted mean."""

    evaluation_names: ClassVar[Sequence[str]] = ("loss", "hits")

    def counts(self, rows: TargetRows) -> Mapping[str, float]:
        """Sum of the targets' weights; without weights, the number of targets."""
        is_target, weights = rows.targets != IGNORE_INDEX, rows.token_values.get(WEIGHT)
        return {WEIGHT: float(is_target.sum() if weights is None else weights.double()[is_target].sum())}

    def loss(self, head: LossHead, rows: TargetRows, scale: StepScale) -> tuple[Tensor, Tensor]:
        """As `Objective.loss`."""
        divisor = scale.counts.get(WEIGHT, scale.num_targets)
        weights = rows.token_values.get(WEIGHT)
        loss, gradient = head.cross_entropy(rows.targets, weights, divisor=divisor, loss_scale=scale.loss_scale)
        return loss.reshape(1), gradient

    def evaluate(self, head: LossHead, rows: TargetRows) -> Tensor:
        """Return the summed (weighted) cross entropy, and the number of targets with the top logit."""
        (loss, hits), weights = head.evaluate(rows.targets), rows.token_values.get(WEIGHT)
        if weights is not None:
            loss = -(head.log_probabilities(rows.targets) * weights).sum()
        return torch.stack([loss.double(), hits.double()])

    def scores(self, sums: Mapping[str, float], scale: StepScale) -> dict[str, float]:
        """Return loss, perplexity and token accuracy."""
        loss = sums["loss"] / scale.counts.get(WEIGHT, scale.num_targets)
        return {"loss": loss, "perplexity": _exp(loss), "token_accuracy": int(sums["hits"]) / scale.num_targets}


SUPERVISED: Final = CrossEntropy()
"""The objective of supervised fine-tuning."""


def _exp(value: float) -> float:
    """exp(value); infinite if it is too large for a float."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
