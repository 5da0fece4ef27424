"""Builds a checked schedule from a few numbers: compute order, then transfers, then the check."""

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
    """Return the looped breadth-first schedule of one step, or of one evaluation pass, already checked.

    The stages in `resident` stay on the GPU permanently. `num_slots` GPU slots, for every rank or a number per rank,
    hold the weights of the other stages: 2 prefetch the next stage, 1 does not; with None every stage is resident. Each
    of `accumulation_rounds` runs forward and backward of an equal part of the microbatches. With `num_slices`, this
    many consecutive microbatches are the slices of one sequence. The layers' inputs of the stages in
    `offloaded_activation_stages` are on the host until backward; for `num_offloaded_microbatches` microbatches of each
    round, so is everything that saves repeating matrix products. Raises ScheduleError if a number is below 1, or rounds
    or slices do not divide the microbatches.
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
        text = (
            f"{num_microbatches // accumulation_rounds} microbatches of a round are no multiple of {num_slices} slices"
        )
        raise ScheduleError(text)
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
    """Return all actions of `rank`, unchecked; `num_slots` is 0 if the rank streams no stage."""
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
