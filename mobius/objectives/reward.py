"""Reward model: scores of whole conversations, learnt from pairs of a chosen and a rejected answer.

The score of a sequence is the only output of the head at the sequence's end. Formulas and names are TRL 1.16's
(`RewardTrainer`); means are over all pairs of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mobius.config.objective import ObjectiveConfig
from mobius.data.preferences import MARGIN
from mobius.models.loss import EXISTS, LossHead, TargetRows
from mobius.objectives.preference import PAIRS, Pairs, count_pairs
from mobius.objectives.sequences import SequenceObjective


class RewardModel(SequenceObjective):
    """Bradley-Terry loss of both scores, with a margin if the data have one."""

    rows_kind = "pairs"
    optional_values = (MARGIN,)
    number_counts: ClassVar[Mapping[str, str]] = dict.fromkeys(("loss", "accuracy", "margin", "mean_reward"), PAIRS)

    def __init__(self, config: ObjectiveConfig) -> None:
        self._center = config.center_rewards

    def counts(self, rows: TargetRows) -> Mapping[str, float]:
        """Number of pairs."""
        return {PAIRS: count_pairs(rows)}

    def outputs(self, head: LossHead, rows: TargetRows) -> Tensor:
        """Return the score of each sequence, fp32 [B, S]."""
        return head.scores(rows)

    def backward(self, head: LossHead, rows: TargetRows, gradient: Tensor) -> Tensor:
        """Return the gradient of hidden states for the `gradient` of the scores."""
        return head.scores_backward(rows, gradient)

    def sums(self, outputs: Tensor, rows: TargetRows) -> Mapping[str, Tensor]:
        """Sums over pairs of the scores `outputs` [B, S]."""
        chosen, rejected = Pairs.of(outputs)
        margins = rows.sequence_values.get(MARGIN)
        least = 0.0 if margins is None else Pairs.of(margins).chosen
        losses = -F.logsigmoid(chosen - rejected - least)
        if self._center:
            losses = losses + self._center * (chosen + rejected) ** 2
        chosen, rejected = chosen.detach(), rejected.detach()
        values = {
            "loss": losses,
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "mean_reward": (chosen + rejected) / 2,
        }
        exists = Pairs.of(rows.sequence_values[EXISTS]).chosen > 0
        return {name: torch.where(exists, value, 0.0).sum() for name, value in values.items()}
