"""Objectives that learn from pairs of a chosen and a rejected answer: DPO and its variants, ORPO, SimPO.

In a row the chosen answer of a pair is directly followed by the rejected one. Formulas and names are TRL 1.16's; means
are over all pairs of a step, so they do not depend on microbatches, rounds or replicas.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mobius.config.objective import LossType, ObjectiveConfig
from mobius.models.loss import EXISTS, IGNORE_INDEX, TargetRows
from mobius.objectives.objective import REFERENCE
from mobius.objectives.sequences import SequenceObjective, num_targets_of, sum_sequences

PAIRS: Final = "pairs"


class Pairs(NamedTuple):
    """One value of the chosen and one of the rejected answers, fp32 [B, P] each."""

    chosen: Tensor
    rejected: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Pairs:
        """Split values of sequences [B, S]; the last place of a row belongs to its padding."""
        both = values[:, : values.shape[1] // 2 * 2].unflatten(1, (-1, 2))
        return cls(both[..., 0], both[..., 1])


def count_pairs(rows: TargetRows) -> float:
    """Return the number of pairs in all rows."""
    return float(rows.sequence_values[EXISTS].sum()) / 2


_REWARDS: Final = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
_NUMBERS: Final = dict.fromkeys((*_REWARDS, "logps/chosen", "logps/rejected"), PAIRS)


class _PairObjective(SequenceObjective):
    """Losses of pairs, with the rewards that TRL logs."""

    rows_kind = "pairs"
    number_counts: ClassVar[Mapping[str, str]] = {"loss": PAIRS, **_NUMBERS, "nll_loss": PAIRS}
    uses_means: ClassVar[bool] = False
    """Whether losses and logs have the mean log-probability of an answer's tokens instead of the sum."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self._beta, self._sft_weight = config.beta_or_default, config.sft_weight

    def counts(self, rows: TargetRows) -> Mapping[str, float]:
        """Number of pairs."""
        return {PAIRS: count_pairs(rows)}

    def sums(self, logps: Tensor, rows: TargetRows) -> Mapping[str, Tensor]:
        """Sums over pairs."""
        lengths = num_targets_of(rows)
        totals = sum_sequences(torch.where(rows.targets != IGNORE_INDEX, logps, 0.0), rows)
        means = totals / lengths
        scores = means if self.uses_means else totals
        losses, rewards = self._losses(scores, lengths, rows)
        nll = -Pairs.of(means).chosen
        chosen, rejected = (each.detach() for each in rewards)
        logps_of = Pairs.of(scores.detach())
        values = {
            "loss": losses + self._sft_weight * nll if self._sft_weight else losses,
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "rewards/margins": chosen - rejected,
            "logps/chosen": logps_of.chosen,
            "logps/rejected": logps_of.rejected,
            "nll_loss": nll.detach(),
        }
        exists = Pairs.of(rows.sequence_values[EXISTS]).chosen > 0
        return {name: torch.where(exists, value, 0.0).sum() for name, value in values.items()}

    @abstractmethod
    def _losses(self, logps: Tensor, lengths: Tensor, rows: TargetRows) -> tuple[Tensor, Pairs]:
        """Return the loss of each pair, and both answers' rewards.

        `logps` and `lengths` [B, S]: log-probability (`uses_means`) and number of targets of each sequence.
        """


class DirectPreference(_PairObjective):
    """Direct preference optimization and its variants, on differences to the log-probabilities before step 1."""

    sequence_values = (REFERENCE,)

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        self._loss = _LOSSES[config.loss_type or LossType.SIGMOID]
        self._averages, self._smoothing = config.loss_type is LossType.IPO, config.label_smoothing

    def _losses(self, logps: Tensor, lengths: Tensor, rows: TargetRows) -> tuple[Tensor, Pairs]:
        ratios = logps - rows.sequence_values[REFERENCE]
        pairs = Pairs.of(ratios / lengths if self._averages else ratios)
        return self._loss(pairs, self._beta, self._smoothing), Pairs.of(self._beta * ratios)


