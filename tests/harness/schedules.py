"""Specs of schedules whose ranks have equal slots, schedules in an order of one's own, and even cuts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from mobius.schedule.action import Action, compute_kinds
from mobius.schedule.breadth_first import data_actions
from mobius.schedule.partition import StageCut, partition_of
from mobius.schedule.schedule import Schedule
from mobius.schedule.spec import ScheduleSpec


def spec_of(
    num_ranks: int,
    stages_per_rank: int,
    num_microbatches: int,
    num_slots: int | Sequence[int] | None,
    resident: Collection[int] = (),
    *,
    offloaded_activation_stages: Collection[int] = (),
    **more: Any,
) -> ScheduleSpec:
    """With `num_slots` slots on every rank, or a number per rank; None: every stage is resident.

    A rank without streamed stages gets no slot. `more` are further fields by name.
    """
    num_stages = num_ranks * stages_per_rank
    given = num_slots if isinstance(num_slots, Sequence) else [num_slots or 0] * num_ranks
    spec = ScheduleSpec(
        num_ranks,
        num_stages,
        num_microbatches,
        tuple(given),
        frozenset(range(num_stages) if num_slots is None else resident),
        offloaded_activation_stages=frozenset(offloaded_activation_stages),
        **more,
    )
    return replace(spec, slots=tuple(slots if spec.streamed_stages(rank) else 0 for rank, slots in enumerate(given)))


def even_cuts(num_layers: int, num_stages: int) -> tuple[StageCut, ...]:
    """Stages whose numbers of layers differ by one at most."""
    ends = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return partition_of([end - first for first, end in pairwise(ends)])


def in_order(spec: ScheduleSpec, names: str) -> Schedule:
    """A schedule, not checked, of forwards and backwards such as `F0.0 F1.0 B1.0 B0.0`, in an order over all ranks.

    All stages are resident. Each rank plays its own actions in this order.
    """
    ranks = [data_actions(rank, spec) for rank in range(spec.num_ranks)]
    for name in names.split():
        stage, microbatch = map(int, name[1:].split("."))
        kind = compute_kinds(stage, spec.num_stages)[name[0] == "B"]
        ranks[spec.rank_of(stage)].append(Action(kind, stage, microbatch))
    return Schedule(spec, tuple(map(tuple, ranks)))


CROSSING = {
    1: "F0.0 F0.1 F1.0 F1.1 F2.0 F2.1 F3.0 B3.0 B2.0 F3.1 B3.1 B1.0 B2.1 B0.0 B1.1 B0.1",
    2: "F0.0 F1.0 F0.1 F1.1 F2.0 F3.0 B3.0 F2.1 B2.0 B1.0 B0.0 F3.1 B3.1 B2.1 B1.1 B0.1",
}
"""By ranks, orders of four stages and two microbatches: a gradient is received before an activation that was sent
before it by the same rank."""
