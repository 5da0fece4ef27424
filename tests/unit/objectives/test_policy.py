"""Losses of rollouts: TRL 1.16's formulas on padded completions, and gradients against autograd on whole logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from harness.loss_heads import head_of
from torch import Tensor

from mobius.config.objective import ObjectiveConfig, ObjectiveName, PolicyLoss
from mobius.data.token_store import ADVANTAGE, REWARD, SAMPLER
from mobius.models.loss import EXISTS, IGNORE_INDEX, TargetRows
from mobius.objectives.objective import REFERENCE, StepScale
from mobius.objectives.policy import TokenPolicy, make_policy
from mobius.objectives.sequences import token_scores

PROMPT, LENGTH = 2, 24
COMPLETIONS = [[6, 3], [5, 2, 4], [9]]
"""Lengths of the completions of each row."""
ADVANTAGES, REWARDS = [1.0, -0.5, -1.5, 0.0, 0.75, 2.0], [3.0, 1.0, 0.0, 0.5, 2.0, 2.5]
PLACES = [(row, place) for row, lengths in enumerate(COMPLETIONS) for place in range(len(lengths))]
VOCAB, HIDDEN = 30, 12


def options(loss: PolicyLoss, **further: Any) -> ObjectiveConfig:
    return ObjectiveConfig(objective=ObjectiveName.POLICY, policy_loss=loss, **further)


def rows_of(*, has_sampler: bool = True, spread: float = 0.3) -> tuple[Tensor, TargetRows]:
    """Log-probabilities, and rows with values before step 1 and by the sampler, which are some `spread` away."""
    generator = torch.Generator().manual_seed(4)
    shape = (len(COMPLETIONS), LENGTH)
    logps = -3 * torch.rand(shape, generator=generator) - 1
    sequences, targets = torch.full(shape, 4), torch.full(shape, IGNORE_INDEX)
    exists, advantages, rewards = torch.zeros(len(shape) + 1, 4), torch.zeros(3, 4), torch.full((3, 4), math.nan)
    for number, (row, place) in enumerate(PLACES):
        start = sum(PROMPT + length for length in COMPLETIONS[row][:place])
        end = start + PROMPT + COMPLETIONS[row][place]
        sequences[row, start:end], targets[row, start + PROMPT - 1 : end - 1] = place, 5 + number
        exists[row, place], advantages[row, place], rewards[row, place] = 1, ADVANTAGES[number], REWARDS[number]
    before = logps + spread * torch.randn(shape, generator=generator)
    sampler = before + spread * torch.randn(shape, generator=generator)
    sampler[0, 2] = math.nan
    values = {EXISTS: exists, ADVANTAGE: advantages, REWARD: rewards}
    of_tokens = {REFERENCE: before, SAMPLER: sampler} if has_sampler else {REFERENCE: before}
    return torch.where(targets >= 0, logps, 0.0), TargetRows(targets, of_tokens, values, sequences)


@dataclass(frozen=True)
class Padded:
    """A value of each token of each completion, padded on the right, as TRL has them."""

    mask: Tensor

    @classmethod
    def of(cls, rows: TargetRows) -> Padded:
        return cls(torch.arange(9) < torch.tensor([COMPLETIONS[row][place] for row, place in PLACES]).unsqueeze(1))

    def __call__(self, values: Tensor, rows: TargetRows) -> Tensor:
        assert rows.sequences is not None
        result = torch.zeros(self.mask.shape)
        for number, (row, place) in enumerate(PLACES):
            own = values[row][(rows.sequences[row] == place) & (rows.targets[row] != IGNORE_INDEX)]
            result = result.index_put((torch.tensor([number]), torch.arange(len(own))), own)
        return result


def expected(config: ObjectiveConfig, logps: Tensor, rows: TargetRows) -> dict[str, Tensor]:
    """TRL's loss and numbers, from padded completions."""
    padded, name = Padded.of(rows), config.policy_loss
    mask, advantages = padded.mask, torch.tensor(ADVANTAGES).unsqueeze(1)
    lengths = mask.sum(1, keepdim=True)
    now, before = padded(logps, rows), padded(rows.token_values[REFERENCE], rows)
    sums = ((now - before) * mask).sum(1, keepdim=True)
    ratio = torch.exp({PolicyLoss.GSPO: sums / lengths, PolicyLoss.RLOO: sums}.get(name, now - before))
    low, high = 1 - config.epsilon_low, 1 + (config.epsilon_high or config.epsilon_low)
    loss = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    difference, divergence = torch.zeros(mask.shape), ratio * (torch.exp(before - now) - (before - now) - 1)
    if SAMPLER in rows.token_values:
        difference = torch.nan_to_num((before - padded(rows.token_values[SAMPLER], rows)) * mask, nan=0.0)
    weight = torch.exp(difference).clamp(max=config.importance_cap)
    if name is not PolicyLoss.RLOO:
        loss = loss * weight
    loss = loss + config.kl_weight * divergence
    loss = loss.expand(mask.shape) * mask
    whole = {PolicyLoss.DAPO: loss.sum() / mask.sum()}.get(name, (loss.sum(1) / lengths.squeeze(1)).mean())
    is_low, is_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    of = mask if ratio.shape == mask.shape else torch.ones_like(ratio)
    return {
        "loss": whole,
        "ratio": (ratio * of).sum() / of.sum(),
        "clip_ratio/low_mean": (is_low * of).sum() / of.sum(),
        "clip_ratio/high_mean": (is_high * of).sum() / of.sum(),
        "kl": (divergence * mask).sum() / mask.sum(),
        "sampling/sampling_logp_difference/mean": difference.abs().sum() / (mask.sum() - 1),
        "sampling/importance_sampling_ratio/mean": (weight * mask).sum() / mask.sum(),
    }


