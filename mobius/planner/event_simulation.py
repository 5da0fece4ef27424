"""Discrete-event simulation, in seconds: tasks that depend on each other run on lanes and share bandwidth.

lane      works on one ready task at a time: the lowest priority number first, among equals the earliest in `tasks`
work      a fixed number of seconds
flow      an amount that moves at a rate; flows that use one resource share it in proportion to weights (max-min fair)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from mobius.planner.profile import Profile

_NEGLIGIBLE = 1e-12


class Flow(NamedTuple):
    """Work that moves `amount`, at most at rate `limit`; flows share a resource in proportion to their `weight`."""

    amount: float
    limit: float
    uses: Mapping[Hashable, float]
    """Resource -> units of the resource that one unit of `amount` takes."""
    weight: float = 1.0


class Task:
    """Work that is done once; `run` sets its start and end.

    A task without a lane starts as soon as all tasks in `needs` are done. A flow needs a lane.
    """

    __slots__ = ("_followers", "_num_missing", "_number", "_ready", "end", "lane", "needs", "priority", "start", "work")

    def __init__(
        self, lane: Hashable | None, work: float | Flow, needs: Sequence[Task] = (), priority: int = 0
    ) -> None:
        self.lane, self.work, self.needs, self.priority = lane, work, needs, priority
        self.start = self.end = math.nan
        self._num_missing = self._number = 0
        self._ready = 0.0  # the latest end of the tasks in `needs`
        self._followers: list[Task] = []


class RateTable:
    """Rates of flows for each set of working lanes; simulations may share a table if their lanes have equal flows."""

    def __init__(self, capacities: Mapping[Hashable, float]) -> None:
        """Take the capacities of the resources, in units per second."""
        self._capacities = capacities
        self._known: dict[int, dict[Hashable, float]] = {}
        self._bits: dict[Hashable, int] = {}

    def bit_of(self, lane: Hashable) -> int:
        """Return the bit that stands for a lane in a set of lanes."""
        return self._bits.setdefault(lane, 1 << len(self._bits))

    def set_rates(self, flowing: Sequence[_Lane]) -> float:
        """Set the rate of every working lane; return the seconds until the first lane has moved its amount."""
        key = 0
        for lane in flowing:
            key |= lane.bit
        rates = self._known.get(key)
        if rates is None:
            working = [(lane.bit, lane.task.work) for lane in flowing]
            flows: dict[Hashable, Flow] = {bit: work for bit, work in working if isinstance(work, Flow)}
            rates = self._known[key] = share_rates(flows, self._capacities)
        first = math.inf
        for lane in flowing:
            lane.rate = rates[lane.bit]
            if (left := lane.remaining / lane.rate) < first:
                first = left
        return first


def run(tasks: Sequence[Task], table: RateTable) -> None:
    """Play `tasks` from time 0 and set their start and end.

    All tasks that a task needs must be among `tasks`, without cycles.
    """
    simulation = _Simulation(tasks, table)
    simulation.play()
    assert simulation.num_done == len(tasks), "tasks wait for each other in a circle"


class _Lane:
    """A lane's ready tasks, and the task that it works on."""

    __slots__ = ("bit", "is_busy", "rate", "ready", "remaining", "task")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.ready: list[tuple[int, int, Task]] = []
        self.is_busy = False
        self.task: Task
        self.remaining = self.rate = 0.0
        """Remaining amount of a flow, and its units per second."""


