"""Losses of pairs: numbers from TRL 1.16's formulas, and gradients against autograd on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.loss_heads import head_of
from torch import Tensor
from torch.nn import functional as F

from mobius.config.objective import LossType, ObjectiveConfig, ObjectiveName
from mobius.models.loss import EXISTS, IGNORE_INDEX, TargetRows
from mobius.objectives.objective import REFERENCE, StepScale
from mobius.objectives.registry import make_objective
from mobius.objectives.sequences import SequenceObjective, reference_scores

CHOSEN, REJECTED = 10, 8
"""Targets of both answers."""


def one_pair() -> tuple[Tensor, TargetRows]:
    """Log-probabilities with sums -20 and -25, and a row with a prompt of two tokens for each answer."""
    length = CHOSEN + REJECTED + 6
    sequences = torch.full((1, length), 3)
    sequences[0, : CHOSEN + 2], sequences[0, CHOSEN + 2 : CHOSEN + REJECTED + 4] = 0, 1
    targets = torch.full((1, length), IGNORE_INDEX)
    targets[0, 1 : CHOSEN + 1], targets[0, CHOSEN + 3 : CHOSEN + REJECTED + 3] = 5, 6
    logps = torch.zeros(1, length)
    logps[0, 1 : CHOSEN + 1], logps[0, CHOSEN + 3 : CHOSEN + REJECTED + 3] = -20 / CHOSEN, -25 / REJECTED
    values = {EXISTS: torch.tensor([[1.0, 1.0, 0.0]]), REFERENCE: torch.tensor([[-21.0, -24.0, 0.0]])}
    return logps, TargetRows(targets, {}, values, sequences, torch.where(targets > 0, targets, 7))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"objective": ObjectiveName.DPO}, 0.5981388694),
        ({"objective": ObjectiveName.DPO, "loss_type": LossType.HINGE}, 0.8),
        ({"objective": ObjectiveName.DPO, "loss_type": LossType.IPO}, 22.800625),
        ({"objective": ObjectiveName.DPO, "loss_type": LossType.ROBUST, "label_smoothing": 0.1}, 0.5731388694),
        ({"objective": ObjectiveName.DPO, "loss_type": LossType.APO_ZERO}, 0.9500416250),
        ({"objective": ObjectiveName.SIMPO, "beta": 0.1}, 0.9055504423),
        ({"objective": ObjectiveName.SIMPO, "beta": 2.0, "simpo_gamma": 1.0}, 0.2519290813),
        ({"objective": ObjectiveName.DPO, "sft_weight": 0.5}, 0.5981388694 + 0.5 * 2.0),
    ],
)
def test_a_pair_has_the_loss_of_the_formula(options: dict[str, Any], expected: float) -> None:
    objective = make_objective(ObjectiveConfig(**options))
    assert isinstance(objective, SequenceObjective)
    sums = objective.sums(*one_pair())
    assert float(sums["loss"]) == pytest.approx(expected, rel=1e-6)


def test_odds_ratios_are_those_of_mean_log_probabilities() -> None:
    objective = make_objective(ObjectiveConfig(objective=ObjectiveName.ORPO))
    assert isinstance(objective, SequenceObjective)
    logps, rows = one_pair()
    counts = objective.counts(rows)
    assert counts == {"pairs": 1.0, "chosen tokens": CHOSEN + 1}
    sums = objective.sums(logps, rows)
    assert float(sums["odds_loss"]) == pytest.approx(0.1 * 0.2574414952, rel=1e-6)
    assert float(sums["nll_loss"]) == pytest.approx(20.0, rel=1e-6)


def test_rewards_are_differences_to_the_reference() -> None:
    objective = make_objective(ObjectiveConfig(objective=ObjectiveName.DPO))
    assert isinstance(objective, SequenceObjective)
    sums = {name: float(value) for name, value in objective.sums(*one_pair()).items()}
    assert sums["rewards/chosen"] == pytest.approx(0.1)
    assert sums["rewards/rejected"] == pytest.approx(-0.1)
    assert (sums["rewards/accuracies"], sums["logps/chosen"], sums["logps/rejected"]) == (1.0, -20.0, -25.0)


@pytest.mark.parametrize("name", [ObjectiveName.ORPO, ObjectiveName.SIMPO])
def test_logs_have_the_means_that_the_loss_is_made_of(name: ObjectiveName) -> None:
    objective = make_objective(ObjectiveConfig(objective=name, beta=0.1))
    assert isinstance(objective, SequenceObjective)
    sums = {name: float(value) for name, value in objective.sums(*one_pair()).items()}
    assert (sums["logps/chosen"], sums["logps/rejected"]) == (-20.0 / CHOSEN, -25.0 / REJECTED)
    assert sums["rewards/chosen"] == pytest.approx(0.1 * sums["logps/chosen"])


BATCH, LENGTH, HIDDEN, VOCAB = 3, 24, 12, 30


def random_rows() -> tuple[Tensor, Tensor, TargetRows]:
    """Hidden states, a head, and rows of one or two pairs, the last of them padded."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    lengths = [(6, 5, 7, 6), (9, 8), (5, 6, 4, 7)]
    sequences, targets = torch.full((BATCH, LENGTH), 5), torch.full((BATCH, LENGTH), IGNORE_INDEX)
    exists = torch.zeros(BATCH, 5)
    for row, own in enumerate(lengths):
        start = 0
        for place, length in enumerate(own):
            sequences[row, start : start + length] = place
            targets[row, start + 1 : start + length - 1] = tokens[row, start + 2 : start + length]
            exists[row, place] = 1
            start += length
    values = {EXISTS: exists, REFERENCE: exists * -20 * torch.rand(BATCH, 5, generator=generator)}
    return hidden, weight, TargetRows(targets, {}, values, sequences, tokens)


