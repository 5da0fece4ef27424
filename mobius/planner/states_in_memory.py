"""Chooses the streamed stages whose optimizer states stay in host memory, while the states of others are on disks.

A rank's buffers for states are as large as its largest stage. If this stage has a large embedding, the buffers take
more memory than the stage's states would. In addition, states in memory are neither read nor written in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from mobius.planner.memory_estimates import MEASURING_BYTES, estimate_host_memory, rank_layout
from mobius.planner.request import PlanRequest
from mobius.schedule.memory_layout import Part, Place
from mobius.schedule.plan import Plan

FILLED_SHARE = 0.97
"""Share of the memory that states of some stages may fill; the rest covers errors of the estimate."""


def with_states_in_memory(request: PlanRequest, plan: Plan) -> Plan:
    """Return the plan with the stages whose states stay in memory; the plan itself if no states are on disks.

    If the user's memory limit has room for all states, all stay in memory. Otherwise each rank keeps the states of its
    largest stages: first as many as make its memory smallest, with one stage on disks per buffer; then as many as the
    limit has room for, first on the ranks with the most states on disks. With durable steps no states stay in memory: a
    step writes all states, and would first copy those in memory. With weights on disks no states stay in memory,
    because memory is scarcest then.
    """
    most_bytes, disks = most_host_bytes(request), request.memory_rules.disks
    if not _may_have_some(request) or disks is None:
        return plan
    everything = replace(plan, states_in_memory=frozenset(range(plan.num_stages)) - plan.resident)
    if estimate_host_memory(request, everything).total <= most_bytes:
        return everything
    layouts = (rank_layout(request, plan, rank) for rank in range(plan.num_ranks))
    stages = [stage for layout in layouts for stage in layout.stages.values()]
    states = {stage.stage: stage.num_bytes(Place.DISKS, Part.STATES) for stage in stages}
    ranks = [
        sorted(filter(states.get, plan.streamed_stages(rank)), key=lambda stage: -states[stage])
        for rank in range(plan.num_ranks)
    ]

    def keeping(numbers: Sequence[int]) -> Plan:
        kept = frozenset(stage for own, number in zip(ranks, numbers, strict=True) for stage in own[:number])
        return replace(plan, states_in_memory=kept)

    def host_bytes(numbers: Sequence[int], rank: int, number: int) -> int:
        return estimate_host_memory(request, keeping([*numbers[:rank], number, *numbers[rank + 1 :]])).total

    numbers = [0] * plan.num_ranks
    for rank, own in enumerate(ranks):
        most = max(0, len(own) - disks.num_buffers)
        numbers[rank] = min(range(most + 1), key=partial(host_bytes, numbers, rank))
    growing = {*range(plan.num_ranks)}
    while growing:
        rank = max(growing, key=lambda rank: sum(states[stage] for stage in ranks[rank][numbers[rank] :]))
        has_more = numbers[rank] < len(ranks[rank])
        if has_more and host_bytes(numbers, rank, numbers[rank] + 1) <= FILLED_SHARE * most_bytes:
            numbers[rank] += 1
        else:
            growing.remove(rank)
    return keeping(numbers)


def most_host_bytes(request: PlanRequest) -> float:
    """Return the host memory that a plan may take if its states can be on disks; 0 if the user gave no limit."""
    if not _may_have_some(request) or request.config.pipeline.host_memory_limit is None or request.host_bytes is None:
        return 0.0
    return request.host_bytes - request.machine.num_ranks * MEASURING_BYTES  # measuring at the start uses this part


def _may_have_some(request: PlanRequest) -> bool:
    disks = request.memory_rules.disks
    is_possible = disks is not None and not disks.has_weights and not disks.keeps_steps
    return is_possible and not request.shape.keeps_trained_on_gpu
