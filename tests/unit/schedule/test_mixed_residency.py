"""Stages that stay on the GPU among stages that come and go."""

import itertools
from dataclasses import replace

import pytest
from harness.schedules import spec_of

from mobius.errors import ScheduleError
from mobius.schedule.action import Action, ActionKind
from mobius.schedule.build import build_schedule
from mobius.schedule.check import check
from mobius.schedule.schedule import Schedule

TRANSFERS = (ActionKind.LOAD, ActionKind.OFFLOAD)


def names(schedule: Schedule) -> tuple[str, ...]:
    return tuple(" ".join(str(action) for action in actions) for actions in schedule.actions)


@pytest.fixture(scope="module")
def mixed_schedules() -> list[Schedule]:
    """Every number of ranks, stages, microbatches and slots, with every set of resident stages of the first rank.

    The other ranks keep other numbers of theirs: the first ones, one more from rank to rank, in a circle.
    """
    schedules = []
    for num_ranks, per_rank, slots in itertools.product((1, 2, 3), (1, 2, 3, 4), (1, 2, 3)):
        for kept in range(2**per_rank):
            first = {position * num_ranks for position in range(per_rank) if kept >> position & 1}
            others = {
                rank + position * num_ranks
                for rank in range(1, num_ranks)
                for position in range((len(first) + rank) % (per_rank + 1))
            }
            schedules += [build_schedule(spec_of(num_ranks, per_rank, m, slots, first | others)) for m in (1, 3)]
    return schedules


def test_first_stages_resident_by_hand() -> None:
    # Ranks of three stages; the first of each stays. The slots are filled for the other two while it computes.
    assert names(build_schedule(spec_of(2, 3, 1, 2, {0, 1}))) == (
        "D0 L2 L4 F0.0 F2.0 F4.0 B4.0 O4 B2.0 O2 B0.0",
        "D5 L3 L5 F1.0 F3.0 F5.0 B5.0 O5 B3.0 O3 B1.0",
    )


def test_a_resident_stage_between_streamed_ones_takes_no_slot() -> None:
    assert names(build_schedule(spec_of(1, 4, 1, 1, {1}))) == (
        "D0 L0 F0.0 O0 L2 F1.0 F2.0 O2 L3 F3.0 B3.0 O3 L2 B2.0 O2 L0 B1.0 B0.0 O0",
    )


def test_ranks_may_keep_different_numbers_of_stages() -> None:
    schedule = build_schedule(spec_of(2, 2, 1, 2, {0, 2, 1}))
    assert names(schedule) == ("D0 F0.0 F2.0 B2.0 B0.0", "D3 L3 F1.0 F3.0 B3.0 O3 B1.0")
    assert [schedule.spec.streamed_stages(rank) for rank in range(2)] == [[], [3]]


def test_every_mixture_passes_the_check_and_moves_streamed_stages_only(mixed_schedules: list[Schedule]) -> None:
    # build_schedule raises where check objects.
    assert len(mixed_schedules) == 3 * 3 * (2 + 4 + 8 + 16) * 2
    for schedule in mixed_schedules:
        moved = {action.stage for actions in schedule.actions for action in actions if action.kind in TRANSFERS}
        assert moved == set(range(schedule.spec.num_stages)) - schedule.spec.resident


def test_residency_changes_no_compute_and_no_message(mixed_schedules: list[Schedule]) -> None:
    # Ranks may therefore keep what they have memory for without telling each other.
    for schedule in mixed_schedules:
        streamed = build_schedule(
            spec_of(
                schedule.spec.num_ranks,
                schedule.spec.num_stages // schedule.spec.num_ranks,
                schedule.spec.num_microbatches,
                2,
            )
        )
        for own, others in zip(schedule.actions, streamed.actions, strict=True):
            assert _computes(own) == _computes(others)


def test_streamed_stages_are_loaded_as_if_they_were_alone(mixed_schedules: list[Schedule]) -> None:
    for schedule in mixed_schedules:
        for rank, actions in enumerate(schedule.actions):
            streamed = schedule.spec.streamed_stages(rank)
            num_loads = sum(action.kind is ActionKind.LOAD for action in actions)
            slots = schedule.spec.num_slots or 0
            assert num_loads == len(streamed) + max(0, len(streamed) - slots)


def test_the_last_streamed_stages_stay_in_their_slots_from_forward_to_backward(
    mixed_schedules: list[Schedule],
) -> None:
    # What kept graphs rely on.
    for schedule in mixed_schedules:
        for rank, actions in enumerate(schedule.actions):
            staying = schedule.spec.streamed_stages(rank)[-(schedule.spec.num_slots or 1) :]
            for stage in staying:
                own = [action.kind for action in actions if action.stage == stage and action.kind in TRANSFERS]
                assert own == [ActionKind.LOAD, ActionKind.OFFLOAD]


@pytest.mark.parametrize(
    ("kind", "complaint"), [(ActionKind.LOAD, r"action 1 \(L0\)"), (ActionKind.OFFLOAD, r"action 1 \(O0\)")]
)
def test_moving_a_resident_stage_is_refused(kind: ActionKind, complaint: str) -> None:
    schedule = build_schedule(spec_of(1, 2, 1, 1, {0}))
    data, *rest = schedule.actions[0]
    with pytest.raises(ScheduleError, match=f"resident: rank 0, {complaint}: stage 0 is resident"):
        check(replace(schedule, actions=((data, Action(kind, 0), *rest),)))


def test_a_stage_that_is_declared_streamed_must_be_loaded() -> None:
    schedule = build_schedule(spec_of(1, 2, 1, 1, {0}))
    with pytest.raises(ScheduleError, match=r"resident: rank 0, action 2 \(F0.0\): stage 0 is not loaded"):
        check(replace(schedule, spec=replace(schedule.spec, resident=frozenset())))


def _computes(actions: tuple[Action, ...]) -> list[Action]:
    return [action for action in actions if action.kind not in TRANSFERS]
