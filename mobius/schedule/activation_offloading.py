"""Decides when activations are offloaded and prefetched: a pass over all actions of one rank.

Between forward and backward a stage saves the inputs of its layers, from which backward recomputes. A stage with
offloaded activations stores these inputs on the host. Each microbatch's copy to the host starts after its forward, and
the copy back runs during the compute action before its backward. So at most two microbatches are in flight per
direction.

    rank 0 of 2, stages 0 and 2, three microbatches; stage 0 offloads activations:

    compute   F0.0 F0.1 F0.2 F2.0 F2.1 F2.2   B2.0 B2.1 B2.2 B0.0 B0.1 B0.2
    offload        OA0.0 OA0.1 OA0.2
    prefetch                                           PA0.0 PA0.1 PA0.2

The plan may choose some microbatches of each round for which all inputs of backward are offloaded (`offloads_all`), so
that matrix products are not repeated. The copies of these microbatches take longer than a forward, and other copies
take less time. So the chosen microbatches are spread evenly over the round. A copy may then last `copy_lookahead`
compute actions, the distance from one chosen microbatch to the next. A prefetch starts `copy_lookahead` actions before
the backward that needs it.

    four of ten       0  1 [2] 3 [4] 5  6 [7] 8 [9]

With sliced sequences, keys and values are recomputed from the offloaded inputs. So these inputs are prefetched twice:
for the recomputation and for the backward. The last slice's inputs are prefetched once, because the slice's backward
follows the recomputation at once.

The model's last stage runs backward right after each forward, and offloads nothing.

In a depth-first order, forwards and backwards alternate, and their copies alternate, too. So a copy may last twice as
many compute actions, and a prefetch does not wait for pending offloads.
"""

from collections import deque
from collections.abc import Sequence

from mobius.schedule.action import Action, ActionKind
from mobius.schedule.depth_first import max_waiting
from mobius.schedule.spec import ScheduleSpec


def num_host_regions(stage: int, spec: ScheduleSpec) -> int:
    """Return the number n of host regions for microbatches of `stage`; microbatch m uses region m modulo n.

    If only some microbatches of a round offload their products, regions differ in size, so n covers whole rounds.
    """
    waiting, size = max_waiting(stage, spec), spec.microbatches_per_round
    is_even = spec.num_offloaded_microbatches in (0, size)
    return waiting if is_even else min(spec.num_microbatches, -(-waiting // size) * size)


def add_activation_offloads(actions: Sequence[Action], spec: ScheduleSpec) -> list[Action]:
    """Add offloads and prefetches of activations to `actions`, the list of one rank.

    Each microbatch of the stages in `spec.offloaded_activation_stages` gets one offload and one prefetch, which comes
    `spec.copy_lookahead` compute actions before its backward. In a depth-first order, a prefetch follows the offload of
    the same activations. In a breadth-first order, a prefetch follows all earlier offloads, because it frees the memory
    of pending offloads.
    """
    offloaded_activation_stages, lookahead = spec.offloaded_activation_stages, spec.copy_lookahead
    result: list[Action] = []
    places = deque[int](maxlen=lookahead)
    """Indices of the latest compute actions."""
    floor = 0
    """Index after the latest offload; depth first, after the offload of the same stage and microbatch."""
    for action in actions:
        if action.stage in offloaded_activation_stages and _needs_prefetch(action, spec.num_slices):
            start = places[0] if places else 0
            if spec.is_depth_first:
                own = Action(ActionKind.OFFLOAD_ACTIVATIONS, action.stage, action.microbatch)
                floor = next((at + 1 for at in range(start, len(result)) if result[at] == own), 0)
            at = max(floor, start)
            result.insert(at, Action(ActionKind.PREFETCH_ACTIVATIONS, action.stage, action.microbatch))
            floor += floor == at
            places = deque((place + (place >= at) for place in places), maxlen=lookahead)
        if action.kind.runs_on_compute_lane:
            places.append(len(result))
        result.append(action)
        if action.stage in offloaded_activation_stages and action.kind.is_forward:
            result.append(Action(ActionKind.OFFLOAD_ACTIVATIONS, action.stage, action.microbatch))
            floor = len(result)
    return result


def _needs_prefetch(action: Action, num_slices: int) -> bool:
    """Whether `action` needs a prefetch of offloaded activations."""
    if not action.kind.is_backward or action.microbatch is None:
        return action.kind is ActionKind.RECOMPUTE_KV
    is_there = num_slices > 1 and (action.microbatch + 1) % num_slices == 0
    return not is_there
