"""Every rule of `check` fires on a schedule that breaks it, and says where."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from harness.schedules import spec_of

from mobius.errors import ScheduleError
from mobius.schedule.action import Action, ActionKind
from mobius.schedule.build import build_schedule
from mobius.schedule.check import Rule, check
from mobius.schedule.schedule import Schedule
from mobius.schedule.spec import ScheduleSpec

Actions = list[Action]

# rank 0 of `small`: 0 D0, 1 L0, 2 L2, 3 F0.0, 4 F0.1, 5 F2.0, 6 F2.1, 7 B2.0, 8 B2.1, 9 O2, 10 B0.0, 11 B0.1, 12 O0


def move(source: int, target: int) -> Callable[[Actions], None]:
    return lambda actions: actions.insert(target, actions.pop(source))


def drop(index: int) -> Callable[[Actions], None]:
    def change(actions: Actions) -> None:
        del actions[index]

    return change


def add(index: int, kind: ActionKind, stage: int, microbatch: int | None = None) -> Callable[[Actions], None]:
    return lambda actions: actions.insert(index, Action(kind, stage, microbatch))


def keep(actions: Actions) -> None:
    """Change nothing: the specification is another one."""


def drop_sums(actions: Actions) -> None:
    copies = (ActionKind.OFFLOAD_GRADIENT_SUMS, ActionKind.LOAD_GRADIENT_SUMS)
    actions[:] = [action for action in actions if action.kind not in copies]


Case = tuple[Callable[[Actions], None], str]
CASES: dict[str, Case] = {
    "a kind that is not the stage's": (
        add(4, ActionKind.FORWARD_MIDDLE, 0, 0),
        "shape: rank 0, action 4 .*takes forward_first",
    ),
    "a stage too many": (add(3, ActionKind.LOAD, 4), "shape: rank 0, action 3 .*no stage 4"),
    "a microbatch too many": (
        add(5, ActionKind.FORWARD_FIRST, 0, 2),
        "shape: rank 0, action 5 .*microbatch, the numbers are 0 to 1",
    ),
    "a forward without microbatch": (add(5, ActionKind.FORWARD_FIRST, 0), "shape: .*needs a microbatch"),
    "another rank's stage": (add(3, ActionKind.LOAD, 1), "placement: rank 0, action 3 .*belongs to rank 1"),
    "no batch": (drop(0), "data: rank 0, action 0 .*batch for stage 0 is missing"),
    "two batches": (add(1, ActionKind.GENERATE_DATA, 0), "data: rank 0, action 1 .*loaded once"),
    "a batch for another stage": (add(1, ActionKind.GENERATE_DATA, 2), "data: rank 0, action 1 .*not load the batch"),
    "no first forward": (drop(3), "complete: rank 0, action 12 .the end of the list.: F0.0 is missing"),
    "no last backward": (drop(11), "complete: rank 0, action 12 .*B0.1 is missing"),
    "a forward twice": (add(5, ActionKind.FORWARD_FIRST, 0, 0), r"complete: rank 0, action 5 \(F0.0\): .*duplicate"),
    "a backward twice": (add(12, ActionKind.BACKWARD_FIRST, 0, 1), "complete: rank 0, action 12 .*duplicate"),
    "backward before forward": (move(6, 8), r"order: rank 0, action 7 \(B2.1\): its forward has not run"),
    "never loaded": (drop(2), r"resident: rank 0, action 4 \(F2.0\): stage 2 is not loaded"),
    "loaded too late": (move(1, 3), r"resident: rank 0, action 2 \(F0.0\): stage 0 is not loaded"),
    "loaded twice": (add(5, ActionKind.LOAD, 2), "resident: rank 0, action 5 .*already loaded"),
    "offloaded twice": (add(10, ActionKind.OFFLOAD, 2), "resident: rank 0, action 10 .*not loaded"),
    "offloaded before its use": (add(5, ActionKind.OFFLOAD, 2), r"resident: rank 0, action 6 \(F2.0\)"),
    "offloaded between two backwards": (move(9, 8), r"resident: rank 0, action 9 \(B2.1\): stage 2 is not loaded"),
    "never offloaded": (drop(12), r"gradients: rank 0, action 12 .*stages \[0\] are not offloaded"),
    "sums that are not there": (add(4, ActionKind.LOAD_GRADIENT_SUMS, 0), "gradients: rank 0, action 4 .*no sums yet"),
    "sums that are on the GPU": (
        add(8, ActionKind.LOAD_GRADIENT_SUMS, 2),
        "gradients: rank 0, action 8 .*1 backwards are on the",
    ),
    "sums that have not come back": (
        add(8, ActionKind.OFFLOAD_GRADIENT_SUMS, 2),
        r"gradients: rank 0, action 9 \(B2.1\): the sums of its 1 backwards are on the host",
    ),
    "sums of the whole step": (
        add(9, ActionKind.OFFLOAD_GRADIENT_SUMS, 2),
        "gradients: rank 0, action 9 .*2 backwards",
    ),
    "loaded after its gradients left": (
        add(10, ActionKind.LOAD, 2),
        "gradients: rank 0, action 10 .*already offloaded",
    ),
}
# rank 0 with stage 0 offloaded, three microbatches, all resident:
# 0 D0, 1 F0.0, 2 OA0.0, 3 F0.1, 4 OA0.1, 5 F0.2, 6 OA0.2, 7 F1.0, 8 B1.0, 9 F1.1, 10 B1.1, 11 F1.2, 12 PA0.0, 13 B1.2,
# 14 PA0.1, 15 B0.0, 16 PA0.2, 17 B0.1, 18 B0.2
OFFLOADED: dict[str, Case] = {
    "before its forward": (move(2, 1), r"offload_activations: rank 0, action 1 \(OA0.0\): its forward has not run yet"),
    "twice": (
        add(3, ActionKind.OFFLOAD_ACTIVATIONS, 0, 0),
        r"offload_activations: rank 0, action 3 \(OA0.0\): .* have left already",
    ),
    "never": (drop(2), r"offload_activations: rank 0, action 11 \(PA0.0\): its inputs are not on the host"),
    "never fetched": (drop(16), r"offload_activations: rank 0, action 17 \(B0.2\): its inputs have not come back"),
    "fetched too late": (
        move(12, 15),
        r"offload_activations: rank 0, action 14 \(B0.0\): its inputs have not come back",
    ),
    "all fetched at once": (
        move(16, 14),
        r"offload_activations: rank 0, action 15 \(PA0.1\): 3 microbatches have come back .*2 may",
    ),
    "of another stage": (add(9, ActionKind.OFFLOAD_ACTIVATIONS, 1, 0), "shape: rank 0, action 9 .*the model's last"),
}
# rank 0 of two stages, one sequence of two slices, all resident:
# D0 F0.0 F0.1 F1.0 F1.1 B1.1 B1.0 K0.0 K0.1 B0.1 B0.0
SLICES: dict[str, Case] = {
    "forward out of order": (
        move(1, 2),
        r"slices: rank 0, action 1 \(F0.1\): slice 1 of sequence 0 .* but slice 0 is next",
    ),
    "backward out of order": (move(9, 10), r"slices: rank 0, action 9 \(B0.0\): slice 0 .* but slice 1 is next"),
    "keys out of order": (move(7, 8), r"slices: rank 0, action 7 \(K0.1\): slice 1 .* but slice 0 is next"),
    "keys missing": (drop(8), r"slices: rank 0, action 8 \(B0.1\): keys and values of 1 of 2 slices"),
    "keys twice": (
        add(9, ActionKind.RECOMPUTE_KV, 0, 1),
        r"slices: rank 0, action 9 \(K0.1\): slice 1 .* but slice 2 is next",
    ),
    "keys of the last stage": (add(5, ActionKind.RECOMPUTE_KV, 1, 0), "shape: rank 0, action 5 .*the model.s last"),
}
SMALL, HOST = spec_of(2, 2, 2, 2), spec_of(1, 2, 2, None, offloaded_activation_stages={0})
# Specification of the schedule, what changes in it, rank whose actions change, the change and the complaint.
REFUSED: dict[str, tuple[ScheduleSpec, dict[str, Any], int, Callable[[Actions], None], str]] = {
    "a batch between first and last stage": (
        spec_of(3, 1, 1, None), {}, 1, add(0, ActionKind.GENERATE_DATA, 1), "data: rank 1, action 0"
    ),
    "received in another order than sent": (
        spec_of(2, 1, 2, None), {}, 1, move(3, 1),
        r"order: rank 1, action 1 \(F1.1\): it needs microbatch 1 .*microbatch 0",
    ),
    "a stage before the one below it": (
        spec_of(1, 2, 1, None), {}, 0, move(2, 1), r"deadlock: rank 0, action 1 \(F1.0\)"
    ),
    # Rank 0 wants F2.0 first, whose input comes from F1.0 on rank 1, whose input is F0.0, later in rank 0's own list.
    "ranks that wait for each other": (
        spec_of(2, 2, 1, None), {}, 0, move(2, 1),
        r"deadlock: rank 0, action 1 \(F2.0\): .*rank 1 at F1.0 for stage 0",
    ),
    "sums of three stages on a GPU": (
        spec_of(1, 3, 2, 3, num_rounds=2), {}, 0, drop_sums,
        r"budget: rank 0, action .*B0.0.*the sums of the stages \[0, 1, 2\]",
    ),
    "keys of whole sequences": (
        spec_of(1, 2, 2, None), {}, 0, add(7, ActionKind.RECOMPUTE_KV, 0, 0),
        r"slices: rank 0, action 7 \(K0.0\): there are no keys",
    ),
    "a place on the host that another round takes": (
        HOST, {"num_rounds": 2}, 0, keep,
        r"offload_activations: rank 0, .*\(OA0.1\): microbatch 0 is still in the same host region|round: ",
    ),
    "a stage that is not said to offload": (
        HOST, {"offloaded_activation_stages": frozenset()}, 0, keep,
        r"offload_activations: rank 0, action 2 \(OA0.0\): stage 0 does not offload",
    ),
    "one slot for two": (
        SMALL, {"slots": (1, 1)}, 0, keep, r"budget: rank 0, action 2 \(L2\): all slots \(1\) are in use .*\[0\]"
    ),
    "no slots": (SMALL, {"slots": (0, 0)}, 0, keep, r"budget: rank 0, action 1 \(L0\)"),
    "a round too large": (
        SMALL, {"num_rounds": 2}, 0, keep, "round: rank 0, action 4 .*2 microbatches wait .*at most 1 may"
    ),
    **{name: (SMALL, {}, 0, *case) for name, case in CASES.items()},
    **{
        name: (spec_of(1, 2, 3, None, offloaded_activation_stages={0}), {}, 0, *case)
        for name, case in OFFLOADED.items()
    },
    **{name: (spec_of(1, 2, 2, None, num_slices=2), {}, 0, *case) for name, case in SLICES.items()},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_broken_schedule_is_refused_with_rank_action_and_rule(case: str) -> None:
    spec, changes, rank, change, complaint = REFUSED[case]
    schedule = build_schedule(spec)
    lists = [list(actions) for actions in schedule.actions]
    change(lists[rank])
    with pytest.raises(ScheduleError, match=complaint):
        check(replace(schedule, spec=replace(spec, **changes), actions=tuple(map(tuple, lists))))


def test_every_rule_has_a_case() -> None:
    complaints = " ".join(complaint for *_, complaint in REFUSED.values())
    assert [rule for rule in Rule if f"{rule}: " not in complaints] == []


def test_a_sound_schedule_passes(small: Schedule) -> None:
    check(small)


def test_the_number_of_lists_must_be_the_number_of_ranks(small: Schedule) -> None:
    with pytest.raises(ScheduleError, match="shape: 1 lists of actions for 2 ranks"):
        check(replace(small, actions=small.actions[:1]))


def test_stages_that_do_not_divide_among_the_ranks_are_refused(small: Schedule) -> None:
    with pytest.raises(ScheduleError, match="3 stages are not a multiple of 2 ranks"):
        build_schedule(replace(small.spec, num_stages=3))


@pytest.mark.parametrize("num_slots", [None, 1, 2])
@pytest.mark.parametrize(("num_ranks", "stages_per_rank"), [(1, 1), (1, 3), (2, 1), (2, 3), (4, 2)])
def test_slices_pass_in_rounds_and_with_offloaded_activations(
    num_ranks: int, stages_per_rank: int, num_slots: int | None
) -> None:
    last = num_ranks * stages_per_rank - 1
    for offloaded_activation_stages in (set[int](), set(range(last))):
        schedule = build_schedule(
            spec_of(
                num_ranks,
                stages_per_rank,
                12,
                num_slots,
                num_rounds=2,
                num_slices=3,
                offloaded_activation_stages=offloaded_activation_stages,
            )
        )
        assert schedule.spec.last_backward == 9
        for rank, actions in enumerate(schedule.actions):
            kinds = [action.kind for action in actions]
            num_inner = sum(stage != last for stage in schedule.spec.local_stages(rank))
            assert kinds.count(ActionKind.RECOMPUTE_KV) == 12 * num_inner
            # The last slice of each sequence comes back once, for its keys and its backward.
            num_offloading_activations = len(offloaded_activation_stages.intersection(schedule.spec.local_stages(rank)))
            assert kinds.count(ActionKind.PREFETCH_ACTIVATIONS) == num_offloading_activations * (12 + 12 - 4)


@pytest.mark.parametrize(("rounds", "slices", "told"), [(1, 3, "4 microbatches of a round"), (2, 4, "2 microbatches")])
def test_slices_that_do_not_divide_a_round_are_refused(rounds: int, slices: int, told: str) -> None:
    with pytest.raises(ScheduleError, match=f"{told}.* are not a multiple of {slices} slices"):
        build_schedule(spec_of(1, 2, 4, None, num_rounds=rounds, num_slices=slices))


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize(("num_ranks", "stages_per_rank"), [(1, 1), (1, 4), (2, 1), (2, 3), (4, 2)])
def test_rounds_pass_and_a_stage_is_loaded_no_more_often_than_in_as_many_steps(
    num_ranks: int, stages_per_rank: int, num_slots: int
) -> None:
    whole = build_schedule(spec_of(num_ranks, stages_per_rank, 2, num_slots))
    rounds = build_schedule(spec_of(num_ranks, stages_per_rank, 6, num_slots, num_rounds=3))

    for one, three in zip(whole.actions, rounds.actions, strict=True):
        counts = [[action.kind for action in actions].count(ActionKind.LOAD) for actions in (one, three)]
        assert counts[1] <= 3 * counts[0]
