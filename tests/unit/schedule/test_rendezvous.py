"""The simulation of the messages: it finds the deadlocks that are known to exist and none on directed edges."""

from collections.abc import Hashable
from dataclasses import replace

import pytest

from mobius.schedule import Schedule, build_schedule
from mobius.schedule.rendezvous import directed_edge, find_conflict


def one_queue_per_rank(source_rank: int, target_rank: int) -> Hashable:
    return "all"


def one_queue_per_pair(source_rank: int, target_rank: int) -> Hashable:
    return frozenset((source_rank, target_rank))


def test_directed_edges_never_deadlock(all_schedules: list[Schedule]) -> None:
    for schedule in all_schedules:
        assert find_conflict(schedule, directed_edge) is None


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("stages_per_rank", [2, 3])
def test_one_queue_per_rank_deadlocks_once_a_stage_has_as_many_microbatches_as_ranks(
    num_ranks: int, stages_per_rank: int
) -> None:
    conflict = find_conflict(build_schedule(num_ranks, stages_per_rank, num_ranks, 2), one_queue_per_rank)
    assert conflict is not None
    assert conflict.is_deadlock


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_one_queue_per_pair_deadlocks_too(num_ranks: int) -> None:
    # The last stage sends a gradient home while the stage before it still sends activations.
    conflict = find_conflict(build_schedule(num_ranks, 2, 4, 2), one_queue_per_pair)
    assert conflict is not None
    assert conflict.is_deadlock


def test_a_deadlock_names_everyone_who_waits() -> None:
    # With one queue per rank, rank 0 puts both sends of stage 0 and then its receive for stage 2 into it, rank 1 the
    # send of F1.0 before the receive of F1.1: F1.0's send and F0.1's send block each other.
    conflict = find_conflict(build_schedule(2, 2, 2, None), one_queue_per_rank)
    assert conflict is not None
    assert (conflict.rank, conflict.index) == (0, 3)
    assert "rank 0 at F2.0 for stage 1 on rank 1" in conflict.text
    assert "rank 1 at F1.1 for stage 0 on rank 0" in conflict.text


def test_a_message_in_the_wrong_order_is_found_on_one_rank_too() -> None:
    schedule = build_schedule(1, 2, 2, None)
    data, f00, f01, f10, b10, f11, b11, *backward = schedule.actions[0]
    conflict = find_conflict(replace(schedule, actions=((data, f00, f01, f11, b11, f10, b10, *backward),)))
    assert conflict is not None
    assert not conflict.is_deadlock
    assert (conflict.rank, conflict.index) == (0, 3)
