"""Offloaded inputs and fetches stand where nothing waits for them and little is on its way."""

from __future__ import annotations

from itertools import accumulate

import pytest
from harness.schedules import spec_of

from mobius.errors import ScheduleError
from mobius.schedule.action import ActionKind
from mobius.schedule.activation_offloading import num_host_regions
from mobius.schedule.build import build_schedule
from mobius.schedule.depth_first import max_waiting
from mobius.schedule.render import render_text
from mobius.schedule.schedule import Schedule
from mobius.schedule.spec import MAX_COPY_LOOKAHEAD, ComputeOrder, ScheduleSpec


def of_round(size: int, number: int) -> ScheduleSpec:
    """Numbers of a round of `size` microbatches, `number` of which offload their products."""
    return spec_of(1, 2, size, 2, num_offloaded_microbatches=number)


def names(schedule: Schedule, rank: int = 0) -> str:
    return " ".join(map(str, schedule.actions[rank]))


def test_inputs_leave_behind_their_forward_and_come_back_one_computation_ahead() -> None:
    schedule = build_schedule(spec_of(1, 2, 3, None, offloaded_activation_stages={0}))

    assert names(schedule) == (
        "D0 F0.0 OA0.0 F0.1 OA0.1 F0.2 OA0.2 F1.0 B1.0 F1.1 B1.1 F1.2 PA0.0 B1.2 PA0.1 B0.0 PA0.2 B0.1 B0.2"
    )


def test_a_prefetch_never_stands_before_an_offload_which_gives_memory_back() -> None:
    schedule = build_schedule(spec_of(2, 1, 2, None, offloaded_activation_stages={0}))

    assert names(schedule) == "D0 F0.0 OA0.0 F0.1 OA0.1 PA0.0 PA0.1 B0.0 B0.1"


@pytest.mark.parametrize("num_rounds", [1, 3])
@pytest.mark.parametrize("num_slots", [None, 1, 2])
@pytest.mark.parametrize(("num_ranks", "stages_per_rank"), [(1, 2), (1, 4), (2, 1), (2, 3), (3, 2), (4, 2)])
def test_every_schedule_with_offloaded_activations_passes_and_its_other_actions_are_as_without(
    num_ranks: int, stages_per_rank: int, num_slots: int | None, num_rounds: int
) -> None:
    last = num_ranks * stages_per_rank - 1
    numbers = num_ranks, stages_per_rank, 6, num_slots
    plain = build_schedule(spec_of(*numbers, num_rounds=num_rounds))
    for offloaded_activation_stages in ({0}, {*range(min(num_ranks, last))}, {*range(last)}):
        schedule = build_schedule(
            spec_of(
                *numbers,
                num_rounds=num_rounds,
                offloaded_activation_stages=offloaded_activation_stages,
            )
        )

        for rank, actions in enumerate(schedule.actions):
            others = [
                a for a in actions if a.kind not in (ActionKind.OFFLOAD_ACTIVATIONS, ActionKind.PREFETCH_ACTIVATIONS)
            ]
            assert tuple(others) == plain.actions[rank]
            for kind in (ActionKind.OFFLOAD_ACTIVATIONS, ActionKind.PREFETCH_ACTIVATIONS):
                moved = [(a.stage, a.microbatch) for a in actions if a.kind is kind]
                assert sorted(moved) == sorted(
                    (s, m) for s in offloaded_activation_stages if s % num_ranks == rank for m in range(6)
                )


