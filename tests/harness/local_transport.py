"""A transport between rank-threads of one process: queues in place of communicators, for tests of whole pipelines."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from mobius.distributed.shards import ReplicaGroup
from mobius.distributed.transport import RankGroup, ring_edges
from mobius.errors import TransportError

TIMEOUT_SECONDS = 600.0

T = TypeVar("T")


class LocalHub:
    """What the rank-threads of one process share."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        edges = [*ring_edges(num_ranks), *((rank, rank) for rank in range(num_ranks))]
        self.edges: dict[tuple[int, int], queue.Queue[Tensor]] = {edge: queue.Queue() for edge in edges}
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

    def post_receive(self, source: int) -> None:
        """Nothing to announce: queues take messages at any time."""

    def receive(self, source: int) -> Tensor:
        return self._take(self._hub.edges[source, self.rank])

    def send(self, tensor: Tensor, target: int) -> None:
        self._hub.edges[self.rank, target].put(tensor)

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
