"""Bounds of harness/rounding.py hold for rounding, and not for gradients of which a thousandth is wrong."""

from __future__ import annotations

import pytest
import torch
from harness.rounding import FP32, assert_as_exact, assert_near_after_adam, reordered
from torch import Tensor

RATES = (2e-3, 1e-3, 5e-4)
COUNT = 300


def steps(share: float, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights before and after steps of torch's AdamW, whose gradients are off by `share` of their size.

    Its default epsilon leaves tiny gradients whole steps.
    """
    drawn, errors = torch.Generator().manual_seed(1), torch.Generator().manual_seed(seed)
    weights = torch.randn(200_000, generator=drawn) * 0.02
    before, optimizer = weights.clone(), torch.optim.AdamW([weights.requires_grad_()])
    for rate in RATES:
        gradient = torch.randn(len(weights), generator=drawn)
        weights.grad = gradient + share * torch.randn(len(weights), generator=errors)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return {"weight": before}, {"weight": weights.detach()}


@pytest.mark.parametrize("seed", [2, 3])
def test_weights_whose_gradients_are_off_by_rounding_are_near(seed: int) -> None:
    share = reordered(COUNT)
    before, expected = steps(0.0, 0)
    assert_near_after_adam(steps(share, seed)[1], expected, before, rates=RATES, share=share)


def test_weights_whose_gradients_are_off_by_a_thousandth_are_not() -> None:
    before, expected = steps(0.0, 0)
    with pytest.raises(AssertionError, match="of the update differs"):
        assert_near_after_adam(steps(1e-3, 2)[1], expected, before, rates=RATES, share=reordered(COUNT))


def test_a_weight_alone_goes_at_most_to_the_other_side() -> None:
    before, expected = steps(0.0, 0)
    way = expected["weight"] - before["weight"]
    for times, is_possible in ((-0.99, True), (-1.01, False)):
        found = expected["weight"].clone()
        place = way.abs().argmax()
        found[place] = before["weight"][place] + times * way[place]
        if is_possible:
            assert_near_after_adam({"weight": found}, expected, before, rates=RATES, share=1e-3)
        else:
            with pytest.raises(AssertionError, match="is possible"):
                assert_near_after_adam({"weight": found}, expected, before, rates=RATES, share=1e-3)


def test_sums_in_another_order_are_as_near_as_their_number_allows() -> None:
    numbers = torch.randn(4096, 500, generator=torch.Generator().manual_seed(0)) * 0.5 + 1
    one, other = torch.zeros(500), torch.zeros(500)
    for place in range(len(numbers)):
        one += numbers[place]
        other += numbers[-1 - place]
    apart = ((one.double() - other.double()) / numbers.double().sum(0)).square().mean().sqrt()
    assert FP32 < float(apart) < reordered(4096)


def test_a_step_is_as_exact_as_another_one_unless_a_gradient_is_off_by_a_thousandth() -> None:
    def off_by(share: float, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        errors = torch.Generator().manual_seed(seed)
        drawn = {
            name: value * (1 + share * torch.randn(value.shape, generator=errors)) for name, value in exact.items()
        }
        return torch.tensor(4.0), drawn

    exact = {name: torch.randn(size, dtype=torch.float64) for name, size in (("bias", 8), ("weight", 1000))}
    plain, share = off_by(1e-6, 1), reordered(COUNT)
    assert_as_exact(off_by(1e-6, 2), plain, off_by(0.0, 0), share=share)
    loss, gradients = off_by(1e-6, 2)
    with pytest.raises(AssertionError, match="bias: 0.001 of the norm"):
        assert_as_exact((loss, gradients | {"bias": exact["bias"] * 1.001}), plain, off_by(0.0, 0), share=share)