@pytest.mark.parametrize(
    ("num_ranks", "stages_per_rank", "size"), [(1, 3, 1), (1, 3, 4), (2, 3, 4), (4, 1, 3), (4, 3, 6)]
)
def test_depth_first_schedules_with_offloaded_activations_pass_in_as_many_regions_as_wait_at_most(
    num_ranks: int, stages_per_rank: int, size: int
) -> None:
    last = num_ranks * stages_per_rank - 1
    numbers = {"num_rounds": 3, "order": ComputeOrder.DEPTH_FIRST}
    for number in {0, 1, size // 2, size}:
        spec = spec_of(
            *(num_ranks, stages_per_rank, 3 * size, stages_per_rank),
            offloaded_activation_stages={*range(last)},
            num_offloaded_microbatches=number,
            **numbers,
        )
        schedule = build_schedule(spec)  # refused if a region is taken twice
        for rank, actions in enumerate(schedule.actions):
            for stage in set(spec.local_stages(rank)) - {last}:
                kinds = [action.kind for action in actions if action.stage == stage]
                on_host = [(kind is ActionKind.OFFLOAD_ACTIVATIONS) - kind.is_backward for kind in kinds]
                most, regions = max(accumulate(on_host)), num_host_regions(stage, spec)
                assert most == max_waiting(stage, spec) <= regions
                assert regions == most if number in (0, size) else regions % size == 0 and regions < most + size


def test_depth_first_copies_run_beside_a_forward_and_a_backward() -> None:
    numbers = {"num_rounds": 2, "order": ComputeOrder.DEPTH_FIRST}
    schedule = build_schedule(spec_of(1, 3, 2, 3, offloaded_activation_stages={0, 1}, **numbers))
    assert " ".join(name for name in names(schedule).split() if "." in name or name == "D0") == (
        "D0 F0.0 OA0.0 F1.0 OA1.0 F2.0 PA1.0 B2.0 F0.1 OA0.1 PA0.0 B1.0 F1.1 OA1.1 B0.0 PA1.1 F2.1 PA0.1 B2.1 B1.1 B0.1"
    )


def test_an_evaluation_offloads_no_activations() -> None:
    schedule = build_schedule(spec_of(2, 2, 2, 2, offloaded_activation_stages={0, 1}, order=ComputeOrder.EVALUATION))

    assert not any(
        a.kind in (ActionKind.OFFLOAD_ACTIVATIONS, ActionKind.PREFETCH_ACTIVATIONS)
        for own in schedule.actions
        for a in own
    )


def test_the_grid_has_a_row_for_each_way_and_the_text_form_names_them() -> None:
    schedule = build_schedule(spec_of(2, 2, 2, 2, offloaded_activation_stages={0, 1}))

    grid = render_text(schedule)
    assert [line.split()[0] for line in grid.splitlines() if "OA0.0" in line] == ["offload_activations"]
    assert [line.split()[0] for line in grid.splitlines() if "PA0.1" in line] == ["prefetch_activations"]
    texts = [action.to_text(4) for action in schedule.actions[0]]
    assert "offload_activations -1 0 -1 1" in texts
    assert "prefetch_activations -1 0 -1 1" in texts


def test_microbatches_that_go_whole_are_spread_over_each_round() -> None:
    whole = [m for m in range(20) if of_round(10, 4).offloads_products(m)]

    assert whole == [2, 4, 7, 9, 12, 14, 17, 19]
    for size in range(1, 9):
        for number in range(size + 1):
            assert sum(of_round(size, number).offloads_products(m) for m in range(size)) == number
    assert [of_round(8, number).copy_lookahead for number in (0, 1, 3, 4, 8)] == [1, 8, 3, 2, 1]
    assert of_round(64, 1).copy_lookahead == MAX_COPY_LOOKAHEAD


def test_where_some_go_whole_copies_have_the_time_of_several_computations() -> None:
    schedule = build_schedule(spec_of(1, 2, 4, None, offloaded_activation_stages={0}, num_offloaded_microbatches=2))

    assert names(schedule) == (
        "D0 F0.0 OA0.0 F0.1 OA0.1 F0.2 OA0.2 F0.3 OA0.3 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 "
        "PA0.0 F1.3 PA0.1 B1.3 PA0.2 B0.0 PA0.3 B0.1 B0.2 B0.3"
    )
    assert [schedule.spec.offloads_all(0, m) for m in range(4)] == [False, True, False, True]
    assert not schedule.spec.offloads_all(1, 1), "the model's last stage turns at once"


@pytest.mark.parametrize("num_rounds", [1, 2])
@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_every_schedule_with_products_at_home_passes_and_computes_as_without(number: int, num_rounds: int) -> None:
    for num_ranks, per_rank, num_slots in ((1, 3, 1), (2, 2, 2), (3, 2, None)):
        numbers = num_ranks, per_rank, 12, num_slots
        plain = build_schedule(spec_of(*numbers, num_rounds=num_rounds))
        schedule = build_schedule(
            spec_of(
                *numbers,
                num_rounds=num_rounds,
                offloaded_activation_stages=range(num_ranks * per_rank - 1),
                num_offloaded_microbatches=number,
            )
        )
        for rank, actions in enumerate(schedule.actions):
            others = [
                a for a in actions if a.kind not in (ActionKind.OFFLOAD_ACTIVATIONS, ActionKind.PREFETCH_ACTIVATIONS)
            ]
            assert tuple(others) == plain.actions[rank]
            fetched = [(a.stage, a.microbatch) for a in actions if a.kind is ActionKind.PREFETCH_ACTIVATIONS]
            backward = [
                (a.stage, a.microbatch)
                for a in actions
                if a.kind.is_backward and a.stage in schedule.spec.offloaded_activation_stages
            ]
            assert fetched == backward, "in the order in which they are wanted"


def test_more_products_at_home_than_a_round_has_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"3 microbatches .* a round has 2"):
        build_schedule(
            spec_of(1, 2, 4, None, num_rounds=2, offloaded_activation_stages={0}, num_offloaded_microbatches=3)
        )
    with pytest.raises(ScheduleError, match=r"1 microbatches .*slices cannot"):
        build_schedule(
            spec_of(1, 2, 4, None, num_slices=2, offloaded_activation_stages={0}, num_offloaded_microbatches=1)
        )
