"""Owns when each action of a schedule starts and ends under given costs: the timeline behind the grid and the picture.

Per rank five lanes run side by side: compute, load, offload, stash and fetch. Within a lane actions keep their order,
and

    compute   waits for its stage's load and for the message of the neighbouring stage, a backward for its sums
    load      waits for a slot: the one that the offload `num_slots` loads ago gives back
    offload   waits for its stage's last compute; it takes time only when gradients go home
    sums      come on the lane of loads, behind the last ones that left; they leave on that of offloads
    stash     waits for its forward; the second forward behind that one waits for it
    fetch     waits for its stash and for what computes before it in the list; its backward waits for it
"""

from dataclasses import dataclass, field, replace

from mobius.limits import max_pending_offloads
from mobius.schedule.action import Action, ActionKind, source_stage
from mobius.schedule.lanes import Lane
from mobius.schedule.schedule import Schedule, topological_order


@dataclass(frozen=True)
class Costs:
    """Durations of actions in time slots, equal for all stages; messages and the batch take no time."""

    forward: int = 1
    backward: int = 2
    load: int = 2
    offload: int = 2
    """Sending the gradients of a stage home; giving up a slot without gradients takes no time."""
    sums: int = 4
    """Sending the fp32 sums of a stage home between rounds, or bringing them back."""
    offload_activations: int = 1
    """Sending the inputs of a stage's layers and a microbatch home, or bringing them back."""
    products: int = 3
    """Sending all that products need of a microbatch home, or bringing it back."""
    kept_backward: int = 2
    """Backward from what came back, of which no product is run again."""
    keys: int = 1
    """Making keys and values of a slice anew."""


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """Time of one action, from `start` up to but not including `end`, in time slots from the step's start."""

    action: Action
    lane: Lane
    start: int
    end: int


Timeline = tuple[tuple[ActionSpan, ...], ...]
"""The spans of every rank, in the order of its actions."""

_LANES = {
    ActionKind.LOAD: Lane.LOAD,
    ActionKind.LOAD_GRADIENT_SUMS: Lane.LOAD,
    ActionKind.OFFLOAD: Lane.OFFLOAD,
    ActionKind.OFFLOAD_GRADIENT_SUMS: Lane.OFFLOAD,
    ActionKind.OFFLOAD_ACTIVATIONS: Lane.OFFLOAD_ACTIVATIONS,
    ActionKind.PREFETCH_ACTIVATIONS: Lane.PREFETCH_ACTIVATIONS,
}


@dataclass
class _RankClock:
    """State of the lanes of one rank while the timeline is made."""

    lane_free: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    weights_ready: dict[int, int] = field(default_factory=dict)
    stage_idle: dict[int, int] = field(default_factory=dict)
    with_gradients: set[int] = field(default_factory=set)
    sums_ready: dict[int, int] = field(default_factory=dict)
    """End of the last copy of a stage's sums, to the host or back."""
    sums_left: int = 0
    computed: int = 0
    """End of the last compute action."""
    left: dict[tuple[int, int | None], int] = field(default_factory=dict)
    """End of each stash, from then on; of its fetch, once it came back."""
    stash_ends: list[int] = field(default_factory=list)
    num_loads: int = 0
    offload_ends: list[int] = field(default_factory=list)


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:
    """Timeline of `schedule`, which must have passed `check`."""
    spans: list[list[ActionSpan]] = [[] for _ in range(schedule.num_ranks)]
    clocks = [_RankClock() for _ in range(schedule.num_ranks)]
    computed: dict[tuple[bool, int, int | None], int] = {}
    order, conflict = topological_order(schedule)
    assert conflict is None, "the schedule has not passed the check"
    for rank, action in order:
        source = source_stage(action, schedule.num_stages)
        arrival = 0 if source is None else computed[action.kind.is_backward, source, action.microbatch]
        own = costs
        if schedule.offloads_all(action.stage, action.microbatch):
            own = replace(costs, offload_activations=costs.products, backward=costs.kept_backward)
        span = _play(
            clocks[rank], action, arrival, schedule.slots[rank], max_pending_offloads(schedule.copy_lookahead), own
        )
        if action.kind.is_forward_or_backward:
            computed[action.kind.is_backward, action.stage, action.microbatch] = span.end
        spans[rank].append(span)
    return tuple(tuple(rank_spans) for rank_spans in spans)


def _play(
    clock: _RankClock, action: Action, arrival: int, num_slots: int, most_leaving: int, costs: Costs
) -> ActionSpan:
    lane = _LANES.get(action.kind, Lane.COMPUTE)
    start = max(clock.lane_free[lane], arrival)
    duration = 0
    if action.kind is ActionKind.LOAD:
        if clock.num_loads >= num_slots:
            start = max(start, clock.offload_ends[clock.num_loads - num_slots])
        clock.num_loads += 1
        duration = costs.load
        clock.weights_ready[action.stage] = start + duration
    elif action.kind is ActionKind.OFFLOAD:
        start = max(start, clock.stage_idle.get(action.stage, clock.weights_ready[action.stage]))
        duration = costs.offload if action.stage in clock.with_gradients else 0
        clock.offload_ends.append(start + duration)
    elif action.kind is ActionKind.OFFLOAD_GRADIENT_SUMS:
        start, duration = max(start, clock.stage_idle[action.stage]), costs.sums
        clock.with_gradients.remove(action.stage)
        clock.sums_ready[action.stage] = clock.sums_left = start + duration
    elif action.kind is ActionKind.LOAD_GRADIENT_SUMS:
        start, duration = max(start, clock.sums_ready[action.stage], clock.sums_left), costs.sums
        clock.sums_ready[action.stage] = start + duration
    elif action.kind is ActionKind.OFFLOAD_ACTIVATIONS:
        start, duration = max(start, clock.computed), costs.offload_activations
        clock.left[action.stage, action.microbatch] = start + duration
        clock.stash_ends.append(start + duration)
    elif action.kind is ActionKind.PREFETCH_ACTIVATIONS:
        start, duration = (
            max(start, clock.left[action.stage, action.microbatch], clock.computed),
            costs.offload_activations,
        )
        clock.left[action.stage, action.microbatch] = start + duration
    elif action.kind.runs_on_compute_lane:
        start = max(start, clock.weights_ready.get(action.stage, 0))
        if action.kind.is_forward and len(clock.stash_ends) > most_leaving:
            start = max(start, clock.stash_ends[-most_leaving - 1])
        if action.kind.is_backward:
            start = max(start, clock.sums_ready.get(action.stage, 0))
        if not action.kind.is_forward:
            start = max(start, clock.left.get((action.stage, action.microbatch), 0))
        duration = _duration(action, costs)
        clock.stage_idle[action.stage] = clock.computed = start + duration
        if action.kind.is_backward:
            clock.with_gradients.add(action.stage)
    clock.lane_free[lane] = start + duration
    return ActionSpan(action, lane, start, start + duration)


def _duration(action: Action, costs: Costs) -> int:
    """Time slots of what is on the compute lane."""
    if action.kind is ActionKind.RECOMPUTE_KV:
        return costs.keys
    return costs.backward if action.kind.is_backward else costs.forward
