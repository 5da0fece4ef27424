"""Compute order of a step: depth-first over the stages of a rank (interleaved 1F1B).

After a warm-up of forwards, a rank alternates one forward and one backward. So few microbatches wait between their
forward and backward, even if a step has many. Forwards go through the rank's stages in turn, and each stage runs the
microbatches of a round. Backwards go through the stages in reverse.

    rank 0 of 2, stages 0 and 2, four microbatches, two rounds:
        F0.0 F0.1 F2.0 F2.1   F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1   B2.2 B2.3 B0.2 B0.3
    rank 1 of 2, stages 1 and 3:
        F1.0 F1.1   F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3   B1.2 B1.3

The warm-up lasts until a rank's first backward can start: its earlier stages have run forward on a whole round, and the
ranks after it have sent a gradient back. The updates of this step have time until the next step needs the stage, which
is after the forwards of earlier stages. Each stage runs its microbatches in ascending order in both directions, so
gradient sums have the same bits as in the breadth-first order.

If the ranks share the head (`ScheduleSpec.spreads_head`), the last stage's backward waits for the head, and all ranks
begin with `HEAD_TURNS` more forwards. Rank 0 of 2, one stage per rank, four microbatches:

    F0.0 F0.1 F0.2 H2.0 F0.3 H2.2 B0.0 B0.1 B0.2 B0.3

Interleaved 1F1B: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, count, zip_longest

from mobius.schedule.action import Action, ActionKind, compute_kinds
from mobius.schedule.spec import ScheduleSpec

HEAD_TURNS = 2
"""Number of turns between forward and backward of the last stage, in which another rank computes head and loss. That
rank first ends its current turn; then messages and the head take time."""


def depth_first_order(rank: int, spec: ScheduleSpec) -> list[Action]:
    """Return all forwards and backwards of `rank` in order; rounds must divide the microbatches."""
    size, stages = spec.microbatches_per_round, spec.local_stages(rank)
    rounds = [range(first, first + size) for first in range(0, spec.num_microbatches, size)]
    kinds = {stage: compute_kinds(stage, spec.chain_length) for stage in stages}
    forwards = [Action(kinds[s][0], s, m) for own in rounds for s in stages for m in own]
    backwards = [Action(kinds[s][1], s, m) for own in rounds for s in reversed(stages) for m in own]
    warmup = warmup_forwards(rank, spec)
    turns = zip_longest(forwards[warmup:], backwards)
    return [*forwards[:warmup], *(action for action in chain.from_iterable(turns) if action is not None)]


def warmup_forwards(rank: int, spec: ScheduleSpec) -> int:
    """Return the number of forwards of `rank` before it first alternates a forward and a backward."""
    return min(spec.stages_per_rank * spec.num_microbatches, _opening(rank, spec))


def _opening(rank: int, spec: ScheduleSpec) -> int:
    """Return the number of warm-up forwards in a step with enough microbatches for them."""
    own = (spec.stages_per_rank - 1) * spec.microbatches_per_round
    return own + 2 * (spec.num_ranks - 1 - rank) + HEAD_TURNS * spec.spreads_head


def add_heads(actions: Sequence[Action], rank: int, spec: ScheduleSpec) -> list[Action]:
    """Add the shared heads (norm, head and loss) that `rank` computes to `actions`, the rank's list.

    The last stage's rank computes the head of a microbatch just before the backward. An earlier rank r computes a head
    more turns earlier, by the number of turns that a gradient takes from the last stage's rank to r. On rank r, too,
    the head runs before the backward of the same turn, so that the result arrives in time.
    """
    size, last, own = spec.microbatches_per_round, spec.num_ranks - 1, spec.head_microbatches(rank)
    before_backward, after_forward = dict[int, list[Action]](), dict[int, list[Action]]()
    for microbatch in own:
        rounds, place = divmod(microbatch, size)
        turn = rounds * size * spec.stages_per_rank + place - (last - rank) - (rank != last)
        forward, head = _opening(rank, spec) + turn, Action(ActionKind.HEAD, spec.num_stages, microbatch)
        if turn >= 0 or forward >= spec.stages_per_rank * spec.num_microbatches:
            before_backward.setdefault(max(turn, 0), []).append(head)
        else:
            after_forward.setdefault(forward, []).append(head)
    result, forwards, backwards = list[Action](), count(), count()
    for action in actions:
        result += before_backward.get(next(backwards), ()) if action.kind.is_backward else ()
        result.append(action)
        result += after_forward.get(next(forwards), ()) if action.kind.is_forward else ()
    return result


def waiting_microbatches(rank: int, spec: ScheduleSpec) -> Sequence[Sequence[int]]:
    """Return how many microbatches wait for backward in each stage of `rank`, at every turn with a possible maximum."""
    numbers = spec.stages_per_rank, spec.microbatches_per_round, spec.num_rounds
    return _waiting_microbatches(*numbers, warmup_forwards(rank, spec))


def max_waiting(stage: int, spec: ScheduleSpec) -> int:
    """Return the maximum number of microbatches that are between forward and backward of `stage` at the same time."""
    if not spec.is_depth_first:
        return spec.microbatches_per_round
    rank, place = spec.rank_of(stage), stage // spec.num_ranks
    return max(counts[place] for counts in waiting_microbatches(rank, spec))


@lru_cache(maxsize=1024)  # called for every memory use that the planner tries
def _waiting_microbatches(per_rank: int, size: int, rounds: int, warmup: int) -> Sequence[Sequence[int]]:
    """Count the waiting microbatches of each stage at the turns where a count can be highest.

    Counts change evenly as long as the stages of forwards and backwards stay the same. So it is enough to count at the
    turns where one of these stages changes. All rounds from the third on are alike.
    """
    period = size * per_rank
    ends = min(rounds, 3) * period
    turns = {*range(0, ends, size), *(turn - warmup % size for turn in range(size, ends, size))}
    found = dict[Sequence[int], None]()
    for turn in turns:
        forwards, places = min(rounds * period, warmup + turn + 1), range(per_rank)
        back = [_of_stage(turn, place, size, period) for place in reversed(places)]
        found[tuple(_of_stage(forwards, place, size, period) - back[place] for place in places)] = None
    return [*found]


def _of_stage(number: int, place: int, size: int, period: int) -> int:
    """Return how many of the first `number` computations belong to the stage that is at `place` in each round."""
    rounds, rest = divmod(number, period)
    return rounds * size + min(max(rest - place * size, 0), size)