class _Simulation:
    """Goes from event to event: a task becomes ready for its lane, or a lane ends its task.

    Tasks without a lane are no events: their times follow directly from the times of the tasks in `needs`.
    """

    def __init__(self, tasks: Sequence[Task], table: RateTable) -> None:
        self.num_done = 0
        self._table = table
        self._events: list[tuple[float, int, Task, bool]] = []
        """Time, number, task, and whether the task ends then (True) or becomes ready (False)."""
        self._lanes: dict[Hashable, _Lane] = {}
        self._flowing: list[_Lane] = []
        self._counted_at = 0.0
        """Time of the last update of `remaining` in all lanes."""
        for number, task in enumerate(tasks):
            task._number, task._num_missing = number, len(task.needs)
            for needed in task.needs:
                needed._followers.append(task)
        for task in tasks:
            if not task.needs:
                self._make_ready(task, 0.0)

    def play(self) -> None:
        events, flowing, flow_end = self._events, self._flowing, math.inf
        while events or flowing:
            now = events[0][0] if events and events[0][0] < flow_end else flow_end
            touched: list[_Lane] = []
            self._take_events(now, touched)
            has_changed = flow_end <= now + _NEGLIGIBLE
            if has_changed:
                self._end_flows(now, touched)
                # First process all events of this time: they may make a task ready that is more urgent than others.
                self._take_events(now, touched)
            for lane in touched:
                if lane.ready and not lane.is_busy:
                    task = lane.task = heapq.heappop(lane.ready)[2]
                    lane.is_busy, task.start = True, now
                    if isinstance(task.work, Flow):
                        self._count(now)
                        lane.remaining, has_changed = task.work.amount, True
                        flowing.append(lane)
                    else:
                        heapq.heappush(events, (now + task.work, task._number, task, True))
            if has_changed:
                flow_end = self._counted_at + self._table.set_rates(flowing)

    def _take_events(self, now: float, touched: list[_Lane]) -> None:
        """Process all events up to `now`, and collect in `touched` the lanes that may begin a task."""
        events = self._events
        while events and events[0][0] <= now:
            _, number, task, is_end = heapq.heappop(events)
            lane = self._lanes.get(task.lane)
            if lane is None:
                lane = self._lanes[task.lane] = _Lane(self._table.bit_of(task.lane))
            touched.append(lane)
            if is_end:
                lane.is_busy = False
                self._end(task, now)
            else:
                heapq.heappush(lane.ready, (task.priority, number, task))

    def _end_flows(self, now: float, touched: list[_Lane]) -> None:
        self._count(now)
        for lane in [lane for lane in self._flowing if lane.remaining <= _NEGLIGIBLE * lane.rate]:
            self._flowing.remove(lane)
            lane.is_busy = False
            self._end(lane.task, now)
            touched.append(lane)

    def _make_ready(self, task: Task, time: float) -> None:
        if task.lane is None:
            assert not isinstance(task.work, Flow), "a flow needs a lane"
            task.start = time
            self._end(task, time + task.work)
        else:
            heapq.heappush(self._events, (time, task._number, task, False))

    def _end(self, task: Task, time: float) -> None:
        """End a task, and all tasks without a lane that follow from it."""
        ended = [(task, time)]
        while ended:
            task, time = ended.pop()
            task.end = time
            self.num_done += 1
            for follower in task._followers:
                if time > follower._ready:
                    follower._ready = time
                follower._num_missing -= 1
                if follower._num_missing == 0:
                    ready = follower._ready
                    if follower.lane is None:
                        follower.start = ready
                        ended.append((follower, ready + follower.work))  # type: ignore[operator]  # no flow
                    else:
                        heapq.heappush(self._events, (ready, follower._number, follower, False))
            task._followers = []  # leaves no reference cycles for the garbage collector

    def _count(self, now: float) -> None:
        """Subtract the amounts that flowed since the last count."""
        if elapsed := now - self._counted_at:
            for lane in self._flowing:
                lane.remaining -= elapsed * lane.rate
            self._counted_at = now


