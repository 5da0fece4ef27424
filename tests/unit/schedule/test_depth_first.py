"""Depth-first schedules pass the check, keep few microbatches waiting, and take them in ascending order."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise, product

import pytest
from harness.schedules import spec_of

from mobius.errors import ScheduleError
from mobius.limits import gradient_sum_elements
from mobius.schedule.action import Action, ActionKind
from mobius.schedule.build import build_schedule
from mobius.schedule.check import check
from mobius.schedule.depth_first import warmup_forwards
from mobius.schedule.render import place_actions
from mobius.schedule.schedule import Schedule
from mobius.schedule.spec import ComputeOrder, ScheduleSpec

SIZES = [
    (ranks, stages, rounds * size, rounds)
    for ranks, stages, size, rounds in product((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 4, 6, 12), (1, 2, 3, 6))
    if stages == 1 or size >= ranks
]


def depth_first(ranks: int, stages: int, microbatches: int, rounds: int, **more: object) -> ScheduleSpec:
    numbers = {"num_rounds": rounds, "order": ComputeOrder.DEPTH_FIRST}
    return spec_of(ranks, stages, microbatches, stages, **numbers | more)  # type: ignore[arg-type]


def most_waiting(actions: tuple[Action, ...]) -> int:
    waiting = most = 0
    for action in actions:
        waiting += action.kind.is_forward - action.kind.is_backward
        most = max(most, waiting)
    return most


@pytest.mark.parametrize("size", SIZES)
def test_few_microbatches_wait_for_their_backward(size: tuple[int, int, int, int]) -> None:
    spec = depth_first(*size)
    schedule = build_schedule(spec)
    for rank, actions in enumerate(schedule.actions):
        assert most_waiting(actions) <= min(
            spec.stages_per_rank * spec.num_microbatches, warmup_forwards(rank, spec) + 1
        )


@pytest.mark.parametrize("size", SIZES)
def test_each_stage_takes_its_microbatches_in_order_in_both_directions(size: tuple[int, int, int, int]) -> None:
    taken = defaultdict[tuple[int, bool], list[int | None]](list)
    for action in (action for actions in build_schedule(depth_first(*size)).actions for action in actions):
        if action.kind.is_forward_or_backward:
            taken[action.stage, action.kind.is_backward].append(action.microbatch)
    assert all(numbers == sorted(numbers, key=lambda number: number or 0) for numbers in taken.values())
    assert len(taken) == 2 * size[0] * size[1]


def test_the_models_last_stage_runs_backward_right_after_each_forward() -> None:
    for ranks, stages in ((1, 1), (1, 3), (2, 2), (4, 3)):
        spec = depth_first(ranks, stages, 12, 2)
        last = spec.num_stages - 1
        compute = [action for action in build_schedule(spec).actions[-1] if action.kind.is_forward_or_backward]
        forwards = [place for place, action in enumerate(compute) if action.stage == last and action.kind.is_forward]
        assert [str(compute[place + 1]) for place in forwards] == [f"B{last}.{number}" for number in range(12)]


@pytest.mark.parametrize("size", [each for each in SIZES if 1 < each[0] <= each[2]])
def test_ranks_share_the_head_in_turn_between_forward_and_backward_of_the_last_stage(
    size: tuple[int, int, int, int],
) -> None:
    schedule = build_schedule(depth_first(*size, spreads_head=True))
    number = schedule.spec.num_stages
    for rank, actions in enumerate(schedule.actions):
        heads = [action.microbatch for action in actions if action.kind is ActionKind.HEAD]
        assert heads == [*range(rank, size[2], size[0])]
        assert all(action.stage == number for action in actions if action.kind is ActionKind.HEAD)
    names = [str(action) for action in schedule.actions[-1]]
    own = [f"{microbatch}" for microbatch in range(size[0] - 1, size[2], size[0])]
    assert all(names[names.index(f"H{number}.{each}") + 1] == f"B{number - 1}.{each}" for each in own)


def test_another_rank_has_computed_the_head_when_the_last_stage_goes_backward() -> None:
    """A forward takes one slot of time, a backward two, a head one: after the opening the last rank waits for none."""
    for ranks, stages in ((2, 2), (3, 2), (4, 2), (4, 8)):
        schedule = build_schedule(depth_first(ranks, stages, 8 * ranks, 8, spreads_head=True))
        spans = place_actions(schedule)[-1]
        compute = [span for span in spans if span.action.kind.runs_on_compute_lane]
        middle = compute[len(compute) // 3 : 2 * len(compute) // 3]
        idle = sum(later.start - earlier.end for earlier, later in pairwise(middle))
        assert idle <= 0.1 * (middle[-1].end - middle[0].start), (ranks, stages)


def without_one(schedule: Schedule, name: str) -> Schedule:
    lists = [tuple(action for action in actions if str(action) != name) for actions in schedule.actions]
    return replace(schedule, actions=tuple(lists))


def test_a_schedule_whose_head_is_missing_or_computed_elsewhere_is_refused() -> None:
    schedule = build_schedule(depth_first(2, 2, 4, 2, spreads_head=True))
    with pytest.raises(ScheduleError, match=r"it computes the head for the microbatches \[0\]"):
        check(without_one(schedule, "H4.2"))
    alone = build_schedule(depth_first(2, 2, 4, 2))
    head = Action(ActionKind.HEAD, 4, 0)
    for wrong in ((head, *alone.actions[0]), (replace(head, stage=3), *alone.actions[0])):
        with pytest.raises(ScheduleError, match="shape"):
            check(replace(alone, actions=(wrong, alone.actions[1])))
    first, *others = schedule.actions[0]
    late = (first, *(each for each in others if str(each) != "H4.0"), head)
    with pytest.raises(ScheduleError, match="it computes the head for"):
        check(replace(schedule, actions=(late, schedule.actions[1])))
    early = (first, head, *(each for each in others if str(each) != "H4.0"))
    with pytest.raises(ScheduleError, match="deadlock"):
        check(replace(schedule, actions=(early, schedule.actions[1])))


def copies(schedule: Schedule, kind: ActionKind) -> Counter[int]:
    return Counter(action.stage for actions in schedule.actions for action in actions if action.kind is kind)


def test_weights_are_loaded_once_and_sums_travel_only_where_buffers_are_missing() -> None:
    everything = build_schedule(depth_first(2, 4, 12, 3, sum_buffers=(4, 4)))
    assert copies(everything, ActionKind.LOAD) == copies(everything, ActionKind.OFFLOAD) == Counter(range(8))
    assert not copies(everything, ActionKind.OFFLOAD_GRADIENT_SUMS)
    two = build_schedule(depth_first(2, 4, 12, 3))
    assert copies(two, ActionKind.LOAD_GRADIENT_SUMS) == copies(two, ActionKind.OFFLOAD_GRADIENT_SUMS)
    # Of three rounds, the sums of all but the last are continued later; with two buffers each comes back.
    assert copies(two, ActionKind.LOAD_GRADIENT_SUMS) == Counter(dict.fromkeys(range(8), 2))


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (depth_first(2, 2, 4, 1, num_slices=2), "no slices"),
        (depth_first(4, 2, 8, 4), "a round has 2 microbatches, but depth-first stages need one for each of 4 ranks"),
        (
            spec_of(2, 2, 4, 2, spreads_head=True),
            r"2 ranks share the head \(--spread_head\) of 4 microbatches in breadth_first",
        ),
        (depth_first(1, 2, 4, 1, spreads_head=True), "1 ranks share the head"),
        (depth_first(4, 1, 3, 1, spreads_head=True), r"4 ranks share the head \(--spread_head\) of 3 microbatches"),
        (spec_of(2, 3, 4, 2, order=ComputeOrder.DEPTH_FIRST), "rank 0 has 2 GPU slots for 3 streamed stages"),
    ],
)
def test_specs_that_cannot_go_depth_first_are_refused(spec: ScheduleSpec, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        build_schedule(spec)


@pytest.mark.parametrize("order", [ComputeOrder.BREADTH_FIRST, ComputeOrder.DEPTH_FIRST])
@pytest.mark.parametrize(("stages", "num_buffers"), [(3, 2), (4, 2), (4, 3), (6, 2), (6, 3), (7, 3)])
def test_sum_buffers_are_taken_in_rotation(order: ComputeOrder, stages: int, num_buffers: int) -> None:
    """One large stage then lengthens one of two buffers only, if the number of stages is even."""
    for large, rounds in product(range(stages), (2, 3, 4)):
        spec = spec_of(1, stages, 2 * rounds, stages, num_rounds=rounds, order=order, sum_buffers=(num_buffers,))
        size = {stage: 10 if stage == large else 1 for stage in range(stages)}
        free = list(gradient_sum_elements([size[stage] for stage in reversed(range(stages))], num_buffers))
        taken: dict[int, int] = {}
        for action in build_schedule(spec).actions[0]:
            stage, kind = action.stage, action.kind
            if (kind.is_backward and stage not in taken) or kind is ActionKind.LOAD_GRADIENT_SUMS:
                taken[stage] = next(buffer for buffer in free if buffer >= size[stage])
                free.remove(taken[stage])
            is_done = kind.is_backward and action.microbatch == spec.last_backward
            if is_done or kind is ActionKind.OFFLOAD_GRADIENT_SUMS:
                free.append(taken.pop(stage))
