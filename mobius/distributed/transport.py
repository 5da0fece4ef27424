"""Interface of communication between ranks: activations along directed ring edges, scalars across all ranks.

Messages of an edge (source rank, target rank, direction) are FIFO. So activations and activation gradients never wait
for each other, in any order of sends and receives. A message from a rank to itself is not copied.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mobius.distributed.replicas import ReplicaGroup
from mobius.distributed.world import World
from mobius.schedule.action import Direction


class RankGroup(Protocol):
    """Ranks that reduce numbers together; they make the same calls in the same order."""

    rank: int
    num_ranks: int

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum a small CPU tensor (float64) across all ranks; blocks."""

    def barrier(self) -> None:
        """Wait for all ranks."""


def all_gather_numbers(ranks: RankGroup, own: Sequence[float]) -> Tensor:
    """Return a row of numbers from every rank, [num_ranks, len(own)] in float64; collective."""
    table = torch.zeros(ranks.num_ranks, len(own), dtype=torch.float64)
    table[ranks.rank] = torch.tensor(own, dtype=torch.float64)
    return ranks.sum_over_ranks(table)


def all_have_same(text: str, all_ranks: RankGroup) -> bool:
    """Return whether all ranks pass the same text; collective."""
    digest = hashlib.sha256(text.encode()).digest()[:6]  # a float64 holds this many bytes exactly
    found = all_gather_numbers(all_ranks, [int.from_bytes(digest)])
    return bool((found == found[0]).all())


class MessageFormat(NamedTuple):
    """Format of every message in a pipeline; a message is an activation or an activation gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ActivationTransport(Protocol):
    """Sends and receives one rank's activations and activation gradients."""

    rank: int
    """Position in the pipeline."""

    def post_receive(self, source: int, direction: Direction) -> None:
        """Start receiving the next message of edge (source, this rank, direction); returns at once."""

    def receive(self, source: int, direction: Direction) -> Tensor:
        """Return the oldest posted message of the edge, which the caller then owns; the compute stream waits for it."""

    def send(self, tensor: Tensor, target: int, direction: Direction, *, is_kept: bool = False) -> None:
        """Start sending; returns at once. The tensor must not be changed afterwards.

        With `is_kept`, the caller keeps the tensor until the end of the step, so the limit of sent tensors ignores it.
        """

    def finish_step(self) -> None:
        """Release sent tensors; every message of the step must have been received."""


class Transport(ActivationTransport, RankGroup, Protocol):
    """Connects one rank to its pipeline and, through `all_ranks` and `replicas`, to other replicas."""

    all_ranks: RankGroup
    """All processes of the run, by global rank; with one pipeline, the pipeline's ranks."""
    replicas: ReplicaGroup | None
    """Ranks of this pipeline position in all replicas; None without replicas."""

    def limit_pending_sends(self, max_pending_sends: int) -> None:
        """From the next send on, hold at most this number of sent tensors, unless there is no limit."""

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """Send `tensor` to `peer` and return the peer's tensor of the same shape.

        Blocks, or makes the compute stream wait.
        """

    def close(self) -> None:
        """End the connections after a successful run."""


class Edge(NamedTuple):
    """Directed edge between neighbouring ranks, with a separate queue of messages."""

    source: int
    target: int
    direction: Direction


def ring_edges(num_ranks: int) -> list[Edge]:
    """Return every edge between neighbouring ranks, in the order in which all ranks create and warm up the edges.

    Each rank has two incoming and two outgoing edges; a single rank has no edges.
    """
    if num_ranks == 1:
        return []
    hops = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
    forward = [Edge(lower, upper, Direction.FORWARD) for lower, upper in hops]
    return forward + [Edge(upper, lower, Direction.BACKWARD) for lower, upper in hops]


def edges_of(num_ranks: int, *, spreads_head: bool) -> list[Edge]:
    """Return the `ring_edges` and, with `spreads_head`, edges between the last rank and each other rank.

    The last rank owns norm and head.
    """
    owner = num_ranks - 1
    pairs = [pair for rank in range(owner) for pair in ((owner, rank), (rank, owner))]
    return ring_edges(num_ranks) + [Edge(*pair, Direction.HEAD) for pair in pairs if spreads_head]


class SingleRankTransport:
    """Transport of a pipeline with one rank, which sends messages only to other replicas."""

    rank = 0
    num_ranks = 1

    def __init__(self, world: World | None = None, replicas: ReplicaGroup | None = None) -> None:
        """`world` connects all replicas, if there are several; `close` ends it."""
        self._sent: defaultdict[Direction, deque[Tensor]] = defaultdict(deque)
        self._world, self.replicas = world, replicas
        self.all_ranks: RankGroup = world or self

    def post_receive(self, source: int, direction: Direction) -> None:
        """Do nothing: the sender is this rank."""

    def receive(self, source: int, direction: Direction) -> Tensor:
        return self._sent[direction].popleft()

    def send(self, tensor: Tensor, target: int, direction: Direction, *, is_kept: bool = False) -> None:
        self._sent[direction].append(tensor)

    def finish_step(self) -> None:
        """Do nothing: no message is in flight."""

    def limit_pending_sends(self, max_pending_sends: int) -> None:
        """Do nothing: sent tensors wait for this rank, which receives them."""

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        return values

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        raise AssertionError("a single rank has no peer")

    def barrier(self) -> None:
        """Do nothing: there is no other rank."""

    def close(self) -> None:
        """End the connections to other replicas."""
        if self._world is not None:
            self._world.close()


class WarmupTransport:
    """Transport for a rehearsal: one step of a rank without its neighbours, before the first real step.

    It uses as much memory as the real transport, but every received message is zeros, and no message leaves the rank. A
    posted receive occupies the GPU until its message arrives. Until then, work that waits for an idle device may hang:
    loading a kernel at its first use, or growing the memory pool. The rehearsal does both. A step that does not fit
    into memory fails in the rehearsal, while every rank can still report it.
    """

    def __init__(
        self, *, rank: int, device: torch.device, message_format: MessageFormat, max_pending_sends: int
    ) -> None:
        """`max_pending_sends` is the maximum number of sent tensors that the real transport holds."""
        self.rank, self._device, self._format = rank, device, message_format
        self._posted: defaultdict[tuple[int, Direction], deque[Tensor]] = defaultdict(deque)
        self._sent: deque[Tensor] = deque(maxlen=max_pending_sends)

    def post_receive(self, source: int, direction: Direction) -> None:
        shape, dtype = self._format
        self._posted[source, direction].append(torch.zeros(shape, dtype=dtype, device=self._device))

    def receive(self, source: int, direction: Direction) -> Tensor:
        return self._posted[source, direction].popleft()

    def send(self, tensor: Tensor, target: int, direction: Direction, *, is_kept: bool = False) -> None:
        """Hold the tensor until `max_pending_sends` later tensors are sent, as the real transport may hold it."""
        if not is_kept:
            self._sent.append(tensor)

    def finish_step(self) -> None:
        self._sent.clear()
