"""Depth first, a rank's peak is counted from a few turns of its schedule; here all of them are played."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import mul

import pytest
from harness.plan_requests import H200, estimate_gpu_memory, find_published_shape, request_of

from mobius.config.config import Order, Recompute
from mobius.limits import max_pending_offloads
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.peak_memory import LayerBytes, MicrobatchBytes, find_peak
from mobius.schedule.action import ActionKind
from mobius.schedule.build import build_unchecked
from mobius.schedule.depth_first import max_waiting, waiting_microbatches
from mobius.schedule.partition import partition_of
from mobius.schedule.plan import MemoryUse, Plan
from mobius.schedule.spec import ComputeOrder

SIZES = [
    (ranks, per_rank, size, rounds)
    for ranks, per_rank, size, rounds in product((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 4, 6, 7), (1, 2, 3, 5))
    if per_rank == 1 or size >= ranks
]


def plan_of(
    ranks: int, per_rank: int, size: int, rounds: int, layers: Sequence[int] = (), *, spreads_head: bool = False
) -> Plan:
    cuts = partition_of(layers or [1] * (ranks * per_rank))
    order = {"num_rounds": rounds, "order": ComputeOrder.DEPTH_FIRST, "spreads_head": spreads_head}
    return Plan(ranks, len(cuts), size * rounds, (per_rank,) * ranks, cuts=cuts, **order)  # type: ignore[arg-type]


def played(plan: Plan, rank: int) -> Iterator[list[int]]:
    """Microbatches between forward and backward in each stage of `rank`, while each of its actions runs."""
    waiting = dict.fromkeys(plan.local_stages(rank), 0)
    for action in build_unchecked(plan).actions[rank]:
        if action.kind.is_forward:
            waiting[action.stage] += 1
            yield [*waiting.values()]
        elif action.kind.is_backward:
            yield [*waiting.values()]
            waiting[action.stage] -= 1
    assert not any(waiting.values())


@pytest.mark.parametrize("spreads_head", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_turns_that_are_counted_have_the_most_of_any_stages(ranks: int, spreads_head: bool) -> None:
    draw = random.Random(ranks)
    for size in (each for each in SIZES if each[0] == ranks):
        plan = plan_of(*size, spreads_head=spreads_head and 1 < ranks <= size[2] * size[3])
        for rank in range(ranks):
            everything = [*played(plan, rank)]
            counted = waiting_microbatches(rank, plan)
            most_of_stages = [max_waiting(stage, plan) for stage in plan.local_stages(rank)]
            assert most_of_stages == [max(numbers) for numbers in zip(*everything, strict=True)]
            for _ in range(5):  # as many bytes in each stage, or none
                taken = [draw.choice([0, 1, 1, 3, 10]) for _ in range(size[1])]
                most, told = (max(sum(map(mul, each, taken)) for each in turns) for turns in (everything, counted))
                assert most == told, (size, rank, taken)


def test_inputs_at_the_peak_are_those_of_the_fullest_turn() -> None:
    draw, size = random.Random(3), MicrobatchBytes(1, LayerBytes(0, 0), 0, 0)
    for turn, numbers in enumerate(draw.sample(SIZES, 80)):
        layers = [draw.randint(1, 4) for _ in range(numbers[0] * numbers[1])]
        plan = plan_of(*numbers, layers, spreads_head=turn % 2 > 0 and 1 < numbers[0] <= numbers[2] * numbers[3])
        for rank in range(plan.num_ranks):
            layers = [len(plan.cuts[stage].layers) for stage in plan.local_stages(rank)]
            most, told = max(sum(map(mul, each, layers)) for each in played(plan, rank)), find_peak(plan, rank, size)
            # The model's last stage has one microbatch at a time, which may meet the others at their most.
            more = 0 if plan.spreads_head or rank < plan.num_ranks - 1 else layers[-1]
            assert most <= told.inputs <= most + more, (numbers, rank)


def test_no_more_inputs_or_products_are_on_a_gpu_than_are_counted_while_copies_run() -> None:
    """Stages are so large that messages do not hide an input of theirs."""
    draw, products, exact = random.Random(4), 7, 0
    size = MicrobatchBytes(1, LayerBytes(0, 0, saved_products=products), 0, 0)
    for ranks, per_rank, per_round, rounds in draw.sample(SIZES, 120):
        whole = plan_of(ranks, per_rank, per_round, rounds, layers=[100] * (ranks * per_rank))
        whole = replace(whole, num_offloaded_microbatches=draw.choice([0, 1, per_round]))
        plan = whole.with_memory_uses([MemoryUse(0, 0, per_rank, draw.randint(0, per_rank)) for _ in range(ranks)])
        for rank in range(ranks):
            most, told = _most_on_gpu(plan, rank, products), find_peak(plan, rank, size).total
            assert most <= told, (plan, rank)
            exact += told <= most + 3 * products * 100
    assert exact > 100, "nor are many more counted"


def _most_on_gpu(plan: Plan, rank: int, products: int) -> int:
    """Most inputs and products of layers on a rank's GPU at a time, counted action by action."""
    kept: dict[tuple[int, int | None], int] = {}
    leaving: deque[int] = deque(maxlen=max_pending_offloads(plan.copy_lookahead))
    most = 0
    for action in build_unchecked(plan).actions[rank]:
        own, number = (action.stage, action.microbatch), len(plan.cuts[action.stage].layers)
        number *= products if plan.offloads_all(*own) else 1
        if action.kind is ActionKind.OFFLOAD_ACTIVATIONS:
            leaving.append(kept.pop(own))
        elif action.kind is ActionKind.PREFETCH_ACTIVATIONS:
            kept[own] = number
        elif action.kind.is_forward:
            kept[own] = 1 if action.kind is ActionKind.FORWARD_LAST else number
        elif action.kind.is_backward:
            kept[own] = number
        most = max(most, sum(kept.values()) + sum(leaving))
        if action.kind.is_backward:
            del kept[own]
    return most


@pytest.mark.parametrize("level", [Recompute.FULL, Recompute.NONE])
def test_more_rounds_of_as_many_microbatches_take_no_more_memory(level: Recompute) -> None:
    needs = []
    for chunks in (16, 32, 64, 128):
        options = {"num_chunks": chunks, "num_rounds": chunks // 8, "batch_size": 2 * chunks}
        request = request_of(find_published_shape("7b"), H200, compute_order=Order.DEPTH_FIRST, **options)
        saving = 8 if level is Recompute.NONE else 0
        plan = request.plan.with_same_use(MemoryUse(0, saving, 8, num_sum_buffers=8))
        # Tokens of the step are on the GPU, whatever the order.
        layer = estimated_layer(request)
        need = estimate_gpu_memory(request, plan, rank=0, layer=layer)
        needs.append(replace(need, libraries=need.libraries - 16 * request.step_tokens))
    assert needs[1:] == needs[1:2] * 3
    breadth = request.plan.with_same_use(MemoryUse(0, saving, 8, num_sum_buffers=8))
    breadth = replace(breadth, order=ComputeOrder.BREADTH_FIRST, num_rounds=1)
    whole = estimate_gpu_memory(request, breadth, rank=0, layer=layer)
    assert whole.inputs + whole.saved_activations > 8 * (need.inputs + need.saved_activations)
