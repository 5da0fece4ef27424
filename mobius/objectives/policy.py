"""Objectives that learn from rollouts: completions that a sampler made, each with an advantage (GRPO and variants).

Formulas and names are TRL 1.16's; means are over all completions, or all their tokens, of a step. The probability
before step 1 stands for that of the policy that sampled; without it (a run of one step), it is the present one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from mobius.config.objective import ObjectiveConfig, PolicyLoss
from mobius.data.rollouts import with_advantages
from mobius.data.token_store import ADVANTAGE, REWARD, SAMPLER, Values
from mobius.models.loss import EXISTS, IGNORE_INDEX, TargetRows
from mobius.objectives.objective import REFERENCE, StepScale
from mobius.objectives.sequences import SequenceObjective, num_targets_of, sum_sequences

TOKENS: Final = "tokens"
COMPLETIONS: Final = "completions"
_REWARDED: Final = "completions with a reward"
_SAMPLED: Final = "tokens with the sampler's number"
_WEIGHTED: Final = "tokens, if the data have the sampler's numbers"
_RATIO: Final = "ratio"
_SQUARES: Final = "reward squares"
_STANDARD_DEVIATION: Final = "reward_std"


def _number_counts(loss: str, ratio: str) -> dict[str, str]:
    """Return the count of each number, given those of the loss and of the ratios."""
    return {
        "loss": loss,
        _RATIO: ratio,
        "clip_ratio/low_mean": ratio,
        "clip_ratio/high_mean": ratio,
        "kl": TOKENS,
        REWARD: _REWARDED,
        _SQUARES: _REWARDED,
        "completions/mean_length": COMPLETIONS,
        "sampling/sampling_logp_difference/mean": _SAMPLED,
        "sampling/importance_sampling_ratio/mean": _WEIGHTED,
        "sampling/kl": _SAMPLED,
    }


class TokenPolicy(SequenceObjective):
    """GRPO and DAPO: clipped ratios of each token's probabilities, now and before step 1."""

    rows_kind = "rollouts"
    sequence_values = (ADVANTAGE,)
    token_values = (REFERENCE,)
    corrects_sampling: ClassVar[bool] = True
    """Whether tokens are weighted by the ratio of their probabilities before step 1 to the sampler's."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self._low, self._high = 1 - config.epsilon_low, 1 + (config.epsilon_high or config.epsilon_low)
        self._cap, self._kl_weight = config.importance_cap, config.kl_weight
        self._scaling = None if config.policy_loss is PolicyLoss.RLOO else config.scale_rewards

    def derive(self, values: Values) -> Values:
        """Return rewards and advantages."""
        return with_advantages(values, self._scaling)

    def counts(self, rows: TargetRows) -> Mapping[str, float]:
        """Number of tokens, of completions, and of those with a reward or with the sampler's number."""
        is_target, exists = rows.targets != IGNORE_INDEX, rows.sequence_values[EXISTS] > 0
        tokens, sampler = float(is_target.sum()), rows.token_values.get(SAMPLER)
        return {
            TOKENS: tokens,
            COMPLETIONS: float(exists.sum()),
            _REWARDED: float((exists & _is_known(rows.sequence_values.get(REWARD), exists)).sum()),
            _SAMPLED: float((is_target & _is_known(sampler, is_target)).sum()),
            _WEIGHTED: 0.0 if sampler is None else tokens,
        }

    def sums(self, logps: Tensor, rows: TargetRows) -> Mapping[str, Tensor]:
        """Sums over tokens and over completions."""
        is_target = rows.targets != IGNORE_INDEX
        before = rows.token_values.get(REFERENCE, logps.detach())
        advantages = _of_tokens(rows.sequence_values[ADVANTAGE], rows)
        changes = torch.where(is_target, logps - before, 0.0)
        ratios = torch.exp(self._log_ratios(changes, rows))
        clipped = ratios.clamp(self._low, self._high)
        losses = -torch.min(ratios * advantages, clipped * advantages)
        known, difference = self._difference(before, rows)
        weights = torch.where(known, torch.exp(difference).clamp(max=self._cap), 1.0)
        if self.corrects_sampling:
            losses = losses * weights
        divergences = (torch.expm1(-changes) + changes) * ratios
        if self._kl_weight:
            losses = losses + self._kl_weight * divergences
        exists, rewards = rows.sequence_values[EXISTS], rows.sequence_values.get(REWARD)
        rewards = torch.zeros_like(exists) if rewards is None else torch.where(rewards.isfinite(), rewards, 0.0)
        of_tokens = {
            "loss": losses,
            _RATIO: ratios.detach() - 1,
            "clip_ratio/low_mean": ((ratios < self._low) & (advantages < 0)).float(),
            "clip_ratio/high_mean": ((ratios > self._high) & (advantages > 0)).float(),
            "kl": divergences.detach(),
        }
        return {
            **{name: self._total(values, self.number_counts[name], rows) for name, values in of_tokens.items()},
            REWARD: rewards.sum(),
            _SQUARES: rewards.square().sum(),
            "completions/mean_length": is_target.sum().float(),
            "sampling/sampling_logp_difference/mean": difference.abs().sum(),
            "sampling/importance_sampling_ratio/mean": torch.where(
                is_target & (SAMPLER in rows.token_values), weights, 0.0
            ).sum(),
            "sampling/kl": (torch.expm1(difference) - difference).sum(),
        }

    def numbers(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the numbers that the step has: without rewards or the sampler's numbers, fewer."""
        return _shown(super().numbers(sums))

    def scores(self, sums: Mapping[str, float], scale: StepScale) -> dict[str, float]:
        """Return each number over its count."""
        counts = {name: number or math.nan for name, number in scale.counts.items()}
        return _shown(super().scores(sums, StepScale(scale.num_targets, counts=counts)))

    def _log_ratios(self, changes: Tensor, rows: TargetRows) -> Tensor:
        """Return the logarithm of each token's ratio, from the changes of log-probabilities, both fp32 [B, L]."""
        return changes

    def _difference(self, before: Tensor, rows: TargetRows) -> tuple[Tensor, Tensor]:
        """Return where the sampler's numbers are known, and the log-probabilities minus these numbers, else 0."""
        is_target, sampler = rows.targets != IGNORE_INDEX, rows.token_values.get(SAMPLER)
        known = is_target & _is_known(sampler, is_target)
        return known, torch.zeros_like(before) if sampler is None else torch.where(known, before - sampler, 0.0)

    def _total(self, values: Tensor, count: str, rows: TargetRows) -> Tensor:
        """Return the sum over tokens, or over completions of the means of their tokens."""
        values = torch.where(rows.targets != IGNORE_INDEX, values, 0.0)
        return values.sum() if count == TOKENS else (sum_sequences(values, rows) / num_targets_of(rows)).sum()


class Dapo(TokenPolicy):
    """Mean over all tokens of a step."""

    number_counts: ClassVar[Mapping[str, str]] = _number_counts(TOKENS, TOKENS)


class Grpo(TokenPolicy):
    """Mean over each completion's tokens, then over completions."""

    number_counts: ClassVar[Mapping[str, str]] = _number_counts(COMPLETIONS, TOKENS)


class Gspo(TokenPolicy):
    """GRPO with the geometric mean of a completion's ratios for each of its tokens."""

    number_counts: ClassVar[Mapping[str, str]] = _number_counts(COMPLETIONS, COMPLETIONS)

    def _log_ratios(self, changes: Tensor, rows: TargetRows) -> Tensor:
        return _of_tokens(sum_sequences(changes, rows) / num_targets_of(rows), rows)


class Rloo(TokenPolicy):
    """REINFORCE with leave-one-out advantages: one ratio for each completion, of its whole probabilities."""

    number_counts: ClassVar[Mapping[str, str]] = _number_counts(COMPLETIONS, COMPLETIONS)
    corrects_sampling = False

    def _log_ratios(self, changes: Tensor, rows: TargetRows) -> Tensor:
        return _of_tokens(sum_sequences(changes, rows), rows)


_CLASSES: Final = {PolicyLoss.DAPO: Dapo, PolicyLoss.GRPO: Grpo, PolicyLoss.GSPO: Gspo, PolicyLoss.RLOO: Rloo}


def make_policy(config: ObjectiveConfig) -> TokenPolicy:
    """Return the objective with the loss that the options name."""
    return _CLASSES[config.policy_loss](config)


def _of_tokens(values: Tensor, rows: TargetRows) -> Tensor:
    """Return the value of each token's sequence, fp32 [B, L], from values [B, S]; 0 in padding."""
    assert rows.sequences is not None, "the rows have sequences"
    return F.pad(values, (0, 1)).gather(1, rows.sequences)


def _is_known(values: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool) if values is None else ~values.isnan()


def _shown(numbers: dict[str, float]) -> dict[str, float]:
    """Return the ratio and the standard deviation in place of their parts, without unknown numbers."""
    if _RATIO in numbers:
        numbers[_RATIO] += 1
    variance = numbers.pop(_SQUARES) - numbers[REWARD] ** 2
    numbers[_STANDARD_DEVIATION] = math.nan if math.isnan(variance) else math.sqrt(max(0.0, variance))
    return {name: value for name, value in numbers.items() if not math.isnan(value)}
