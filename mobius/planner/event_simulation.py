"""Plays tasks that depend on each other over lanes and shared rates: a discrete-event simulation, in seconds.

lane      works on one task at a time: of those that are ready, the lowest priority, then the one ready longest
Work      a fixed number of seconds
Flow      an amount that runs at a rate; flows that use the same resource share it by their weights (max-min fair)

What a stage costs, and how the runtime goes about a step, is here too: tasks are made of that (`step_tasks.py`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from mobius.planner.profile import Profile
from mobius.planner.replica_traffic import ReplicaSharding
from mobius.schedule.action import Action, ActionKind

_NEGLIGIBLE = 1e-12


@dataclass(frozen=True)
class StageCost:
    """Costs of a stage: seconds per microbatch, and parameters."""

    forward: float
    """0 for the model's last stage, whose forward runs in its backward."""
    backward: float
    """With recompute where it recomputes; in the last stage also forward and loss, in the first the embedding's."""
    parameters: int
    is_resident: bool = False
    """Whether its state stays on the GPU, which updates it."""
    forward_launch: float = 0.0
    """Seconds of the host to enqueue the forward of a microbatch."""
    backward_launch: float = 0.0
    num_saving_layers: int = 0
    """Layers that keep something of a microbatch for backward."""
    keys: float = 0.0
    """Seconds per microbatch to make keys and values of a slice anew."""
    forward_attention: float = 0.0
    """Part of `forward` that goes with the keys before a slice, on average over the slices of a sequence."""
    backward_attention: float = 0.0
    keeps_attention: bool = False
    loaded: int | None = None
    """Parameters that are loaded if the stage is streamed, `parameters` being those that are trained; None: as many."""
    backward_from_saved: tuple[float, float] | None = None
    """Seconds of a backward whose products have come back from the host, and of the host to enqueue it."""
    keeps_trained_on_gpu: bool = False
    """Whether what is trained stays on the GPU, which updates it, though the others are streamed."""

    def launch_seconds(self, action: Action, *, offloads_all: bool) -> float:
        """Seconds of the host to enqueue an action; `offloads_all` as in `slice_seconds`."""
        if not action.kind.is_backward:
            return self.forward_launch
        return self.backward_from_saved[1] if offloads_all and self.backward_from_saved else self.backward_launch

    def slice_seconds(self, action: Action, num_slices: int, *, offloads_all: bool = False) -> float:
        """Seconds of an action on the compute lane; later slices attend to more keys.

        Slice i of n has (2 i + 1) / n of the average number. `offloads_all`: those of the microbatch were sent home.
        """
        if offloads_all and self.backward_from_saved and action.kind.is_backward:
            return self.backward_from_saved[0]
        if action.kind is ActionKind.RECOMPUTE_KV:
            return self.keys
        seconds, attention = self.forward, self.forward_attention
        if action.kind.is_backward:
            seconds, attention = self.backward, self.backward_attention
        place = (action.microbatch or 0) % num_slices
        return seconds + attention * ((2 * place + 1) / num_slices - 1)


@dataclass(frozen=True)
class StepRules:
    """How the runtime goes about a step."""

    clips: bool
    """Updates wait for the norm over all ranks."""
    message_bytes: int
    """Bytes of an activation [B, L, H]."""
    overlaps_optimizer: bool = True
    weight_bytes: int = 2
    gradient_bytes: int = 2
    """Bytes per parameter on their way to the host."""
    is_tied: bool = False
    """Whether the first and the last stage are updated after the step also without clipping."""
    attention_bytes: int = 0
    """Bytes of attention's result for a layer and microbatch, where that is kept."""
    product_bytes: int = 0
    """Bytes of all that a layer's products need of a microbatch."""
    sharding: ReplicaSharding = field(default_factory=ReplicaSharding)
    """How replicas share the stages."""

    def offloaded_bytes(self, cost: StageCost, *, offloads_all: bool) -> int:
        """Bytes that the layers of a stage send home of a microbatch: for recomputing, or for its products."""
        if offloads_all:
            return cost.num_saving_layers * self.product_bytes
        return cost.num_saving_layers * (self.message_bytes + (self.attention_bytes if cost.keeps_attention else 0))


