"""Owns when the inputs of a stage's layers go to the host and come back: a pass over all actions of one rank.

Between forward and backward a stage keeps the inputs of its layers, from which backward recomputes. Those of a stage
with offloaded activations wait on the host: each microbatch's leave after its forward and come back under the compute
action before its backward. So at most two microbatches are on their way in either direction, however long a round is.

    rank 0 of 2, stages 0 and 2, of which stage 0 offloads activations, three microbatches:

    compute   F0.0 F0.1 F0.2 F2.0 F2.1 F2.2   B2.0 B2.1 B2.2 B0.0 B0.1 B0.2
    offload        S0.0 S0.1 S0.2
    prefetch                                            T0.0 T0.1 T0.2

Of some microbatches, as many in each round as the plan says, not only the inputs go but all that matrix products need
(`offloads_all`): these are not run again. They are spread evenly over the round, because their copies take longer than
a forward computes, and those of the others less. A copy then has the time of as many computations as lie between two of
them (`copy_lookahead`), and a prefetch stands so many before its backward.

    four of ten       0  1 [2] 3 [4] 5  6 [7] 8 [9]

Where sequences are cut into slices, keys and values are made anew from what was offloaded, which comes back for that
too; it stays on the host until it comes for the backward. That of the last slice comes once, for its backward follows.

The model's last stage turns each microbatch round at once, and offloads nothing.
"""

from collections import deque
from collections.abc import Collection, Sequence

from mobius.schedule.action import Action, ActionKind

MAX_COPY_LOOKAHEAD = 8
"""Computations under which a copy may run, at most: inputs of so many microbatches wait on the GPU for their turn."""


def offloads_all(microbatch: int, *, microbatches_per_round: int, number: int) -> bool:
    """Whether a microbatch is one of the `number` of its round whose products are offloaded, too."""
    place = microbatch % microbatches_per_round
    return (place + 1) * number // microbatches_per_round > place * number // microbatches_per_round


def copy_lookahead(microbatches_per_round: int, number: int) -> int:
    """Computations under which a microbatch may leave, or come back: the distance of those that go whole.

    `number` of a round do. Copies take turns, so that what is copied behind a long one may have to wait for it.
    """
    return min(MAX_COPY_LOOKAHEAD, -(-microbatches_per_round // number)) if number else 1


def add_activation_offloads(
    actions: Sequence[Action], offloaded_activation_stages: Collection[int], *, num_slices: int = 1, lookahead: int = 1
) -> list[Action]:
    """Add to `actions`, those of one rank, an offload and a prefetch of activations.

    Each microbatch of the stages in `offloaded_activation_stages` has both.
    A prefetch stands before the compute action that is `lookahead` of its backward, but never before an offload: with
    the prefetch, the memory of those that are leaving is given back.
    """
    result: list[Action] = []
    places = deque[int](maxlen=lookahead)
    """Indices of the last compute actions."""
    floor = 0
    """Index after the last offload."""
    for action in actions:
        if action.stage in offloaded_activation_stages and _needs_prefetch(action, num_slices):
            at = max(floor, places[0] if places else 0)
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
    """Whether offloaded activations come back for `action`."""
    if not action.kind.is_backward or action.microbatch is None:
        return action.kind is ActionKind.RECOMPUTE_KV
    is_there = num_slices > 1 and (action.microbatch + 1) % num_slices == 0
    return not is_there
