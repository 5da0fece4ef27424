"""Dropout of adapters' inputs drops the share that is asked for, independently, and the same elements again."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from mobius.models.adapter_dropout import DROPOUT_KEYS, DropoutArguments, drop, linear_key, token_keys
from mobius.models.compiled import KeywordArguments

ROWS, LENGTH, WIDTH = 4, 64, 96
ELEMENTS = ROWS * LENGTH * WIDTH


def dropped(probability: float, *, seed: int = 1, step: int = 1, layer: int = 0, linear: str = "q_proj") -> Tensor:
    """Where ones are dropped, as fp32 [rows, L, width]."""
    keys = torch.from_numpy(token_keys((ROWS, LENGTH), seed=seed, step=step))
    own = DropoutArguments([KeywordArguments()] * 3, keys)[layer][DROPOUT_KEYS]
    return (drop(torch.ones(ROWS, LENGTH, WIDTH), own, linear_key(linear), probability) == 0).float()


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9])
def test_the_share_is_dropped_and_the_rest_is_scaled_up(probability: float) -> None:
    mask = dropped(probability)
    deviation = (probability * (1 - probability)) ** 0.5
    assert mask.mean() == pytest.approx(probability, abs=4 * deviation / ELEMENTS**0.5)
    for axis in range(3):  # no row, place or feature is favoured
        means = mask.mean([each for each in range(3) if each != axis])
        most = 5 * deviation / (ELEMENTS / len(means)) ** 0.5
        assert (means - probability).abs().max() <= most
    keys = torch.from_numpy(token_keys((ROWS, LENGTH), seed=1, step=1))
    inputs = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    output = drop(inputs, keys, 5, probability)
    kept = output != 0
    assert torch.allclose(output[kept] * (1 - probability), inputs[kept])
    (gradient,) = torch.autograd.grad(output.sum(), inputs)
    assert torch.allclose(gradient, kept / (1 - probability))


def test_steps_layers_linears_seeds_and_neighbours_drop_independently() -> None:
    kinds: list[dict[str, Any]] = [{}, {"seed": 2}, {"step": 2}, {"layer": 1}, {"linear": "k_proj"}]
    masks = [dropped(0.5, **kind) - 0.5 for kind in kinds]
    masks += [masks[0].roll(1, axis) for axis in range(3)]
    for one, other in itertools.combinations(masks, 2):
        assert abs(float((one * other).mean()) * 4) <= 4.5 / ELEMENTS**0.5
    assert torch.equal(masks[0], dropped(0.5) - 0.5)