@dataclass(frozen=True, slots=True)
class Flow:
    """Work that moves `amount`: at most at rate `limit`, with `weight` against the others, each unit using `uses`."""

    amount: float
    limit: float
    uses: Mapping[Hashable, float]
    """Resource -> how much of it one unit of the amount takes."""
    weight: float = 1.0


class Task:
    """One thing that is done once; `run` fills in when it was.

    Without a lane its seconds begin as soon as everything that it needs is done; a flow has a lane.
    """

    __slots__ = ("_followers", "_num_missing", "_number", "end", "lane", "needs", "priority", "start", "work")

    def __init__(
        self, lane: Hashable | None, work: float | Flow, needs: Sequence[Task] = (), priority: int = 0
    ) -> None:
        self.lane, self.work, self.needs, self.priority = lane, work, needs, priority
        self.start = self.end = math.nan
        self._num_missing = self._number = 0
        self._followers: list[Task] = []


def run(tasks: Sequence[Task], capacities: Mapping[Hashable, float]) -> None:
    """Play `tasks` from time 0 and set their start and end; `capacities` are the resources' units per second.

    All that a task needs must be among the tasks, without circles.
    """
    _Run(tasks, capacities).play()


class _LaneState:
    """Tasks that a lane has to do, and the flow that is under way."""

    __slots__ = ("bit", "index", "is_busy", "rate", "ready", "remaining", "task")

    def __init__(self, index: int) -> None:
        self.index, self.bit = index, 1 << index
        self.ready: list[tuple[int, int, Task]] = []
        self.is_busy = False
        self.task: Task
        self.remaining = self.rate = 0.0


class _Run:
    """Goes from event to event: a task of a lane becomes ready, or what a lane does ends.

    Tasks without a lane are no events: their times follow at once from those of what they need.
    """

    def __init__(self, tasks: Sequence[Task], capacities: Mapping[Hashable, float]) -> None:
        self._tasks, self._capacities = tasks, capacities
        self._events: list[tuple[float, int, Task, bool]] = []
        """Time, number, task, and whether it ends then; else it becomes ready."""
        self._num_done = 0
        self._lanes: dict[Hashable, _LaneState] = {}
        self._flowing: list[_LaneState] = []
        self._counted_at = 0.0
        """When `remaining` was right."""
        self._known_rates: dict[int, dict[Hashable, float]] = {}

    def play(self) -> None:
        for number, task in enumerate(self._tasks):
            task._number, task._num_missing = number, len(task.needs)
            for needed in task.needs:
                needed._followers.append(task)
        self._make_ready([(task, 0.0) for task in self._tasks if not task.needs])
        events, flowing = self._events, self._flowing
        while events or flowing:
            flow_end = math.inf
            for lane in flowing:
                if (left := lane.remaining / lane.rate) < flow_end:
                    flow_end = left
            flow_end += self._counted_at
            now = events[0][0] if events and events[0][0] < flow_end else flow_end
            touched: list[_LaneState] = []
            self._take_events(now, touched)
            has_changed = flow_end <= now + _NEGLIGIBLE
            if has_changed:
                self._end_flows(now, touched)
                # Before a lane takes its next task: what becomes ready now may be the more urgent one.
                self._take_events(now, touched)
            for lane in touched:
                if lane.ready and not lane.is_busy:
                    has_changed = self._begin(lane, now) or has_changed
            if has_changed:
                self._share()
        assert self._num_done == len(self._tasks), "tasks wait for each other in a circle"

    def _take_events(self, now: float, touched: list[_LaneState]) -> None:
        """Let happen what happens up to this moment, and tell the lanes that may begin something."""
        events = self._events
        while events and events[0][0] <= now:
            _, number, task, is_end = heapq.heappop(events)
            lane = self._lanes.get(task.lane)
            if lane is None:
                lane = self._lanes[task.lane] = _LaneState(len(self._lanes))
            touched.append(lane)
            if is_end:
                lane.is_busy = False
                self._end(task, now)
            else:
                heapq.heappush(lane.ready, (task.priority, number, task))

    def _begin(self, lane: _LaneState, now: float) -> bool:
        """Begin the next task of a lane; whether it is a flow."""
        task = heapq.heappop(lane.ready)[2]
        lane.is_busy, lane.task, task.start = True, task, now
        if not isinstance(task.work, Flow):
            heapq.heappush(self._events, (now + task.work, task._number, task, True))
            return False
        self._count(now)
        lane.remaining = task.work.amount
        self._flowing.append(lane)
        return True

    def _end_flows(self, now: float, touched: list[_LaneState]) -> None:
        self._count(now)
        ended = [lane for lane in self._flowing if lane.remaining <= _NEGLIGIBLE * lane.rate]
        for lane in ended:
            self._flowing.remove(lane)
            lane.is_busy = False
            self._end(lane.task, now)
        touched += ended

    def _end(self, task: Task, now: float) -> None:
        task.end = now
        self._make_ready(self._after(task))

    def _after(self, task: Task) -> list[tuple[Task, float]]:
        """Tasks that waited for nothing but this, and when they are ready."""
        self._num_done += 1
        released = []
        for follower in task._followers:
            follower._num_missing -= 1
            if follower._num_missing == 0:
                released.append((follower, max([needed.end for needed in follower.needs])))
        task._followers = []  # no circles are left for the garbage collector
        return released

    def _make_ready(self, tasks: list[tuple[Task, float]]) -> None:
        """Plan the event of each of `tasks`, which are ready at that time, or their end and what follows from it."""
        while tasks:
            task, time = tasks.pop()
            if task.lane is None and not isinstance(task.work, Flow):
                task.start, task.end = time, time + task.work
                tasks += self._after(task)
            else:
                heapq.heappush(self._events, (time, task._number, task, False))

    def _count(self, now: float) -> None:
        """Take off what flowed since the last count."""
        if elapsed := now - self._counted_at:
            for lane in self._flowing:
                lane.remaining -= elapsed * lane.rate
            self._counted_at = now

    def _share(self) -> None:
        """Tell the rates; tasks of a lane flow alike, one at a time, so the lanes at work tell all of them."""
        key = 0
        for lane in self._flowing:
            key |= lane.bit
        rates = self._known_rates.get(key)
        if rates is None:
            flows: dict[Hashable, Flow] = {
                lane.index: lane.task.work for lane in self._flowing if isinstance(lane.task.work, Flow)
            }
            rates = self._known_rates[key] = share_rates(flows, self._capacities)
        for lane in self._flowing:
            lane.rate = rates[lane.index]


