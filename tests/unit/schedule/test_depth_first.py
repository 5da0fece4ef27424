"""Depth-first schedules pass the check, keep few microbatches waiting, and take them in ascending order."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product

import pytest
from harness.schedules import spec_of

from mobius.errors import ScheduleError
from mobius.limits import gradient_sum_elements
from mobius.schedule.action import Action, ActionKind
from mobius.schedule.build import build_schedule
from mobius.schedule.depth_first import warmup_forwards
from mobius.schedule.schedule import Schedule
from mobius.schedule.spec import ComputeOrder, ScheduleSpec

SIZES = [
    (ranks, stages, rounds * size, rounds)
    for ranks, stages, size, rounds in product((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 4, 6, 12), (1, 2, 3, 6))
    if stages == 1 or size >= ranks
]


def depth_first(ranks: int, stages: int, microbatches: int, rounds: int, **more: object) -> ScheduleSpec:
    numbers = {"accumulation_rounds": rounds, "order": ComputeOrder.DEPTH_FIRST}
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
        (depth_first(4, 2, 8, 4), "a round of 2 microbatches is less than one for each of 4 ranks"),
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
        spec = spec_of(
            1, stages, 2 * rounds, stages, accumulation_rounds=rounds, order=order, sum_buffers=(num_buffers,)
        )
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
