"""Supervised fine-tuning with a weight for each token: the weighted mean, its gradients, and its evaluation."""

from __future__ import annotations

import pytest
import torch
from harness.loss_heads import head_of
from torch.nn import functional as F

from mobius.models.loss import TargetRows
from mobius.objectives.cross_entropy import SUPERVISED
from mobius.objectives.objective import StepScale

BATCH, LENGTH, HIDDEN, VOCAB = 2, 9, 6, 11


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.extended)])
@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_weighted_tokens_have_the_weighted_mean_and_its_gradients(chunk_tokens: int, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    targets[0, :3] = -100
    weights = 2 * torch.rand(BATCH, LENGTH, generator=generator)
    rows, gradient = TargetRows(targets, {"weight": weights}), torch.zeros_like(weight)

    loss_head = head_of(hidden, weight, gradient, chunk_tokens, compiled=compiled)
    counts = SUPERVISED.counts(rows)
    scale = StepScale(int((targets >= 0).sum()), loss_scale=4.0, counts=counts)
    numbers, of_hidden = SUPERVISED.loss(loss_head, rows, scale)

    whole_hidden, whole_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = (whole_hidden @ whole_weight.T).flatten(0, 1)
    each = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="none").view(BATCH, LENGTH)
    loss = (each * weights).sum() / weights[targets >= 0].sum()
    (4.0 * loss).backward()
    assert numbers.item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(of_hidden, whole_hidden.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, whole_weight.grad, rtol=1e-4, atol=1e-6)
    sums = SUPERVISED.evaluate(loss_head, rows)
    evaluated = SUPERVISED.scores(dict(zip(SUPERVISED.evaluation_names, sums.tolist(), strict=True)), scale)
    assert evaluated["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert evaluated["token_accuracy"] == (logits.argmax(-1) == targets.flatten()).sum().item() / scale.num_targets
