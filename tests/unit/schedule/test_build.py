"""The schedules that come out: small ones as written by hand, and what holds for all of them."""

import pytest
from harness.schedules import spec_of

from mobius.errors import ScheduleError
from mobius.schedule.action import ActionKind
from mobius.schedule.build import build_schedule
from mobius.schedule.schedule import Schedule

# Two ranks, two stages each, two microbatches.
BY_HAND = {
    None: (
        "D0 F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "D3 F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    ),
    1: (
        "D0 L0 F0.0 F0.1 O0 L2 F2.0 F2.1 B2.0 B2.1 O2 L0 B0.0 B0.1 O0",
        "D3 L1 F1.0 F1.1 O1 L3 F3.0 B3.0 F3.1 B3.1 O3 L1 B1.0 B1.1 O1",
    ),
    2: (
        "D0 L0 L2 F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 O2 B0.0 B0.1 O0",
        "D3 L1 L3 F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 O3 B1.0 B1.1 O1",
    ),
}


def names(schedule: Schedule) -> tuple[str, ...]:
    return tuple(" ".join(str(action) for action in actions) for actions in schedule.actions)


@pytest.mark.parametrize("num_slots", BY_HAND)
def test_two_ranks_with_two_stages_each_do_what_was_written_by_hand(num_slots: int | None) -> None:
    assert names(build_schedule(spec_of(2, 2, 2, num_slots))) == BY_HAND[num_slots]


def test_with_more_stages_than_slots_the_next_stage_is_loaded_before_the_current_one_computes() -> None:
    assert names(build_schedule(spec_of(1, 4, 1, 2))) == (
        "D0 L0 L1 F0.0 O0 L2 F1.0 O1 L3 F2.0 F3.0 B3.0 O3 L1 B2.0 O2 L0 B1.0 O1 B0.0 O0",
    )


def test_each_rank_may_have_slots_of_its_own() -> None:
    schedule = build_schedule(spec_of(2, 2, 2, (1, 2)))
    assert (schedule.spec.slots, schedule.spec.num_slots) == ((1, 2), 2)
    assert names(schedule) == (BY_HAND[1][0], BY_HAND[2][1])
    resident = build_schedule(spec_of(2, 2, 2, (0, 1), {0, 2}))
    assert (names(resident)[0], resident.spec.slots) == (BY_HAND[None][0], (0, 1))
    with pytest.raises(ScheduleError, match="0 GPU slots"):
        build_schedule(spec_of(2, 2, 2, (0, 1)))


def test_one_stage_in_all_is_loaded_once() -> None:
    assert names(build_schedule(spec_of(1, 1, 2, 1))) == ("D0 L0 F0.0 B0.0 F0.1 B0.1 O0",)


def test_the_kinds_follow_the_position_of_the_stage() -> None:
    actions = build_schedule(spec_of(1, 3, 1, None)).actions[0]
    assert [action.kind.value for action in actions] == [
        "generate_data",
        *("forward_first", "forward_middle", "forward_last"),
        *("backward_last", "backward_middle", "backward_first"),
    ]


def test_every_promised_size_passes_the_check(all_schedules: list[Schedule]) -> None:
    # build_schedule raises where check objects; 5 ranks x 4 stages per rank x 6 microbatches x 4 slots.
    assert len(all_schedules) == 480


def test_loads_are_as_few_as_the_slots_allow(all_schedules: list[Schedule]) -> None:
    # Forward needs v stages; of those, backward finds the last `num_slots` still there and must fetch the others again.
    for schedule in all_schedules:
        if schedule.spec.num_slots is None:
            continue
        stages_per_rank = schedule.spec.num_stages // schedule.spec.num_ranks
        for actions in schedule.actions:
            num_loads = sum(action.kind is ActionKind.LOAD for action in actions)
            assert num_loads == stages_per_rank + max(0, stages_per_rank - schedule.spec.num_slots)


def test_gradients_are_added_in_the_order_of_the_microbatches(all_schedules: list[Schedule]) -> None:
    for schedule in all_schedules:
        for rank, actions in enumerate(schedule.actions):
            for stage in schedule.spec.local_stages(rank):
                backward = [a.microbatch for a in actions if a.kind.is_backward and a.stage == stage]
                assert backward == list(range(schedule.spec.num_microbatches))


@pytest.mark.parametrize(
    ("size", "complaint"),
    [
        ((0, 1, 1, 1), "has 0 ranks"),
        ((1, 0, 1, 1), "0 stages per rank"),
        ((1, 1, -1, 1), r"-1 microbatches \(--num_chunks\)"),
        ((1, 1, 1, 0), "0 GPU slots"),
        ((0, 1, 0, None), "0 ranks, 0 microbatches"),
    ],
)
def test_counts_below_one_are_refused(size: tuple[int, int, int, int | None], complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        build_schedule(spec_of(*size))


def test_the_last_stages_of_a_rank_stay_in_their_slots_from_forward_to_backward(all_schedules: list[Schedule]) -> None:
    # What `graph_stages` rely on: the weights that a kept graph refers to are not overwritten.
    for schedule in all_schedules:
        if schedule.spec.num_slots is None:
            continue
        for rank, actions in enumerate(schedule.actions):
            staying = set(schedule.spec.local_stages(rank)[-schedule.spec.num_slots :])
            forwarded: set[int] = set()
            backwarded: set[int] = set()
            for action in actions:
                if action.kind.is_forward:
                    forwarded.add(action.stage)
                elif action.kind.is_backward:
                    backwarded.add(action.stage)
                elif action.kind is ActionKind.OFFLOAD and action.stage in forwarded - backwarded:
                    assert action.stage not in staying, (schedule.spec.num_slots, rank, str(action))
