"""Owns the way from a few numbers to a checked schedule: compute order, then transfers, then the check."""

from collections.abc import Collection, Sequence

from mobius.errors import ScheduleError
from mobius.schedule.action import Action
from mobius.schedule.activation_offloading import add_activation_offloads, copy_lookahead
from mobius.schedule.check import check
from mobius.schedule.looped import compute_order, data_actions, evaluation_order
from mobius.schedule.schedule import Schedule
from mobius.schedule.weight_streaming import add_transfers


def build_schedule(
    num_ranks: int,
    stages_per_rank: int,
    num_microbatches: int,
    num_slots: int | Sequence[int] | None,
    resident: Collection[int] = (),
    *,
    accumulation_rounds: int = 1,
    num_slices: int = 1,
    offloaded_activation_stages: Collection[int] = (),
    num_offloaded_microbatches: int = 0,
    is_evaluation: bool = False,
) -> Schedule:
    """The looped breadth-first schedule of one step, or of one pass of an evaluation, already checked.

    The stages in `resident` stay on the GPU for good. `num_slots` GPU slots per rank, or of each rank, hold the weights
    of the others: 2 prefetch the next stage, 1 does not; with None every stage is resident. In `accumulation_rounds`
    rounds one part of the microbatches goes forward and backward after the other. With `num_slices` a microbatch is a
    slice of sequences, so many of which follow one another. The layers' inputs of the stages in
    `offloaded_activation_stages` wait for backward on the host; of `num_offloaded_microbatches` microbatches of each
    round all that products need does. Raises ScheduleError where a number is below 1, and for rounds that the
    microbatches are no multiple of.
    """
    num_stages = num_ranks * stages_per_rank
    all_resident = frozenset(range(num_stages) if num_slots is None else resident)
    given = num_slots if isinstance(num_slots, Sequence) else [num_slots or 0] * num_ranks
    streams = [not all_resident.issuperset(range(rank, num_stages, num_ranks)) for rank in range(num_ranks)]
    slots = tuple(number if streaming else 0 for number, streaming in zip(given, streams, strict=True))
    least = min((number for number, streaming in zip(slots, streams, strict=True) if streaming), default=1)
    numbers = {
        "ranks": num_ranks,
        "stages per rank (--num_stages / ranks)": stages_per_rank,
        "microbatches (--num_chunks)": num_microbatches,
        "GPU slots": least,
        "rounds (--num_rounds)": accumulation_rounds,
        "slices (--num_slices)": num_slices,
    }
    wrong = [f"{number} {what}" for what, number in numbers.items() if number < 1]
    if wrong:
        raise ScheduleError(f"a schedule needs at least 1 of each, it was given {', '.join(wrong)}")
    if num_microbatches % accumulation_rounds:
        raise ScheduleError(f"{num_microbatches} microbatches are no multiple of {accumulation_rounds} rounds")
    if num_microbatches // accumulation_rounds % num_slices:
        told = (
            f"{num_microbatches // accumulation_rounds} microbatches of a round are no multiple of {num_slices} slices"
        )
        raise ScheduleError(told)
    actions = tuple(
        rank_actions(
            rank,
            num_ranks,
            num_stages,
            num_microbatches,
            own_slots,
            all_resident,
            accumulation_rounds=accumulation_rounds,
            num_slices=num_slices,
            offloaded_activation_stages=offloaded_activation_stages,
            num_offloaded_microbatches=num_offloaded_microbatches,
            is_evaluation=is_evaluation,
        )
        for rank, own_slots in enumerate(slots)
    )
    numbers_of = num_ranks, num_stages, num_microbatches
    offloaded = frozenset(offloaded_activation_stages)
    schedule = Schedule(
        *numbers_of,
        slots,
        actions,
        all_resident,
        is_evaluation,
        accumulation_rounds,
        offloaded,
        num_slices,
        num_offloaded_microbatches,
    )
    check(schedule)
    return schedule


def rank_actions(
    rank: int,
    num_ranks: int,
    num_stages: int,
    num_microbatches: int,
    num_slots: int,
    resident: Collection[int],
    *,
    accumulation_rounds: int = 1,
    num_slices: int = 1,
    offloaded_activation_stages: Collection[int] = (),
    num_offloaded_microbatches: int = 0,
    is_evaluation: bool = False,
) -> tuple[Action, ...]:
    """All actions of `rank`, not checked; 0 slots if it streams no stage."""
    numbers = rank, num_ranks, num_stages, num_microbatches
    order = evaluation_order(*numbers) if is_evaluation else compute_order(*numbers, accumulation_rounds, num_slices)
    transfers = add_transfers(order, num_slots, resident) if num_slots else order
    own = set(offloaded_activation_stages).intersection(range(rank, num_stages, num_ranks))
    lookahead = copy_lookahead(num_microbatches // accumulation_rounds, num_offloaded_microbatches)
    offloads_activations = bool(own) and not is_evaluation
    actions = (
        add_activation_offloads(transfers, own, num_slices=num_slices, lookahead=lookahead)
        if offloads_activations
        else transfers
    )
    return (*data_actions(rank, num_ranks, num_stages), *actions)
