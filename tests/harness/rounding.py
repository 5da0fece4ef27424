"""What rounding may change, by arithmetic that holds on every processor: sums in another order, and steps of Adam.

Other instructions and orders of addition round otherwise: two runs have gradients that are a share r of their size
apart. A step of Adam is as long as its rate, however small the gradient is, so rounding decides the side to which a
weight steps where its gradient g, in units of that size, is below r:

    difference of a weight, in steps      2 for g < r, at most 2 r / g above
    mean of g spread evenly over 0 ... 1  2 r + 2 r ln(1 / r)
    a single weight                       2, as rounding may decide it

The mean is that of a whole model: squares, or a small tensor's mean, would tell of a few weights in the first line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness.pipelines import assert_near, distance
from torch import Tensor

FP32, FP16 = 2.0**-24, 2.0**-11
"""Largest relative error of one rounding."""
_BETA1, _BETA2 = 0.9, 0.999


def reordered(count: int, unit: float = FP32) -> float:
    """Share by which sums of `count` numbers differ in another order, in the root mean square.

    Roundings are independent of each other.
    """
    return unit * math.sqrt(count)


def after_adam(share: float) -> float:
    """Share of an update that is rounding's in the mean; by so much gradients of later steps may differ, too."""
    return 2 * share * (1 + math.log(1 / share))


def assert_near_gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, share: float) -> None:
    """All tensors differ by this share of their norm at most."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        apart, norm = (found[name].double() - gradient.double()).norm(), gradient.double().norm()
        assert apart <= share * norm, f"{name}: {apart / norm:.2g} of the norm, {share:.2g} is possible"


Step = tuple[Tensor, Mapping[str, Tensor]]
"""Loss and gradients."""


def assert_as_exact(found: Step, plain: Step, exact: Step, *, share: float) -> None:
    """A step is about as near to the `exact` one, in fp64, as the `plain` one is.

    Nothing is off by more of its norm than twice what is off most of the plain step, and `share`: which gradient that
    is, as one whose terms cancel, is chance.
    """
    off, usual = (_shares_off(step, exact) for step in (found, plain))
    worst, most = max(off, key=off.__getitem__), 2 * max(usual.values()) + share
    assert off[worst] <= most, f"{worst}: {off[worst]:.2g} of the norm, {most:.2g} is possible"


def _shares_off(step: Step, exact: Step) -> dict[str, float]:
    assert step[1].keys() == exact[1].keys()
    pairs = {"loss": (step[0], exact[0])} | {name: (step[1][name], value) for name, value in exact[1].items()}
    return {name: float((one - value).norm() / value.norm()) for name, (one, value) in pairs.items()}


def assert_near_after_adam(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    *,
    rates: Sequence[float],
    share: float,
    unit: float = FP32,
) -> None:
    """Weights of two runs differ by rounding alone, after one step of Adam for each of `rates`.

    `share` is that of their size by which gradients differ; `before` has the weights of `expected` before all steps.
    """
    assert found.keys() == expected.keys()
    farthest = 2 * sum(rate * _farthest_step(step) for step, rate in enumerate(rates, 1))
    apart = moved = rounded = 0.0
    for name, weights in expected.items():
        difference = (found[name].double() - weights.double()).abs()
        roundings = 2 * len(rates) * unit * weights.double().abs()  # one of each run at each step
        assert (difference <= farthest + roundings).all(), f"{name}: {float(difference.max())}, {farthest} is possible"
        apart += float(difference.sum())
        moved += float((weights.double() - before[name].double()).abs().sum())
        rounded += float(roundings.sum())
    most = after_adam(share) * moved + rounded
    assert moved > 0, "nothing was trained"
    assert apart <= most, f"{apart / moved:.2g} of the update differs, rounding makes {most / moved:.2g}"


def _farthest_step(number: int) -> float:
    """Rates that a weight can go in one step: |m| / √v of any gradients, by the inequality of Cauchy and Schwarz."""
    squares = sum(((1 - _BETA1) * _BETA1**age) ** 2 / ((1 - _BETA2) * _BETA2**age) for age in range(number))
    return math.sqrt(squares * (1 - _BETA2**number)) / (1 - _BETA1**number)


def assert_both_round(found: Step, plain: Step, exact: Step) -> None:
    """Loss and all gradients together differ from the plain step's by what both round, also where `exact` does.

    For delta rules, which the families' code computes in fp32 in a model in fp64, too.
    """
    assert_near(found, plain, loss=1e-6, gradients=max(2e-6, 3 * distance(plain[1], exact[1])))
