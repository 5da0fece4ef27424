"""Distillation: formulas over the K most likely tokens and the rest, against autograd on whole logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.loss_heads import head_of
from torch import Tensor
from torch.nn import functional as F

from mobius.config.objective import Divergence, ObjectiveConfig, ObjectiveName
from mobius.models.loss import IGNORE_INDEX, LossHead, TargetRows
from mobius.objectives.cross_entropy import WEIGHT
from mobius.objectives.distillation import TEACHER_IDS, TEACHER_LOGPS, Distillation, teacher_numbers
from mobius.objectives.objective import StepScale

VOCAB, HIDDEN, SHAPE = 30, 12, (3, 16)


def head_on(hidden: Tensor, weight: Tensor, chunk_tokens: int = 7, *, compiled: bool = False) -> LossHead:
    return head_of(hidden, weight, torch.zeros_like(weight), chunk_tokens, compiled=compiled)


def objective_of(**options: Any) -> Distillation:
    return Distillation(ObjectiveConfig(objective=ObjectiveName.DISTILL, teacher_model="t", **options))


def tensors(seed: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return hidden states and the weight of a head."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*SHAPE, HIDDEN, generator=generator)
    return hidden, spread * torch.randn(VOCAB, HIDDEN, generator=generator)


def plain_rows() -> TargetRows:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(VOCAB, SHAPE, generator=generator)
    targets[:, :5] = IGNORE_INDEX
    return TargetRows(targets)


def taught(objective: Distillation, rows: TargetRows, seed: int = 1, spread: float = 0.5) -> TargetRows:
    """Return rows with the numbers of a teacher with other hidden states and weights."""
    hidden, weight = tensors(seed, spread)
    teacher = objective.teacher
    numbers = teacher_numbers(head_on(hidden, weight), rows, teacher=teacher, vocab_size=VOCAB)
    ids, logps = numbers.split([teacher.number, teacher.number + 1], -1)
    return replace(rows, token_values={TEACHER_IDS: ids.int(), TEACHER_LOGPS: logps})


def expected(kind: Divergence, objective: Distillation, hidden: Tensor, weight: Tensor, rows: TargetRows) -> Tensor:
    """The divergence of each position over the tokens of `rows` and the rest, by probabilities in fp64."""
    ids = rows.token_values[TEACHER_IDS].long()
    teacher = rows.token_values[TEACHER_LOGPS].double().exp()
    whole = torch.softmax((hidden @ weight.T).double() / objective.teacher.temperature, -1)
    own = whole.gather(-1, ids)
    student = torch.cat([own, 1 - own.sum(-1, keepdim=True)], -1)
    if kind is Divergence.FORWARD:
        return (teacher * (teacher.log() - student.log())).sum(-1)
    if kind is Divergence.REVERSE:
        return (student * (student.log() - teacher.log())).sum(-1)
    middle = ((teacher + student) / 2).log()
    return ((teacher * (teacher.log() - middle)) + student * (student.log() - middle)).sum(-1) / 2


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.extended)])
@pytest.mark.parametrize("sft_weight", [0.0, 0.5])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kind", Divergence)
def test_loss_and_gradient_are_those_of_plain_autograd(
    kind: Divergence, temperature: float, sft_weight: float, compiled: bool
) -> None:
    objective = objective_of(divergence=kind, temperature=temperature, sft_weight=sft_weight, top_k_logprobs=8)
    rows, (hidden, weight) = taught(objective, plain_rows()), tensors(2)
    weights = torch.rand(SHAPE, generator=torch.Generator().manual_seed(5))
    rows = replace(rows, token_values={**rows.token_values, WEIGHT: weights})
    scale = StepScale(33, loss_scale=4.0, counts={WEIGHT: 21.0})
    leaf, own = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    is_target = rows.targets != IGNORE_INDEX
    divergence = (expected(kind, objective, leaf, own, rows) * weights)[is_target].sum() / 21
    losses = F.cross_entropy((leaf @ own.T).double().flatten(0, 1), rows.targets.flatten(), reduction="none")
    entropy = (losses.view(SHAPE) * weights).sum() / 21
    total = divergence + sft_weight * entropy
    (4 * total).backward()

    weight_gradient = torch.zeros_like(weight)
    head = head_of(hidden, weight, weight_gradient, 7, compiled=compiled)
    numbers, gradient = objective.loss(head, rows, scale)

    torch.testing.assert_close(numbers, torch.stack([total, divergence, entropy]).detach().float())
    assert leaf.grad is not None
    assert own.grad is not None
    torch.testing.assert_close(gradient, leaf.grad)
    torch.testing.assert_close(weight_gradient, own.grad)
    sums = objective.evaluate(head_on(hidden, weight, 5), rows)
    scores = objective.scores(dict(zip(objective.evaluation_names, sums.tolist(), strict=True)), scale)
    assert scores["loss"] == pytest.approx(float(total.detach()), rel=1e-6)
    assert scores["perplexity"] == pytest.approx(math.exp(float(entropy.detach())), rel=1e-6)


@pytest.mark.parametrize("kind", Divergence)
@pytest.mark.parametrize("number", [4, VOCAB])
def test_a_teacher_that_is_the_student_teaches_nothing(kind: Divergence, number: int) -> None:
    objective = objective_of(divergence=kind, top_k_logprobs=number)
    rows, (hidden, weight) = taught(objective, plain_rows(), seed=2, spread=1.0), tensors(2)

    numbers, gradient = objective.loss(head_on(hidden, weight), rows, StepScale(33))

    assert abs(float(numbers[1])) < 1e-6
    assert float(gradient.abs().max()) < 1e-6


def test_fewer_tokens_give_no_larger_divergence() -> None:
    losses = []
    for number in (1, 4, 16, VOCAB):
        objective = objective_of(top_k_logprobs=number)
        rows, (hidden, weight) = taught(objective, plain_rows()), tensors(2)
        losses.append(float(objective.loss(head_on(hidden, weight), rows, StepScale(33))[0][0]))

    assert losses == sorted(losses)
    assert losses[0] < losses[-1]
    own, other = tensors(2), tensors(1, 0.5)
    student, teacher = (torch.distributions.Categorical(logits=states @ head.T) for states, head in (own, other))
    whole = torch.distributions.kl_divergence(teacher, student)[rows.targets != IGNORE_INDEX]
    assert losses[-1] == pytest.approx(float(whole.sum()) / 33, rel=1e-5)
