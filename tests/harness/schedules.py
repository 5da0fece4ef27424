"""Specs of schedules whose ranks have equal slots."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

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