def share_rates(flows: Mapping[Hashable, Flow], capacities: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """The weighted max-min fair rate of each flow.

    All rates grow in proportion to their weights until a flow reaches its limit or a resource is used up; those stop,
    the others go on (Bertsekas and Gallager, Data Networks, section 6.5.2).
    """
    rates = dict.fromkeys(flows, 0.0)
    free = dict(capacities)
    growing = set(flows)
    while growing:
        demand: dict[Hashable, float] = {}
        for name in growing:
            for resource, share in flows[name].uses.items():
                demand[resource] = demand.get(resource, 0.0) + share * flows[name].weight
        growth = min(free[resource] / units for resource, units in demand.items()) if demand else math.inf
        growth = min(growth, *((flows[name].limit - rates[name]) / flows[name].weight for name in growing))
        growth = max(growth, 0.0)
        for name in growing:
            rates[name] += growth * flows[name].weight
        for resource, units in demand.items():
            free[resource] -= growth * units
        full = {resource for resource in demand if free[resource] <= 1e-9 * capacities[resource]}
        growing = {
            name
            for name in growing
            if rates[name] < flows[name].limit * (1 - 1e-9) and not full & flows[name].uses.keys()
        }
    return rates


class SharedBandwidth:
    """Makes the flows of a run, and tells the capacities of what they share."""

    HOST, BOTH_WAYS, HOST_TO_DEVICE, DEVICE_TO_HOST = "host memory", "copies both ways", "copies down", "copies up"
    UPDATES, REPLICAS = "CPU optimizers", "link between replicas"

    def __init__(self, profile: Profile, num_ranks: int) -> None:
        copies = profile.copies
        self._profile = profile
        self.capacities: dict[Hashable, float] = {
            self.HOST: max(profile.host_bandwidth, num_ranks * profile.cpu_adamw_together * profile.cpu_adamw_bytes),
            self.BOTH_WAYS: num_ranks * (copies.host_to_device_duplex + copies.device_to_host_duplex),
            self.HOST_TO_DEVICE: num_ranks * copies.host_to_device_all_gpus,
            self.DEVICE_TO_HOST: num_ranks * copies.device_to_host_all_gpus,
            self.UPDATES: num_ranks * profile.cpu_adamw_together,
        }
        if profile.replicas is not None:
            self.capacities[self.REPLICAS] = profile.replicas.together
        for rank in range(num_ranks):
            self.capacities[self.HOST_TO_DEVICE, rank], self.capacities[self.DEVICE_TO_HOST, rank] = (
                copies.host_to_device,
                copies.device_to_host,
            )
        # What the optimizers lose beside copies is what these take of the host's memory, in bytes per byte copied;
        # where both want more than there is they share it as they were seen to.
        lost, beside = profile.cpu_adamw_together - profile.cpu_adamw_beside_copies, profile.copies_beside_cpu_adamw
        self._host_share = max(lost, 0.0) * profile.cpu_adamw_bytes / (2 * beside)
        self._update_weight = profile.cpu_adamw_beside_copies / beside
        self._messages: dict[tuple[int, int, float], float | Flow] = {}
        self._loads: dict[tuple[int, float], Flow] = {}
        self._offloads: dict[tuple[int, float], Flow] = {}

    def load(self, rank: int, num_bytes: float) -> Flow:
        """A copy to the GPU."""
        return self._copy(self._loads, rank, num_bytes, self._profile.copies.host_to_device, self._down)

    def offload(self, rank: int, num_bytes: float) -> Flow:
        """A copy to the host."""
        return self._copy(self._offloads, rank, num_bytes, self._profile.copies.device_to_host, self._up)

    @staticmethod
    def _copy(
        known: dict[tuple[int, float], Flow],
        rank: int,
        num_bytes: float,
        limit: float,
        uses: Callable[[int], Mapping[Hashable, float]],
    ) -> Flow:
        flow = known.get((rank, num_bytes))
        if flow is None:  # a step has thousands of copies, most of them alike
            flow = known[rank, num_bytes] = Flow(num_bytes, limit, uses(rank))
        return flow

    def update(self, parameters: float) -> Flow:
        """A part of a CPU update."""
        uses: dict[Hashable, float] = {self.HOST: self._profile.cpu_adamw_bytes, self.UPDATES: 1.0}
        return Flow(parameters, self._profile.cpu_adamw, uses, self._update_weight)

    def between_replicas(self, rank: int, num_bytes: float) -> Flow:
        """Bytes that a rank gives to its counterparts while as many come."""
        rates = self._profile.replicas
        assert rates is not None, "a profile of replicas knows what is between them"
        uses: dict[Hashable, float] = {self.REPLICAS: 1.0}
        for resource, share in (*self._up(rank).items(), *self._down(rank).items()) if rates.is_through_host else ():
            uses[resource] = uses.get(resource, 0.0) + share
        return Flow(num_bytes, rates.alone, uses)

    def message(self, source: int, target: int, num_bytes: float) -> float | Flow:
        """Seconds of a message over a link of its own, or a flow up to the host and down again."""
        key = (source, target, num_bytes)
        if key not in self._messages:  # a step has thousands, all alike
            self._messages[key] = self._new_message(source, target, num_bytes)
        return self._messages[key]

    def _new_message(self, source: int, target: int, num_bytes: float) -> float | Flow:
        messages = self._profile.messages
        if not messages.is_through_host:
            return messages.latency + num_bytes / messages.bandwidth
        uses = self._up(source)
        for resource, share in self._down(target).items():
            uses[resource] = uses.get(resource, 0.0) + share
        return Flow(num_bytes + messages.latency * messages.bandwidth, messages.bandwidth, uses)

    def _down(self, rank: int) -> dict[Hashable, float]:
        return {**self._host(), self.BOTH_WAYS: 1.0, self.HOST_TO_DEVICE: 1.0, (self.HOST_TO_DEVICE, rank): 1.0}

    def _up(self, rank: int) -> dict[Hashable, float]:
        return {**self._host(), self.BOTH_WAYS: 1.0, self.DEVICE_TO_HOST: 1.0, (self.DEVICE_TO_HOST, rank): 1.0}

    def _host(self) -> dict[Hashable, float]:
        return {self.HOST: self._host_share} if self._host_share else {}