def share_rates(flows: Mapping[Hashable, Flow], capacities: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """Weighted max-min fair rate of each flow.

    All rates grow in proportion to their weights. A flow's rate stops growing at its limit, or when a resource of the
    flow is used up; other rates grow further (Bertsekas and Gallager, Data Networks, section 6.5.2).
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


@lru_cache(maxsize=64)
def shared_bandwidth(profile: Profile, num_ranks: int) -> SharedBandwidth:
    """Return the object that all simulations with `profile` share."""
    return SharedBandwidth(profile, num_ranks)


class SharedBandwidth:
    """Creates a step's flows, and holds the capacities of the resources that these flows share."""

    HOST, BOTH_WAYS, HOST_TO_DEVICE, DEVICE_TO_HOST = "host memory", "copies both ways", "copies down", "copies up"
    UPDATES, REPLICAS = "CPU optimizers", "link between replicas"
    DISK_READS, DISK_WRITES, DISKS = "reads of disks", "writes to disks", "disks both ways"

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
        if profile.disks is not None:
            self.capacities |= {self.DISK_READS: profile.disks.read, self.DISK_WRITES: profile.disks.write}
            self.capacities[self.DISKS] = profile.disks.total
        for rank in range(num_ranks):
            self.capacities[self.HOST_TO_DEVICE, rank] = copies.host_to_device
            self.capacities[self.DEVICE_TO_HOST, rank] = copies.device_to_host
        # The rate that optimizers lose during copies gives the host memory traffic of a copied byte. If copies and
        # optimizers together need more than the bandwidth, it is divided in the measured proportion.
        lost = profile.cpu_adamw_together - profile.cpu_adamw_beside_copies
        copied = profile.copies_beside_cpu_adamw
        host_share = max(lost, 0.0) * profile.cpu_adamw_bytes / (2 * copied)
        both: dict[Hashable, float] = {self.HOST: host_share} if host_share else {}
        both[self.BOTH_WAYS] = 1.0
        ranks = range(num_ranks)
        self._down = [{**both, self.HOST_TO_DEVICE: 1.0, (self.HOST_TO_DEVICE, rank): 1.0} for rank in ranks]
        self._up = [{**both, self.DEVICE_TO_HOST: 1.0, (self.DEVICE_TO_HOST, rank): 1.0} for rank in ranks]
        self._update: dict[Hashable, float] = {self.HOST: profile.cpu_adamw_bytes, self.UPDATES: 1.0}
        self._update_weight = profile.cpu_adamw_beside_copies / copied
        self._messages = [[self._up_and_down(source, target) for target in ranks] for source in ranks]
        self.table = RateTable(self.capacities)

    def load(self, rank: int, num_bytes: float) -> Flow:
        """Flow of a copy to the GPU."""
        return Flow(num_bytes, self._profile.copies.host_to_device, self._down[rank])

    def offload(self, rank: int, num_bytes: float) -> Flow:
        """Flow of a copy to the host."""
        return Flow(num_bytes, self._profile.copies.device_to_host, self._up[rank])

    def update(self, parameters: float) -> Flow:
        """Flow of a part of a CPU update."""
        return Flow(parameters, self._profile.cpu_adamw, self._update, self._update_weight)

    def disk_read(self, num_bytes: float) -> Flow:
        """Flow of optimizer states from disks to host memory."""
        assert self._profile.disks is not None, "there are disks"
        return Flow(num_bytes, self._profile.disks.read, {self.DISK_READS: 1.0, self.DISKS: 1.0, self.HOST: 1.0})

    def disk_write(self, num_bytes: float) -> Flow:
        """Flow of optimizer states from host memory to disks."""
        assert self._profile.disks is not None, "there are disks"
        return Flow(num_bytes, self._profile.disks.write, {self.DISK_WRITES: 1.0, self.DISKS: 1.0, self.HOST: 1.0})

    def between_replicas(self, rank: int, num_bytes: float) -> Flow:
        """Flow between a rank and its counterparts in other replicas; the rank sends and receives `num_bytes`."""
        rates = self._profile.replicas
        assert rates is not None, "a profile for several replicas has the rates between them"
        uses = self._messages[rank][rank] if rates.is_through_host else {}
        return Flow(num_bytes, rates.alone, {self.REPLICAS: 1.0, **uses})

    def message(self, source: int, target: int, num_bytes: float) -> float | Flow:
        """Seconds of a message over a link that nothing else uses, or a flow to the host and from there to a GPU."""
        messages = self._profile.messages
        if not messages.is_through_host:
            return messages.latency + num_bytes / messages.bandwidth
        amount = num_bytes + messages.latency * messages.bandwidth
        return Flow(amount, messages.bandwidth, self._messages[source][target])

    def _up_and_down(self, source: int, target: int) -> dict[Hashable, float]:
        uses = dict(self._up[source])
        for resource, share in self._down[target].items():
            uses[resource] = uses.get(resource, 0.0) + share
        return uses
