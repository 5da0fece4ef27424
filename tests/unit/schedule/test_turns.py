"""The order in which ranks can play a schedule: receivers follow their senders, and what can stop a rank is told."""

from dataclasses import replace

from harness.schedules import spec_of

from mobius.schedule.action import source_stage
from mobius.schedule.build import build_schedule
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
