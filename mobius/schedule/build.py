"""Owns the way from a few numbers to a checked schedule: compute order, then transfers, then the check."""

from collections.abc import Collection, Sequence

from mobius.errors import ScheduleError
from mobius.schedule.action import Action
from mobius.schedule.check import check
from mobius.schedule.looped import compute_order, data_actions, evaluation_order
from mobius.schedule.residency import add_transfers
from mobius.schedule.schedule import Schedule
from mobius.schedule.stashing import add_stashes, reach


def build_schedule(
    num_ranks: int,
    stages_per_rank: int,
    num_microbatches: int,
    num_slots: int | Sequence[int] | None,
    resident: Collection[int] = (),
    *,
    num_rounds: int = 1,
    num_slices: int = 1,
    stashed: Collection[int] = (),
    num_products_home: int = 0,
    is_evaluation: bool = False,
) -> Schedule:
    """The looped breadth-first schedule of one step, or of one pass of an evaluation, already checked.

    The stages in `resident` stay on the GPU for good. `num_slots` GPU slots per rank, or of each rank, hold the weights
    of the others: 2 prefetch the next stage, 1 does not; with None every stage is resident. In `num_rounds` rounds one
    part of the microbatches goes forward and backward after the other. With `num_slices` a microbatch is a slice of
    sequences, so many of which follow one another. The layers' inputs of the stages in `stashed`
    wait for backward on the host; of `num_products_home` microbatches of each round all that products need does.
    Raises ScheduleError where a number is below 1, and for rounds that the microbatches are no multiple of.
    """
    num_stages = num_ranks * stages_per_rank
    staying = frozenset(range(num_stages) if num_slots is None else resident)
    given = num_slots if isinstance(num_slots, Sequence) else [num_slots or 0] * num_ranks
    streams = [not staying.issuperset(range(rank, num_stages, num_ranks)) for rank in range(num_ranks)]
    slots = tuple(number if streaming else 0 for number, streaming in zip(given, streams, strict=True))
    least = min((number for number, streaming in zip(slots, streams, strict=True) if streaming), default=1)
    numbers = {
        "ranks": num_ranks,
        "stages per rank (--num_stages / ranks)": stages_per_rank,
        "microbatches (--num_chunks)": num_microbatches,
        "GPU slots": least,
        "rounds (--num_rounds)": num_rounds,
        "slices (--num_slices)": num_slices,
    }
    wrong = [f"{number} {what}" for what, number in numbers.items() if number < 1]
    if wrong:
        raise ScheduleError(f"a schedule needs at least 1 of each, it was given {', '.join(wrong)}")
    if num_microbatches % num_rounds:
        raise ScheduleError(f"{num_microbatches} microbatches are no multiple of {num_rounds} rounds")
    if num_microbatches // num_rounds % num_slices:
        told = f"{num_microbatches // num_rounds} microbatches of a round are no multiple of {num_slices} slices"
        raise ScheduleError(told)
    actions = tuple(
        rank_actions(
            rank,
            num_ranks,
            num_stages,
            num_microbatches,
            own_slots,
            staying,
            num_rounds=num_rounds,
            num_slices=num_slices,
            stashed=stashed,
            num_products_home=num_products_home,
            is_evaluation=is_evaluation,
        )
        for rank, own_slots in enumerate(slots)
    )
    numbers_of = num_ranks, num_stages, num_microbatches
    away = frozenset(stashed)
    schedule = Schedule(
        *numbers_of, slots, actions, staying, is_evaluation, num_rounds, away, num_slices, num_products_home
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
    num_rounds: int = 1,
    num_slices: int = 1,
    stashed: Collection[int] = (),
    num_products_home: int = 0,
    is_evaluation: bool = False,
) -> tuple[Action, ...]:
    """All actions of `rank`, not checked; 0 slots if it streams no stage."""
    numbers = rank, num_ranks, num_stages, num_microbatches
    order = evaluation_order(*numbers) if is_evaluation else compute_order(*numbers, num_rounds, num_slices)
    transfers = add_transfers(order, num_slots, resident) if num_slots else order
    own = set(stashed).intersection(range(rank, num_stages, num_ranks))
    ahead = reach(num_microbatches // num_rounds, num_products_home)
    is_stashing = bool(own) and not is_evaluation
    actions = add_stashes(transfers, own, num_slices=num_slices, ahead=ahead) if is_stashing else transfers
    return (*data_actions(rank, num_ranks, num_stages), *actions)
