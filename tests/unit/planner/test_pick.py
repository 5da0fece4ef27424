"""Of plans about as fast as the fastest, those of least host memory are chosen; of these the fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from harness.plan_requests import find_published_shape, request_of

from mobius.planner.rates import reference_profile
from mobius.planner.request import PlanRequest
from mobius.planner.solver import ALIKE, SAME, TimedPlan, pick
from mobius.schedule.plan import MemoryUse


@dataclass(frozen=True)
class Made(TimedPlan):
    """A candidate whose simulated seconds and bytes are made up."""

    simulated_seconds: float = 0.0
    host: int = 0
    gpu: int = 0
    has_room: bool = True

    def simulated(self) -> Made:
        SIMULATED.append(self)
        return replace(self, seconds=self.simulated_seconds)

    @property
    def fits_host(self) -> bool:
        return self.has_room

    @property
    def host_bytes(self) -> int:  # type: ignore[override]
        return self.host

    @property
    def gpu_bytes(self) -> int:  # type: ignore[override]
        return self.gpu


SIMULATED: list[Made] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    SIMULATED.clear()


@pytest.fixture(scope="module")
def request_of_7b() -> PlanRequest:
    return request_of(find_published_shape("7b"))


def made(
    request: PlanRequest, seconds: float, host: int, gpu: int = 0, *, bound: float | None = None, **more: Any
) -> Made:
    """A plan of as many resident stages as `residents` says, 4 ranks of 8 stages, whose numbers tell it apart."""
    residents, slots = more.pop("residents", 0), more.pop("slots", 2)
    plan = request.plan.with_same_use(MemoryUse(residents, 0, slots))
    if (chunks := more.pop("chunks", None)) is not None:
        plan = replace(plan, num_microbatches=chunks)
    bound = 0.9 * seconds if bound is None else bound
    return Made(request, plan, reference_profile(request), bound, simulated_seconds=seconds, host=host, gpu=gpu, **more)


def test_of_plans_about_as_fast_the_one_with_the_least_host_memory_wins(request_of_7b: PlanRequest) -> None:
    for seconds, is_chosen in ((1 + 0.9 * ALIKE, True), (1 + 1.1 * ALIKE, False)):
        fastest, lighter = made(request_of_7b, 1.0, host=100), made(request_of_7b, seconds, host=50, chunks=16)
        heavier = made(request_of_7b, 1.0001, host=200, chunks=32)
        assert pick([heavier, fastest, lighter]).plan == (lighter if is_chosen else fastest).plan


def test_with_about_as_much_host_memory_the_fastest_wins_and_of_equally_fast_ones_the_least_gpu_memory(
    request_of_7b: PlanRequest,
) -> None:
    first = made(request_of_7b, 1.0, 1000, gpu=50)
    for seconds, host, is_chosen in (
        (1 + 0.9 * SAME, 1000, True),
        (1 + 1.1 * SAME, 1000, False),
        (1 + 0.9 * SAME, 1004, True),
        (1 + 0.9 * SAME, 1020, False),
        (1 + 1.1 * SAME, 996, False),
    ):
        second = made(request_of_7b, seconds, host, gpu=40, chunks=16)
        assert pick([first, second]).plan == (second if is_chosen else first).plan, (seconds, host)


def test_seconds_of_the_choice_are_simulated_and_bounds_do_not_decide(request_of_7b: PlanRequest) -> None:
    promising, fast = made(request_of_7b, 2.0, 1, bound=0.5), made(request_of_7b, 1.0, 100, bound=0.99, chunks=16)
    chosen = pick([promising, fast])
    assert (chosen.plan, chosen.seconds) == (fast.plan, 1.0)


def test_what_the_bound_rules_out_is_not_simulated(request_of_7b: PlanRequest) -> None:
    fast, slow = made(request_of_7b, 1.0, 100, bound=0.99), made(request_of_7b, 1.2, 1, bound=1.1, chunks=16)
    assert pick([slow, fast]).plan == fast.plan
    assert {each.plan for each in SIMULATED} == {fast.plan}


def test_a_lighter_plan_whose_bound_is_within_the_limit_is_simulated_too(request_of_7b: PlanRequest) -> None:
    """Its bound is above the fastest step, so that it is not simulated to find that."""
    fast = made(request_of_7b, 1.0, 100, bound=0.5)
    lighter, lightest = (
        made(request_of_7b, seconds, host, bound=1.001, chunks=chunks)
        for seconds, host, chunks in ((1.005, 60, 16), (1.5, 30, 32))
    )
    assert pick([fast, lighter, lightest]).plan == lighter.plan


def test_what_does_not_fit_the_host_comes_last(request_of_7b: PlanRequest) -> None:
    fast, fitting = made(request_of_7b, 1.0, 1, has_room=False), made(request_of_7b, 3.0, 100, chunks=16)
    assert pick([fast, fitting]).plan == fitting.plan
    assert pick([fast, replace(fitting, has_room=False)]).plan == fast.plan


def test_among_numbers_of_residents_the_fastest_is_found_step_by_step(request_of_7b: PlanRequest) -> None:
    """Bounds are alike, and seconds have one valley."""
    for best in range(9):
        plans = [
            made(request_of_7b, 1 + 0.1 * abs(number - best), 100, bound=0.9, residents=number) for number in range(9)
        ]
        assert pick(plans).plan == plans[best].plan
