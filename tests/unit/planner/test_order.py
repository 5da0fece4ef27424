"""The compute order is searched for like other numbers; one that is given stays, with the slots that it needs."""

from __future__ import annotations

from typing import Any

import pytest
from harness.plan_requests import H200, find_published_shape, request_of

from mobius.config.config import ActivationOffloading, Order, Recompute
from mobius.errors import ScheduleError
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import PlanResult, resolve_auto, round_numbers, solve
from mobius.schedule.spec import ComputeOrder

RTX4090 = Machine(4, GPU_SPECS["RTX4090"])
BREADTH_FIRST, DEPTH_FIRST = ComputeOrder.BREADTH_FIRST, ComputeOrder.DEPTH_FIRST


def ask(machine: Machine = RTX4090, **options: Any) -> PlanRequest:
    usual = {"num_stages": 16, "num_chunks": 16, "compute_order": Order.AUTO, "max_grad_norm": 1.0}
    return request_of(find_published_shape("7b"), machine, **(usual | options))


def answered(request: PlanRequest) -> PlanResult:
    settled = resolve_auto(request)
    return solve(settled, layer=estimated_layer(settled))


@pytest.mark.parametrize("order", [Order.BREADTH_FIRST, Order.DEPTH_FIRST])
@pytest.mark.parametrize("machine", [RTX4090, Machine(4)], ids=["GPUs", "CPUs"])
def test_an_order_that_is_given_is_taken(order: Order, machine: Machine) -> None:
    request = resolve_auto(ask(machine, compute_order=order))
    assert request.candidate.order == ComputeOrder(order.value)
    assert request.resolved_config.pipeline.compute_order is order
    assert request.plan.order == request.candidate.order
    assert solve(request).plan.order == request.candidate.order


def test_auto_takes_the_faster_order_and_never_leaves_it_open() -> None:
    for options in ({}, {"recompute": Recompute.FULL}):
        chosen, *others = (
            answered(ask(**options, compute_order=order))
            for order in (Order.AUTO, Order.BREADTH_FIRST, Order.DEPTH_FIRST)
        )
        assert chosen.request.candidate.is_complete
        assert chosen.step_seconds <= min(each.step_seconds for each in others) * 1.02
    assert resolve_auto(ask(Machine(4))).candidate.order is BREADTH_FIRST


def test_each_streamed_stage_has_a_slot_depth_first_with_prefetch_or_without() -> None:
    for use_prefetch in (True, False):
        plan = answered(ask(compute_order=Order.DEPTH_FIRST, use_prefetch=use_prefetch)).plan
        plan.check_numbers()
        assert plan.slots == tuple(len(plan.streamed_stages(rank)) for rank in range(4))


def test_activations_of_streamed_stages_may_all_be_kept_in_a_slot_for_each() -> None:
    for recompute in (Recompute.NONE, Recompute.ELEMENTWISE):
        plan = answered(ask(H200, recompute=recompute, resident_stages="0", compute_order=Order.BREADTH_FIRST)).plan
        assert plan.saved_activation_stages == frozenset(range(16))
        assert plan.slots == (4, 4, 4, 4)


@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        ({}, [4, 2, 1]),
        ({"num_chunks": 48, "batch_size": 96}, [12, 8, 6, 4, 3, 2, 1]),
        ({"num_chunks": 12, "batch_size": 48, "num_rounds": 3}, [3]),
        ({"num_chunks": 2}, []),
        ({"num_chunks": 2, "num_stages": 4}, [1]),
        ({"activation_offloading": ActivationOffloading.ON}, [4, 2, 1]),
    ],
)
def test_rounds_have_a_microbatch_for_each_rank_or_some_more(options: dict[str, Any], rounds: list[int]) -> None:
    assert round_numbers(ask(**options).trying(order=DEPTH_FIRST)) == rounds


def test_long_sequences_stay_whole_depth_first() -> None:
    options = {"num_chunks": 4, "batch_size": 4, "seq_length": 32768, "num_slices": None}
    shape = find_published_shape("8b")
    for order, is_cut in ((Order.BREADTH_FIRST, True), (Order.DEPTH_FIRST, False)):
        request = resolve_auto(request_of(shape, H200, num_stages=8, compute_order=order, **options))
        assert (request.num_slices > 1) == is_cut


@pytest.mark.parametrize("options", [{"num_chunks": 2}, {"num_rounds": 16}])
def test_rounds_of_too_few_microbatches_are_refused_as_a_run_does(options: dict[str, Any]) -> None:
    for machine in (RTX4090, Machine(4)):
        with pytest.raises(ScheduleError, match="need one for each of 4 ranks"):
            answered(ask(machine, compute_order=Order.DEPTH_FIRST, **options))


def test_sums_that_are_unfinished_depth_first_are_counted_in_one_round_too() -> None:
    request = ask(num_rounds=1)
    assert request.trying(order=DEPTH_FIRST).plan.rank_use(0).has_partial_sums
    assert not request.trying(order=BREADTH_FIRST).plan.rank_use(0).has_partial_sums
