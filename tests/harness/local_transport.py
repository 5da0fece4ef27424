"""Ranks as threads of one process: messages, meetings, and replicas with boards in place of process groups."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore

from mobius.distributed.rendezvous import Rendezvous
from mobius.distributed.replicas import ReplicaGroup
from mobius.distributed.shards import Segment, Shards
from mobius.distributed.transport import Edge, RankGroup, edges_of
from mobius.errors import MobiusError, TransportError
from mobius.schedule.action import Direction

TIMEOUT_SECONDS = 600.0

T = TypeVar("T")


class LocalHub:
    """What the rank-threads of one process share."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        edges = edges_of(num_ranks, spreads_head=True) or [Edge(0, 0, direction) for direction in Direction]
        self.edges: dict[Edge, queue.Queue[Tensor]] = {edge: queue.Queue() for edge in edges}
        self.exchanged: dict[tuple[int, int], queue.Queue[Tensor]] = {
            (a, b): queue.Queue() for a in range(num_ranks) for b in range(num_ranks)
        }
        self.board: list[Tensor] = [torch.empty(0)] * num_ranks
        self.meeting = threading.Barrier(num_ranks)
        self.has_failed = threading.Event()

    def transport(self, rank: int) -> LocalTransport:
        """The connection of `rank`; to be made once, in its own thread."""
        return LocalTransport(self, rank)


class LocalTransport:
    """One rank-thread's connection to the others; a dead thread makes the others raise TransportError."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self._hub = hub
        self.rank, self.num_ranks = rank, hub.num_ranks
        self.all_ranks: RankGroup = self
        self.replicas: ReplicaGroup | None = None

    def post_receive(self, source: int, direction: Direction) -> None:
        """Nothing to announce: queues take messages at any time."""

    def receive(self, source: int, direction: Direction) -> Tensor:
        return self._take(self._hub.edges[Edge(source, self.rank, direction)])

    def send(self, tensor: Tensor, target: int, direction: Direction, *, is_kept: bool = False) -> None:
        self._hub.edges[Edge(self.rank, target, direction)].put(tensor)

    def finish_step(self) -> None:
        """Queues hold nothing back."""

    def limit_pending_sends(self, max_pending_sends: int) -> None:
        """Queues hold any number."""

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        self._hub.board[self.rank] = values
        self._meet()
        total = torch.stack(self._hub.board).sum(0)
        self._meet()
        return total

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        self._hub.exchanged[self.rank, peer].put(tensor.clone())
        return self._take(self._hub.exchanged[peer, self.rank])

    def barrier(self) -> None:
        self._meet()

    def close(self) -> None:
        """Nothing to end."""

    def _meet(self) -> None:
        try:
            self._hub.meeting.wait(TIMEOUT_SECONDS)
        except threading.BrokenBarrierError as error:
            raise TransportError(f"rank {self.rank} waited for the other rank-threads in vain") from error

    def _take(self, messages: queue.Queue[Tensor]) -> Tensor:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            try:
                return messages.get(timeout=0.5)
            except queue.Empty as error:
                if self._hub.has_failed.is_set():
                    raise TransportError(f"rank {self.rank} waited for a rank-thread that failed") from error
                if time.monotonic() > deadline:
                    raise TransportError(f"rank {self.rank} got no message for {TIMEOUT_SECONDS:.0f} s") from error


def run_rank_threads(num_ranks: int, work: Callable[[LocalTransport], T]) -> list[T]:
    """Run `work(transport)` in one thread per rank and return the results in rank order; the first error is raised."""
    hub = LocalHub(num_ranks)

    def stop() -> None:
        hub.has_failed.set()
        hub.meeting.abort()

    return run_threads(num_ranks, lambda rank: work(hub.transport(rank)), stop)


def run_threads(number: int, work: Callable[[int], T], stop: Callable[[], None]) -> list[T]:
    """Run `work(rank)` in so many threads and return the results in their order; the first error is raised.

    `stop` makes the others end when one has failed.
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:  # handed to the calling thread below
            errors[rank] = error
            stop()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS * 5)
    for error in sorted(errors.values(), key=lambda error: isinstance(error, TransportError)):
        raise error
    return [results[rank] for rank in range(number)]


