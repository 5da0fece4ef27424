"""A schedule of an evaluation goes forward only, once through every stage, and leaves the slots empty."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from harness.schedules import spec_of

from mobius.errors import ScheduleError
from mobius.schedule.action import Action, ActionKind
from mobius.schedule.build import build_schedule
from mobius.schedule.check import check
from mobius.schedule.render import place_actions
from mobius.schedule.schedule import Schedule
from mobius.schedule.spec import ComputeOrder

SIZES = list(itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4, 8), (None, 1, 2, 3)))


def build(*size: int | None, resident: tuple[int, ...] = ()) -> Schedule:
    return build_schedule(spec_of(*size, resident, order=ComputeOrder.EVALUATION))  # type: ignore[arg-type]


def test_two_ranks_with_three_stages_each_do_what_was_written_by_hand() -> None:
    first, last = build(2, 3, 2, 2).actions
    assert list(map(str, first)) == [
        "D0",
        "L0",
        "L2",
        "F0.0",
        "F0.1",
        "O0",
        "L4",
        "F2.0",
        "F2.1",
        "O2",
        "F4.0",
        "F4.1",
        "O4",
    ]
    assert list(map(str, last)) == [
        "D5",
        "L1",
        "L3",
        "F1.0",
        "F1.1",
        "O1",
        "L5",
        "F3.0",
        "F3.1",
        "O3",
        "F5.0",
        "F5.1",
        "O5",
    ]
    assert [action.to_text(6) for action in last][-3:] == [
        "evaluate_last 4 5 -1 0",
        "evaluate_last 4 5 -1 1",
        "offload -1 5 -1 -1",
    ]


def test_resident_stages_are_never_moved() -> None:
    (actions,) = build(1, 4, 1, 1, resident=(0, 3)).actions
    assert " ".join(map(str, actions)) == "D0 L1 F0.0 F1.0 O1 L2 F2.0 O2 F3.0"


def test_every_promised_size_passes_the_check_and_computes_everything_once() -> None:
    for size in SIZES:
        schedule = build(*size)
        check(schedule)
        computed = [action for actions in schedule.actions for action in actions if action.kind.is_forward_or_backward]
        assert not any(action.kind.is_backward for action in computed)
        assert len(computed) == len(set(computed)) == schedule.spec.num_stages * schedule.spec.num_microbatches
        loads = [a.stage for actions in schedule.actions for a in actions if a.kind is ActionKind.LOAD]
        assert sorted(loads) == ([] if size[3] is None else list(range(schedule.spec.num_stages))), "each travels once"


def test_a_pass_takes_its_work_plus_the_way_through_the_ranks() -> None:
    """Every GPU is busy from its first microbatch to its last, where there are as many microbatches as ranks."""
    for num_ranks, stages_per_rank, num_microbatches in itertools.product((1, 2, 4), (1, 2, 3), (4, 8)):
        timeline = place_actions(build(num_ranks, stages_per_rank, num_microbatches, None))
        work = stages_per_rank * num_microbatches
        assert max(span.end for spans in timeline for span in spans) == work + num_ranks - 1


# rank 0: 0 D0, 1 L0, 2 L2, 3 F0.0, 4 F0.1, 5 O0, 6 F2.0, 7 F2.1, 8 O2
BREACHES: dict[str, tuple[int, Callable[[list[Action]], object], str]] = {
    "a backward": (
        0,
        lambda actions: actions.insert(5, Action(ActionKind.BACKWARD_FIRST, 0, 0)),
        r"shape: rank 0, action 5 \(B0.0\): stage 0 of 4 takes forward_first in an evaluation",
    ),
    "a last forward that leaves the loss to a backward": (
        1,
        lambda actions: actions.__setitem__(6, Action(ActionKind.FORWARD_LAST, 3, 0)),
        r"shape: rank 1, action 6 \(F3.0\): stage 3 of 4 takes evaluate_last in an evaluation",
    ),
    "a forward too few": (0, lambda actions: actions.pop(4), r"complete: rank 0, action 8 .*F0.1 is missing"),
    "a stage that stays in its slot": (
        0,
        lambda actions: actions.pop(8),
        r"resident: rank 0, action 8 .*stages \[2\] are still loaded: each needs an offload",
    ),
    "a forward without weights": (0, lambda actions: actions.pop(2), r"resident: rank 0, action 5 .*not loaded"),
}


@pytest.mark.parametrize("case", BREACHES)
def test_a_broken_one_is_refused(case: str) -> None:
    rank, change, complaint = BREACHES[case]
    schedule = build(2, 2, 2, 2)
    lists = [list(actions) for actions in schedule.actions]
    change(lists[rank])
    with pytest.raises(ScheduleError, match=complaint):
        check(replace(schedule, actions=tuple(map(tuple, lists))))


def test_a_step_is_no_evaluation_and_an_evaluation_no_step() -> None:
    step, evaluation = build_schedule(spec_of(1, 2, 1, None)), build(1, 2, 1, None)
    with pytest.raises(ScheduleError, match="takes evaluate_last in an evaluation"):
        check(replace(step, spec=replace(step.spec, order=ComputeOrder.EVALUATION)))
    with pytest.raises(ScheduleError, match="takes forward_last"):
        check(replace(evaluation, spec=replace(evaluation.spec, order=ComputeOrder.BREADTH_FIRST)))
