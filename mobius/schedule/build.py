"""Builds a schedule from its spec: compute order, then transfers, then the check."""

from collections.abc import Callable, Mapping
from functools import lru_cache

from mobius.schedule.action import Action
from mobius.schedule.activation_offloading import add_activation_offloads
from mobius.schedule.breadth_first import breadth_first_order, data_actions, evaluation_order
from mobius.schedule.check import check
from mobius.schedule.depth_first import add_heads, depth_first_order
from mobius.schedule.schedule import Schedule
from mobius.schedule.spec import ComputeOrder, ScheduleSpec
from mobius.schedule.weight_streaming import add_transfers

COMPUTE_ORDERS: Mapping[ComputeOrder, Callable[[int, ScheduleSpec], list[Action]]] = {
    ComputeOrder.BREADTH_FIRST: breadth_first_order,
    ComputeOrder.DEPTH_FIRST: depth_first_order,
    ComputeOrder.EVALUATION: evaluation_order,
}
"""Functions that order the forwards and backwards of a rank. Transfers are added later; `check` finds deadlocks."""


def build_schedule(spec: ScheduleSpec) -> Schedule:
    """Return the checked schedule of one step, or of one evaluation pass.

    Raises ScheduleError if a number is below 1, or if rounds or slices do not divide the microbatches.
    """
    spec.check_numbers()
    schedule = build_unchecked(spec)
    check(schedule)
    return schedule


def build_unchecked(spec: ScheduleSpec) -> Schedule:
    """Return the schedule of a spec with valid numbers, without checking the actions."""
    return Schedule(spec, tuple(_rank_actions(rank, spec.of_rank(rank)) for rank in range(spec.num_ranks)))


@lru_cache(maxsize=1024)
def _rank_actions(rank: int, spec: ScheduleSpec) -> tuple[Action, ...]:
    actions = COMPUTE_ORDERS[spec.order](rank, spec)
    if spec.slots[rank]:
        actions = add_transfers(actions, spec.slots[rank], spec.num_sum_buffers(rank), spec.resident)
    if spec.offloaded_activation_stages and not spec.is_evaluation:
        actions = add_activation_offloads(actions, spec)
    if spec.spreads_head:
        actions = add_heads(actions, rank, spec)
    return (*data_actions(rank, spec), *actions)
