"""The order in which ranks can play a schedule: receivers follow their senders, and what can stop a rank is told."""

from dataclasses import replace

import pytest
from harness.schedules import CROSSING, in_order, spec_of

from mobius.errors import ScheduleError
from mobius.limits import max_sends_in_flight
from mobius.schedule import schedule as schedule_module
from mobius.schedule import spec as spec_module
from mobius.schedule.action import source_stage
from mobius.schedule.build import build_schedule
from mobius.schedule.check import check
from mobius.schedule.schedule import Schedule, topological_order


def test_built_schedules_are_played_to_the_end(all_schedules: list[Schedule]) -> None:
    for schedule in all_schedules:
        order, conflict = topological_order(schedule)
        assert conflict is None
        for rank, actions in enumerate(schedule.actions):
            assert [action for of_rank, action in order if of_rank == rank] == list(actions)


def test_an_action_that_receives_follows_the_one_that_sends() -> None:
    schedule = build_schedule(spec_of(3, 2, 4, 2))
    order, _ = topological_order(schedule)
    places = {(a.kind.is_backward, a.stage, a.microbatch): place for place, (_, a) in enumerate(order)}
    num_received = 0
    for place, (_, action) in enumerate(order):
        source = source_stage(action, schedule.spec.num_stages)
        if source is not None:
            num_received += 1
            assert places[action.kind.is_backward, source, action.microbatch] < place
    assert num_received == 2 * 5 * 4  # both ways between 6 stages, 4 microbatches


def test_a_deadlock_names_everyone_who_waits() -> None:
    # Rank 0 wants the gradient before it sends the activation of which it is made.
    schedule = build_schedule(spec_of(2, 1, 1, None))
    (data, forward, backward), other = schedule.actions
    order, conflict = topological_order(replace(schedule, actions=((data, backward, forward), other)))
    assert [str(action) for _, action in order] == ["D0", "D1"]
    assert conflict is not None
    assert conflict.is_deadlock
    assert (conflict.rank, conflict.index) == (0, 1)
    assert "rank 0 at B0.0 for stage 1 on rank 1" in conflict.text
    assert "rank 1 at F1.0 for stage 0 on rank 0" in conflict.text


def test_a_message_in_the_wrong_order_is_found_on_one_rank_too() -> None:
    schedule = build_schedule(spec_of(1, 2, 2, None))
    data, f00, f01, f10, b10, f11, b11, *backward = schedule.actions[0]
    _, conflict = topological_order(replace(schedule, actions=((data, f00, f01, f11, b11, f10, b10, *backward),)))
    assert conflict is not None
    assert not conflict.is_deadlock
    assert (conflict.rank, conflict.index) == (0, 3)


@pytest.mark.parametrize("num_ranks", CROSSING)
def test_gradients_may_overtake_activations_between_the_same_ranks(num_ranks: int) -> None:
    check(in_order(spec_of(num_ranks, 4 // num_ranks, 2, None), CROSSING[num_ranks]))


def late_gradient(num_microbatches: int) -> Schedule:
    """Nine stages on three ranks; a gradient that rank 0 sends early is the last message that rank 2 takes.

    Between the two, rank 0 sends the activations of all other microbatches to rank 1: three for each.
    """
    first = [f"F{stage}.0" for stage in range(9)] + [f"B{stage}.0" for stage in range(8, 2, -1)]
    others = range(1, num_microbatches)
    forwards = [f"F{stage}.{microbatch}" for microbatch in others for stage in range(9)]
    backwards = [f"B{stage}.{microbatch}" for microbatch in others for stage in range(8, -1, -1)]
    names = " ".join([*first, *forwards, "B2.0 B1.0 B0.0", *backwards])
    return in_order(spec_of(3, 3, num_microbatches, None), names)


def test_a_rank_that_waits_for_a_message_to_leave_is_a_deadlock_if_its_receive_is_not_posted() -> None:
    # At most six of rank 0's messages have not left: after the sixth activation it waits for the gradient. Rank 2 has
    # posted the receives of F2.3 and F5.3 after F8.2, and would post the gradient's after F5.3, which needs rank 0.
    order, conflict = topological_order(late_gradient(4))
    assert max_sends_in_flight(4) == 6
    assert conflict is not None
    assert conflict.is_deadlock
    assert str(order[-1][1]) == "F8.2"
    played = [str(action) for rank, action in order if rank == 0]
    assert (conflict.rank, conflict.index, played[-1]) == (0, len(played) - 1, "F6.2")
    assert "rank 0 at F6.2 for rank 2 to receive microbatch 0 from stage 3 to stage 2" in conflict.text
    assert "rank 2 at F2.3 for stage 1 on rank 1" in conflict.text
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0, action \d+ \(F6.2\)"):
        check(late_gradient(4))


def test_a_rank_goes_on_once_the_receive_of_its_oldest_message_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    # At most five have not left: rank 0 waits after F3.2. Rank 2 posts two receives after F5.2: those of F8.2 and B2.0.
    check(late_gradient(3))
    monkeypatch.setattr(schedule_module, "NUM_PREPOSTED_RECEIVES", 1)
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0, action \d+ \(F3.2\)"):
        check(late_gradient(3))


def test_without_a_limit_on_messages_that_have_not_left_there_is_no_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_module, "max_sends_in_flight", lambda _: 9)
    check(late_gradient(4))


def test_with_all_receives_posted_there_is_no_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "NUM_PREPOSTED_RECEIVES", 100)
    check(late_gradient(4))