@pytest.mark.parametrize("chunk_tokens", [7, 100])
@pytest.mark.parametrize("name", [ObjectiveName.DPO, ObjectiveName.ORPO, ObjectiveName.SIMPO])
def test_gradients_are_those_of_autograd_on_whole_logits(name: ObjectiveName, chunk_tokens: int) -> None:
    objective = make_objective(ObjectiveConfig(objective=name, sft_weight=0.0))
    assert isinstance(objective, SequenceObjective)
    hidden, weight, rows = random_rows()
    scale = StepScale(1, loss_scale=8.0, counts={count: 2 * number for count, number in objective.counts(rows).items()})
    gradient = torch.zeros_like(weight)
    numbers, of_hidden = objective.loss(head_of(hidden, weight, gradient, chunk_tokens, compiled=False), rows, scale)

    whole_hidden, whole_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    targets = objective.scored_targets(rows)
    logits = (whole_hidden @ whole_weight.T).log_softmax(-1)
    logps = torch.where(targets >= 0, logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1), 0.0)
    sums = objective.sums(logps, rows)
    loss = sum(sums[part] / scale.counts[objective.number_counts[part]] for part in objective.loss_parts)
    assert isinstance(loss, Tensor)
    (8.0 * loss).backward()
    assert float(numbers[0]) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert whole_hidden.grad is not None
    assert whole_weight.grad is not None
    torch.testing.assert_close(of_hidden, whole_hidden.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, whole_weight.grad, rtol=1e-4, atol=1e-5)


def test_before_the_first_update_the_loss_is_exactly_ln_2() -> None:
    hidden, weight, rows = random_rows()
    objective = make_objective(ObjectiveConfig(objective=ObjectiveName.DPO))
    head = head_of(hidden, weight, torch.zeros_like(weight), 7, compiled=False)
    rows = TargetRows(
        rows.targets,
        {},
        {**rows.sequence_values, REFERENCE: reference_scores(head, rows)},
        rows.sequences,
        rows.tokens,
    )
    evaluated = dict(zip(objective.evaluation_names, objective.evaluate(head, rows).tolist(), strict=True))
    ln_2 = float(-F.logsigmoid(torch.tensor(0.0)))
    assert evaluated["loss"] == sum([ln_2] * 5)
    assert (evaluated["rewards/margins"], evaluated["rewards/chosen"], evaluated["rewards/rejected"]) == (0.0, 0.0, 0.0)
