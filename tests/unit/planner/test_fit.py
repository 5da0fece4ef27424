"""What is left of a GPU's memory goes to what shortens the step most, and never beyond the limit."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from harness.plan_requests import H200, request_of

from mobius.config.config import Order, Recompute
from mobius.errors import GpuMemoryError, PlanError
from mobius.limits import MIN_GRADIENT_SUMS
from mobius.planner.fit import fit_plan, fitting_plans
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.rates import reference_profile
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.step_prediction import predict_min_step_seconds
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import MemoryUse, Plan
from mobius.units import GIB

GRAPH = int(1.34 * GIB)
"""Bytes of a layer and a microbatch."""
MAILBOXES = 4 / 16
"""GiB of four messages of 16 x 512 tokens, which what fits leaves room for."""


def request_for(shape: ModelShape, gib: float | None, **options: Any) -> PlanRequest:
    """64 x 512 tokens in four chunks and 32 stages; `gib` may be used beside the mailboxes, None: on CPUs."""
    machine = Machine(4) if gib is None else replace(H200, free_bytes=int((gib + MAILBOXES / 0.97) * GIB))
    return request_of(shape, machine, **({"num_chunks": 4, "resident_stages": "0"} | options))


def layer_of(request: PlanRequest, graph_bytes: int) -> LayerBytes:
    estimate = estimated_layer(request)
    return LayerBytes(graph_bytes, graph_bytes * estimate.peak // estimate.saved_activations)


def fit(shape: ModelShape, gib: float | None, *, graph_bytes: int | None = GRAPH, **options: Any) -> Plan:
    request = request_for(shape, gib, **options)
    return fit_plan(request, layer=None if graph_bytes is None else layer_of(request, graph_bytes))


def all_that_fit(shape: ModelShape, gib: float, **options: Any) -> list[Plan]:
    request = request_for(shape, gib, **options)
    return fitting_plans(request, layer_of(request, GRAPH))


def most_resident(shape: ModelShape, gib: float, **options: Any) -> Plan:
    """The plan with the most resident stages of those that recompute everything."""
    plans = all_that_fit(shape, gib, resident_stages="auto", recompute=Recompute.FULL, **options)
    return max(plans, key=lambda plan: len(plan.resident))


def num_resident(plan: Plan, rank: int = 0) -> int:
    return plan.use_of(rank).num_resident


def kept(plan: Plan, rank: int = 0) -> set[int]:
    return plan.saved_activation_stages & {*plan.local_stages(rank)}


INNER, FIRST = 202_383_360, 333_455_360
"""Parameters of an inner stage and of the first one, with the embedding, of 32."""


def least_gib(slots: int, graphs: int, resident: int = 0, state_bytes: int = 14, graph: float = GRAPH / GIB) -> float:
    """By hand for rank 0 of Llama-2-7B in 32 stages: what must be free for a use of it to fit, in GiB.

    A message, or input of a layer, is 1/16 GiB; eight stages keep four inputs each. Two messages are received ahead;
    of the six that were sent last, four lie in the graphs of the last stage if it keeps them. A layer's work is 11 x
    4096 + 2 + 6 x 11008 wide where its graph is 7 x 4096 + 2 + 3 x 11008, and the graph is there already if it is kept.
    """
    largest = FIRST if resident == 0 else INNER
    streamed = FIRST + 7 * INNER if slots == 8 else slots * largest  # a slot for each, or all as large as the largest
    states = streamed * 2 + FIRST * 4
    states += state_bytes * (FIRST + (resident - 1) * INNER) if resident else 0
    work = graph * (11 * 4096 + 2 + 6 * 11008) / (7 * 4096 + 2 + 3 * 11008) - (graph if graphs else 0)
    moment = 2 + 4 * graphs * graph + (2 + (2 if graphs else 6)) / 16 + work
    return (states / GIB + 1.03 * moment + 1 / 8 + 16 * 32768 / GIB) / 0.97


@pytest.mark.parametrize(("slots", "num_graphs"), [(2, 0), (3, 0), (2, 1), (3, 1), (3, 3), (4, 4), (8, 4), (8, 8)])
def test_without_residency_slots_and_activations_are_tried_from_the_byte_on_at_which_they_fit(
    llama_7b: ModelShape, slots: int, num_graphs: int
) -> None:
    least, use = least_gib(slots, num_graphs), (slots, set(range(28, -4, -4)[:num_graphs]))
    assert use in [(plan.slots[0], kept(plan)) for plan in all_that_fit(llama_7b, least + 0.01)]
    if (slots, num_graphs) != (2, 0):
        assert use not in [(plan.slots[0], kept(plan)) for plan in all_that_fit(llama_7b, least - 0.01)]


def test_without_prefetch_there_is_one_slot_in_which_the_last_stage_stays(llama_7b: ModelShape) -> None:
    plan = fit(llama_7b, 80, use_prefetch=False)
    assert (plan.num_slots, kept(plan)) == (1, {28})


ON_GPU: dict[str, Any] = {"use_offload": False, "resident_stages": "auto", "recompute": Recompute.NONE}


def test_all_stages_keep_their_activations_if_asked_and_too_little_memory_is_refused(llama_7b: ModelShape) -> None:
    assert fit(llama_7b, 140, **ON_GPU).saved_activation_stages == set(range(32))
    with pytest.raises(GpuMemoryError, match=r"inputs \d"):
        fit(llama_7b, 60, **ON_GPU)


def test_room_for_the_mailboxes_is_left_alone(llama_7b: ModelShape) -> None:
    gib = least_gib(3, 3) + 0.01
    assert len(kept(fit(llama_7b, gib))) == 3
    assert len(kept(fit(llama_7b, gib - MAILBOXES / 2))) == 2


def test_what_is_not_measured_is_not_kept(llama_7b: ModelShape) -> None:
    assert fit(llama_7b, 140, graph_bytes=None).saved_activation_stages == frozenset()


def test_where_memory_is_unknown_nothing_is_added(llama_7b: ModelShape) -> None:
    assert fit(llama_7b, None).num_slots == 2
    assert fit(llama_7b, None).saved_activation_stages == frozenset()
    assert fit(llama_7b, None, **ON_GPU).saved_activation_stages == set(range(32))


@pytest.mark.parametrize("stages", [1, 2, 5, 6, 7, 8])
def test_as_many_first_stages_may_stay_as_fit(llama_7b: ModelShape, stages: int) -> None:
    # The last two give up a slot each.
    least = least_gib(min(2, 8 - stages), 0, resident=stages)
    for gib, number in ((least - 0.01, stages - 1), (least + 0.01, stages)):
        plan = most_resident(llama_7b, gib)
        assert plan.resident.intersection(plan.local_stages(0)) == set(range(0, 4 * number, 4))
        assert plan.saved_activation_stages == frozenset()


def test_what_is_updated_at_once_keeps_no_gradients_and_more_of_it_fits(llama_7b: ModelShape) -> None:
    gib = least_gib(1, 0, resident=7, state_bytes=12) + 0.01
    assert least_gib(2, 0, resident=5) < gib < least_gib(2, 0, resident=6)
    for norm, stages in ((0.0, 7), (1.0, 5)):
        assert num_resident(most_resident(llama_7b, gib, max_grad_norm=norm)) == stages


@pytest.mark.parametrize("per_rank", [8, 13, 16])
def test_none_some_and_all_stages_are_tried_as_residents(llama_7b: ModelShape, per_rank: int) -> None:
    shape = replace(llama_7b, layer_parameters=(10**6,) * 64)
    plans = all_that_fit(shape, 140, num_stages=4 * per_rank, resident_stages="auto", recompute=Recompute.FULL)
    numbers = sorted({num_resident(plan) for plan in plans})
    assert (numbers[0], numbers[-1]) == (0, per_rank)
    assert max(later - earlier for earlier, later in pairwise(numbers)) <= 2


def test_kept_activations_have_their_weights_in_place(llama_7b: ModelShape) -> None:
    for gib in range(8, 100, 3):
        plan = fit(llama_7b, gib, resident_stages="auto")
        for rank in range(4):
            streamed = plan.streamed_stages(rank)
            staying = streamed[len(streamed) - plan.slots[rank] :]
            assert kept(plan, rank) <= plan.resident.union(staying)


def test_more_memory_is_never_used_worse(llama_7b: ModelShape) -> None:
    request = request_for(llama_7b, None)
    profile = reference_profile(request)
    plans = [fit(llama_7b, gib, resident_stages="auto") for gib in range(8, 80, 2)]
    seconds = [predict_min_step_seconds(plan, request, profile) for plan in plans]
    assert all(later <= earlier for earlier, later in pairwise(seconds))
    assert seconds[-1] < seconds[0]


def test_slots_and_sum_buffers_are_few_or_one_for_each_stage(llama_7b: ModelShape) -> None:
    for order, slots in ((Order.DEPTH_FIRST, {8}), (Order.BREADTH_FIRST, {2, 3, 8})):
        options = {"compute_order": order, "num_chunks": 8, "recompute": Recompute.FULL}
        for rounds, buffers in ((2, {MIN_GRADIENT_SUMS, 8}), (1, {1} if order is Order.BREADTH_FIRST else {2, 8})):
            plans = all_that_fit(llama_7b, 40, num_rounds=rounds, **options)
            assert {plan.slots[0] for plan in plans} == slots
            assert {plan.num_sum_buffers(0) for plan in plans} == buffers


@pytest.mark.parametrize("stages", [0, 1, 3, 8])
def test_a_number_that_is_asked_for_is_taken_and_only_activations_are_chosen(llama_7b: ModelShape, stages: int) -> None:
    plan = fit(llama_7b, 140, resident_stages=str(stages))
    assert [num_resident(plan, rank) for rank in range(4)] == [stages] * 4
    assert len(kept(plan)) == 8
    assert fit(llama_7b, None, resident_stages=str(stages)).resident == plan.resident


def test_more_resident_stages_than_a_rank_has_are_refused(llama_7b: ModelShape) -> None:
    for gib in (None, 140):
        with pytest.raises(PlanError, match=r"--resident_stages 9: each rank has 8 stage\(s\)"):
            fit(llama_7b, gib, resident_stages="9")


def test_a_rank_without_streamed_stages_leaves_the_others_slots_in_its_plan(llama_7b: ModelShape) -> None:
    plan = request_for(llama_7b, 140).plan.with_memory_uses([MemoryUse(8, 0, 8), *[MemoryUse(0, 0, 8)] * 3])
    assert plan.slots == (0, 8, 8, 8)
