"""Compute order of a step or an evaluation: breadth-first over the stages of a rank (looped pipeline).

    rank 0 of 2, stages 0 and 2, two microbatches:   F0.0 F0.1 F2.0 F2.1   B2.0 B2.1 B0.0 B0.1
    rank 1 of 2, stages 1 and 3:                     F1.0 F1.1   F3.0 B3.0 F3.1 B3.1   B1.0 B1.1
    the same in an evaluation:                       F0.0 F0.1 F2.0 F2.1    and    F1.0 F1.1 F3.0 F3.1

With gradient accumulation over two rounds, the first half of the microbatches runs forward and backward before the
second half starts:

    rank 0 of 2, four microbatches, two rounds:      F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1   F0.2 F0.3 F2.2 ...

Only one round's activations exist at a time, and weights are loaded once per pass and round.

If sequences are sliced, the slices are the microbatches: two sequences of three slices are 0 1 2 and 3 4 5. A slice
attends to the keys of earlier slices, so forward takes the slices in order and backward in reverse. A stage recomputes
keys and values before the backward of each sequence, except for the model's last stage, whose backward follows at once:

    rank 0 of 2, one sequence of three slices:  F0.0 F0.1 F0.2 F2.0 F2.1 F2.2  K2.0 K2.1 K2.2 B2.2 B2.1 B2.0  K0.0 ...
    rank 1 of 2:                                F1.0 F1.1 F1.2  F3.0 F3.1 F3.2 B3.2 B3.1 B3.0  K1.0 K1.1 K1.2 B1.2 ...

A stage runs all microbatches before the rank's next stage starts, so the stage's weights are loaded once per pass, for
any number of microbatches. In a step, the model's last stage runs the backward of each microbatch right after the
forward, because everything that backward needs is then there.

Breadth-first pipeline parallelism: Lamy-Poirier 2022, https://arxiv.org/abs/2211.05953.
"""

from mobius.schedule.action import Action, ActionKind, compute_kinds, evaluation_kind
from mobius.schedule.spec import ScheduleSpec


def data_actions(rank: int, spec: ScheduleSpec) -> list[Action]:
    """Return the actions that load the batch, on ranks that need it: tokens for the first stage, labels for the last.

    A rank with both stages loads the batch once, as stage 0. If the ranks share the head, all ranks need labels.
    """
    if rank == 0:
        return [Action(ActionKind.GENERATE_DATA, 0)]
    if rank == spec.rank_of(spec.num_stages - 1):
        return [Action(ActionKind.GENERATE_DATA, spec.num_stages - 1)]
    return [Action(ActionKind.GENERATE_DATA, rank)] if spec.spreads_head else []


def breadth_first_order(rank: int, spec: ScheduleSpec) -> list[Action]:
    """Return all forwards and backwards of `rank` in order; rounds and slices must divide the microbatches.

    Backward reverses the stages, and the slices of a sequence, but not the microbatches. So the gradients of
    microbatches 0, 1, ... are added in this order, as in a plain loop, and sums are bit-identical.
    """
    size = spec.microbatches_per_round
    rounds = [range(first, first + size) for first in range(0, spec.num_microbatches, size)]
    return [action for microbatches in rounds for action in _round(rank, spec, microbatches)]


def _round(rank: int, spec: ScheduleSpec, microbatches: range) -> list[Action]:
    stages, last_stage, num_slices = spec.local_stages(rank), spec.num_stages - 1, spec.num_slices
    kinds = {stage: compute_kinds(stage, spec.num_stages) for stage in stages}
    starts = range(microbatches.start, microbatches.stop, num_slices)
    sequences = [range(first, first + num_slices) for first in starts]
    actions = [Action(kinds[s][0], s, m) for s in stages if s != last_stage for m in microbatches]
    for stage in reversed(stages):
        forward, backward = kinds[stage]
        # Only slices need keys and values of other microbatches.
        first = forward if stage == last_stage else ActionKind.RECOMPUTE_KV if num_slices > 1 else None
        for slices in sequences:
            actions += [Action(first, stage, m) for m in slices] if first is not None else []
            actions += [Action(backward, stage, m) for m in reversed(slices)]
    return actions


def evaluation_order(rank: int, spec: ScheduleSpec) -> list[Action]:
    """Return all forwards of `rank` in order, without backwards; the model's last stage also computes the loss."""
    return [
        Action(evaluation_kind(stage, spec.num_stages), stage, microbatch)
        for stage in spec.local_stages(rank)
        for microbatch in range(spec.num_microbatches)
    ]
