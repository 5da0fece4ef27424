"""KTO: answers with a label, good or bad, without pairs. Formulas and names are TRL 1.16's.

The loss compares each answer's log-ratio to the reference with KL, the mean log-ratio of mismatched answers: prompts
with the answer of another sample. KL is a constant of a step, so it comes with the rows as a value of each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import torch
from torch import Tensor

from mobius.config.objective import LossType, ObjectiveConfig
from mobius.models.loss import EXISTS, IGNORE_INDEX, TargetRows
from mobius.objectives.objective import KL, REFERENCE, StepScale
from mobius.objectives.sequences import SequenceObjective, sum_sequences

LABEL: Final = "label"
"""Value of each sequence: 1 for a good answer, 0 for a bad one."""
ANSWERS, GOOD, BAD = "answers", "good answers", "bad answers"
_NUMBERS: Final = {"loss": ANSWERS, "rewards/chosen": GOOD, "rewards/rejected": BAD}
_LOGPS: Final = {"logps/chosen": GOOD, "logps/rejected": BAD}


class UnpairedZero(SequenceObjective):
    """APO-zero of single answers: KTO with a KL of 0."""

    rows_kind = "judged"
    sequence_values: ClassVar[Sequence[str]] = (REFERENCE, LABEL)
    number_counts: ClassVar[Mapping[str, str]] = {**_NUMBERS, **_LOGPS}

    def __init__(self, config: ObjectiveConfig) -> None:
        self._beta = config.beta_or_default
        self._weights = config.desirable_weight, config.undesirable_weight

    def counts(self, rows: TargetRows) -> Mapping[str, float]:
        """Number of answers, and of those with each label: at least 1, as a step may have none."""
        answers = float(rows.sequence_values[EXISTS].sum())
        good = float((rows.sequence_values[EXISTS] * rows.sequence_values[LABEL]).sum())
        return {ANSWERS: answers, GOOD: max(1.0, good), BAD: max(1.0, answers - good)}

    def sums(self, outputs: Tensor, rows: TargetRows) -> Mapping[str, Tensor]:
        """Sums over the answers, whose log-probabilities are `outputs`."""
        totals = sum_sequences(torch.where(rows.targets != IGNORE_INDEX, outputs, 0.0), rows)
        ratios = totals - rows.sequence_values[REFERENCE]
        is_good, exists = rows.sequence_values[LABEL] > 0, rows.sequence_values[EXISTS] > 0
        differences = self._beta * (ratios - rows.sequence_values[KL] if self.needs_divergence else ratios)
        good, bad = self._weights
        losses = torch.where(is_good, good * (1 - torch.sigmoid(differences)), bad * (1 - torch.sigmoid(-differences)))
        rewards, totals = self._beta * ratios.detach(), totals.detach()
        values = {
            "loss": (losses, exists),
            "rewards/chosen": (rewards, exists & is_good),
            "rewards/rejected": (rewards, exists & ~is_good),
            "logps/chosen": (totals, exists & is_good),
            "logps/rejected": (totals, exists & ~is_good),
        }
        return {name: torch.where(counted, value, 0.0).sum() for name, (value, counted) in values.items()}

    def numbers(self, sums: Sequence[float]) -> dict[str, float]:
        """Return a step's numbers; the margin is the difference of both mean rewards."""
        return _with_margins(super().numbers(sums))

    def scores(self, sums: Mapping[str, float], scale: StepScale) -> dict[str, float]:
        """Return an evaluation's numbers, with the margin."""
        return _with_margins(super().scores(sums, scale))


class KahnemanTversky(UnpairedZero):
    """KTO."""

    sequence_values = (REFERENCE, LABEL, KL)
    number_counts: ClassVar[Mapping[str, str]] = {**_NUMBERS, **_LOGPS, "kl": ANSWERS}

    def sums(self, outputs: Tensor, rows: TargetRows) -> Mapping[str, Tensor]:
        """Sums over the answers, and KL for each of them."""
        return {**super().sums(outputs, rows), "kl": rows.sequence_values[KL].sum()}


def make_kto(config: ObjectiveConfig) -> UnpairedZero:
    """Return the objective of the loss that the options name."""
    is_zero = config.loss_type is LossType.APO_ZERO_UNPAIRED
    return UnpairedZero(config) if is_zero else KahnemanTversky(config)


def _with_margins(numbers: Mapping[str, float]) -> dict[str, float]:
    return {**numbers, "rewards/margins": numbers["rewards/chosen"] - numbers["rewards/rejected"]}