def _robust(ratios: Pairs, beta: float, smoothing: float) -> Tensor:
    logits = beta * (ratios.chosen - ratios.rejected)
    right, wrong = F.logsigmoid(logits), F.logsigmoid(-logits)
    return (smoothing * wrong - (1 - smoothing) * right) / (1 - 2 * smoothing)


_LOSSES: Final[Mapping[LossType, Callable[[Pairs, float, float], Tensor]]] = {
    LossType.SIGMOID: lambda ratios, beta, _: -F.logsigmoid(beta * (ratios.chosen - ratios.rejected)),
    LossType.HINGE: lambda ratios, beta, _: torch.relu(1 - beta * (ratios.chosen - ratios.rejected)),
    LossType.IPO: lambda ratios, beta, _: (ratios.chosen - ratios.rejected - 1 / (2 * beta)) ** 2,
    LossType.ROBUST: _robust,
    LossType.APO_ZERO: lambda ratios, beta, _: (
        1 - torch.sigmoid(beta * ratios.chosen) + torch.sigmoid(beta * ratios.rejected)
    ),
}
"""Loss of each pair, from both answers' differences to the reference, beta and label smoothing."""


class SimplePreference(_PairObjective):
    """SimPO: mean log-probabilities, without a reference, with a margin gamma."""

    uses_means = True

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        self._gamma = config.simpo_gamma

    def _losses(self, logps: Tensor, lengths: Tensor, rows: TargetRows) -> tuple[Tensor, Pairs]:
        rewards = Pairs.of(self._beta * logps)
        return -F.logsigmoid(rewards.chosen - rewards.rejected - self._gamma), rewards


class OddsRatio(_PairObjective):
    """ORPO: cross entropy of the chosen answer with its prompt, and the ratio of both answers' odds."""

    number_counts: ClassVar[Mapping[str, str]] = {"odds_loss": PAIRS, **_NUMBERS, "nll_loss": "chosen tokens"}
    loss_parts = ("nll_loss", "odds_loss")
    uses_means = True

    def scored_targets(self, rows: TargetRows) -> Tensor:
        """Return all next tokens, those of prompts among them."""
        return rows.next_tokens()

    def counts(self, rows: TargetRows) -> Mapping[str, float]:
        """Number of pairs, and of the chosen sequences' tokens that have a token before them."""
        assert rows.sequences is not None, "pairs have sequences"
        is_chosen = rows.is_in_sequence & (rows.sequences % 2 == 0)
        pairs = super().counts(rows)[PAIRS]
        return {PAIRS: pairs, "chosen tokens": float(is_chosen.sum()) - pairs}

    def sums(self, logps: Tensor, rows: TargetRows) -> Mapping[str, Tensor]:
        """Sums over pairs, and over the tokens of chosen sequences."""
        sums = dict(super().sums(logps, rows))
        odds = sums.pop("loss")
        everything = Pairs.of(sum_sequences(torch.where(rows.next_tokens() != IGNORE_INDEX, logps, 0.0), rows))
        return {**sums, "odds_loss": odds, "nll_loss": -everything.chosen.sum()}

    def _losses(self, logps: Tensor, lengths: Tensor, rows: TargetRows) -> tuple[Tensor, Pairs]:
        chosen, rejected = Pairs.of(logps)
        log_odds = chosen - rejected - (_log_one_minus_exp(chosen) - _log_one_minus_exp(rejected))
        return -self._beta * F.logsigmoid(log_odds), Pairs.of(self._beta * logps)


def _log_one_minus_exp(values: Tensor) -> Tensor:
    """log(1 - exp(values)) for values below 0, precise near 0 and far from it."""
    near = torch.log(-torch.expm1(values.clamp(min=-math.log(2))))
    return torch.where(values > -math.log(2), near, torch.log1p(-torch.exp(values.clamp(max=-math.log(2)))))