def numbers_of(
    objective: TokenPolicy, logps: Tensor, rows: TargetRows, counts: Mapping[str, float]
) -> dict[str, float]:
    sums = {name: float(value) for name, value in objective.sums(logps, rows).items()}
    return objective.scores(sums, StepScale(1, counts=counts))


@pytest.mark.parametrize("loss", PolicyLoss)
@pytest.mark.parametrize(
    "further", [{"epsilon_low": 0.05}, {"kl_weight": 0.3, "epsilon_high": 0.1, "epsilon_low": 0.05}]
)
def test_loss_and_numbers_are_those_of_the_formulas(loss: PolicyLoss, further: dict[str, float]) -> None:
    if loss is PolicyLoss.RLOO:
        further = {name: value for name, value in further.items() if name != "kl_weight"}
    config = options(loss, importance_cap=1.2, **further)
    objective, (logps, rows) = make_policy(config), rows_of()
    found, wanted = numbers_of(objective, logps, rows, objective.counts(rows)), expected(config, logps, rows)
    assert {name: found[name] for name in wanted} == pytest.approx(
        {name: float(value) for name, value in wanted.items()}, rel=1e-5
    )
    assert found["clip_ratio/low_mean"] > 0
    assert found["clip_ratio/high_mean"] > 0
    assert found["reward"] == pytest.approx(sum(REWARDS) / 6)
    assert found["reward_std"] == pytest.approx(float(torch.tensor(REWARDS).std(correction=0)), rel=1e-5)
    assert found["completions/mean_length"] == pytest.approx(29 / 6)


@pytest.mark.parametrize("loss", PolicyLoss)
def test_the_first_ratio_is_exactly_1_with_scores_and_without(loss: PolicyLoss) -> None:
    logps, rows = rows_of(has_sampler=False)
    objective = make_policy(options(loss))
    of_tokens: list[Mapping[str, Tensor]] = [{}, {REFERENCE: logps}]
    for values in of_tokens:
        found = numbers_of(objective, logps, replace(rows, token_values=values), objective.counts(rows))
        assert (found["ratio"], found["kl"], found["clip_ratio/low_mean"], found["clip_ratio/high_mean"]) == (
            1,
            0,
            0,
            0,
        )


def test_numbers_that_a_step_does_not_have_are_left_out() -> None:
    logps, rows = rows_of(has_sampler=False)
    values = {name: value for name, value in rows.sequence_values.items() if name != REWARD}
    rows, objective = replace(rows, sequence_values=values), make_policy(options(PolicyLoss.GRPO))
    head = head_of(
        torch.zeros(3, LENGTH, HIDDEN), torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN), 9, compiled=False
    )
    sums, _ = objective.loss(head, rows, StepScale(1, counts=objective.counts(rows)))
    step, scores = objective.numbers(sums[1:].tolist()), numbers_of(objective, logps, rows, objective.counts(rows))
    assert step.keys() == scores.keys() - {"loss"}
    assert not {"reward", "reward_std", "sampling/kl"} & step.keys()


def test_without_the_samplers_numbers_no_token_is_weighted() -> None:
    logps, rows = rows_of(has_sampler=False)
    losses = [
        numbers_of(objective, logps, rows, objective.counts(rows))["loss"]
        for objective in (make_policy(options(PolicyLoss.DAPO, importance_cap=cap)) for cap in (0.5, 2.0))
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("loss", PolicyLoss)
@pytest.mark.parametrize("chunk_tokens", [7, 100])
def test_gradients_are_those_of_autograd_on_whole_logits(loss: PolicyLoss, chunk_tokens: int) -> None:
    config, generator = (
        options(loss, kl_weight=0.0 if loss is PolicyLoss.RLOO else 0.2),
        torch.Generator().manual_seed(6),
    )
    hidden = torch.randn(len(COMPLETIONS), LENGTH, HIDDEN, generator=generator)
    weight = 0.3 * torch.randn(VOCAB, HIDDEN, generator=generator)
    _, rows = rows_of()
    before = token_scores(head_of(hidden, weight, torch.zeros_like(weight), 7, compiled=False), rows)
    noise = 0.2 * torch.randn(before.shape, generator=generator)
    shifted = torch.nn.functional.pad(before, (0, 1))[:, 1:]
    rows = replace(rows, token_values={REFERENCE: shifted + noise, SAMPLER: shifted - noise})
    objective, gradient = make_policy(config), torch.zeros_like(weight)
    scale = StepScale(1, loss_scale=4.0, counts=objective.counts(rows))
    numbers, of_hidden = objective.loss(head_of(hidden, weight, gradient, chunk_tokens, compiled=False), rows, scale)

    whole_hidden, whole_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = (whole_hidden @ whole_weight.T).log_softmax(-1)
    logps = torch.where(rows.targets >= 0, logits.gather(-1, rows.targets.clamp(min=0).unsqueeze(-1)).squeeze(-1), 0.0)
    wanted = expected(config, logps, rows)["loss"]
    (4.0 * wanted).backward()
    assert float(numbers[0]) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert whole_hidden.grad is not None
    assert whole_weight.grad is not None
    torch.testing.assert_close(of_hidden, whole_hidden.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, whole_weight.grad, rtol=1e-4, atol=1e-5)