class Board:
    """A meeting of the members of a place, where each sees what the others have brought."""

    def __init__(self, num_members: int) -> None:
        self._brought: list[Tensor] = [torch.empty(0)] * num_members
        self.meeting = threading.Barrier(num_members)

    def show(self, index: int, values: Tensor) -> list[Tensor]:
        """Copies of what all members have brought, in their order."""
        self._brought[index] = values
        self._meet()
        seen = [each.clone() for each in self._brought]
        self._meet()
        return seen

    def _meet(self) -> None:
        try:
            self.meeting.wait(TIMEOUT_SECONDS)
        except threading.BrokenBarrierError as error:
            raise TransportError("a replica's thread failed") from error


class LocalReplicas:
    """One rank-thread's counterparts."""

    def __init__(self, index: int, boards: Sequence[Board], num_replicas: int) -> None:
        self.index, self.num_replicas = index, num_replicas
        self._device, self._gathers, self._host, self._saving = boards

    def reduce_scatter(self, values: Tensor, segments: Sequence[Segment]) -> None:
        seen = self._device.show(self.index, values)
        values.fill_(torch.nan)  # what others own is not to be read
        for segment in segments:
            own = segment[self.index]
            values[own] = torch.stack([each[own] for each in seen]).sum(0)

    def sum_over_replicas(self, own: Tensor) -> Tensor:
        return torch.stack(self._device.show(self.index, own)).sum(0)

    def all_gather(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._take_all(self._device, values, segments)

    def all_gather_for_load(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._take_all(self._gathers, values, segments)

    def all_gather_on_host(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._take_all(self._host, values, segments)

    def gather_to_first(self, own: Tensor, shards: Shards) -> Tensor | None:
        seen = self._saving.show(self.index, own)
        whole = torch.empty(shards.num_trained, dtype=own.dtype)
        for owner, values in enumerate(seen):
            parts = shards.of_owner(owner)
            for part, value in zip(parts, values.split([part.stop - part.start for part in parts]), strict=True):
                whole[part] = value
        return None if self.index else whole

    def _take_all(self, board: Board, values: Tensor, segments: Sequence[Segment]) -> None:
        for owner, seen in enumerate(board.show(self.index, values)):
            for segment in segments:
                values[segment[owner]] = seen[segment[owner]]


def run_replica_threads(
    num_replicas: int, num_pipeline_ranks: int, work: Callable[[int, LocalTransport], T]
) -> list[T]:
    """Run `work(rank of all, transport)` in one thread per rank; results by rank, the first error is raised."""
    world = LocalHub(num_replicas * num_pipeline_ranks)
    pipelines = [LocalHub(num_pipeline_ranks) for _ in range(num_replicas)]
    boards = [[Board(num_replicas) for _ in range(4)] for _ in range(num_pipeline_ranks)]

    def run(rank: int) -> T:
        replica, place = divmod(rank, num_pipeline_ranks)
        transport = pipelines[replica].transport(place)
        if num_replicas > 1:
            transport.all_ranks = world.transport(rank)
            transport.replicas = LocalReplicas(replica, boards[place], num_replicas)
        return work(rank, transport)

    def stop() -> None:
        for hub in (world, *pipelines):
            hub.has_failed.set()
            hub.meeting.abort()
        for board in chain(*boards):
            board.meeting.abort()

    return run_threads(num_replicas * num_pipeline_ranks, run, stop)


def together(work: Callable[[int, Rendezvous], T], num_ranks: int = 3) -> list[T | BaseException]:
    """Everybody's result, or error."""
    store, results = HashStore(), dict[int, T | BaseException]()
    store.set_timeout(timedelta(seconds=60))

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, Rendezvous(store, rank=rank, num_ranks=num_ranks))
        except MobiusError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(num_ranks)]
