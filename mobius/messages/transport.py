"""The interface by which ranks talk: activations along directed edges of the ring, scalars over all ranks.

Messages are FIFO per directed edge (source rank, target rank). A message from a rank to itself is handed over, not
copied.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mobius.memory.shards import ReplicaGroup
from mobius.messages.world import World


class RankGroup(Protocol):
    """Ranks that tell each other numbers; all of them make the same calls in the same order."""

    rank: int
    num_ranks: int

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum a small CPU tensor (float64) over all ranks; blocks."""

    def barrier(self) -> None:
        """Wait for all ranks."""


_DIGEST_BITS = 20
"""Bits of a text's digest that ranks compare: sums of so small numbers' squares are exact."""


def all_have_same(text: str, all_ranks: RankGroup) -> bool:
    """Whether all ranks call it with the same text; collective."""
    own = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 2**_DIGEST_BITS
    # All are equal if and only if their variance is 0.
    sums = all_ranks.sum_over_ranks(torch.tensor([own, own * own], dtype=torch.float64)).tolist()
    return all_ranks.num_ranks * int(sums[1]) == int(sums[0]) ** 2


class ActivationTransport(Protocol):
    """One rank's activations and activation gradients, sent and received."""

    rank: int
    """Place in the pipeline."""

    def post_receive(self, source: int) -> None:
        """Announce that the next message of edge (source, this rank) will be wanted; returns at once."""

    def receive(self, source: int) -> Tensor:
        """The oldest announced message of the edge; the compute stream waits for it. The caller owns the tensor."""

    def send(self, tensor: Tensor, target: int) -> None:
        """Start sending; returns at once. The tensor must not be changed afterwards."""

    def finish_step(self) -> None:
        """Let go of sent tensors; every message of the step must have been received."""


class Transport(ActivationTransport, RankGroup, Protocol):
    """One rank's connection to the others of its pipeline, and through it to those of other replicas."""

    all_ranks: RankGroup
    """All processes of the run, by torchrun's numbers; where there is one pipeline, its own ranks."""
    replicas: ReplicaGroup | None
    """This rank's counterparts in the other replicas; None where there are none."""

    def limit_pending_sends(self, max_pending_sends: int) -> None:
        """Keep at most so many messages that may not have left, from the next one on, where their number is bounded."""

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """Give `tensor` to `peer` and return the one it gives, of the same shape.

        Blocks, or makes the compute stream wait.
        """

    def close(self) -> None:
        """End the connections, on the way out of a run that went well."""


def ring_edges(num_ranks: int) -> list[tuple[int, int]]:
    """Every directed edge between neighbouring ranks, in the one order in which all ranks create and warm them."""
    forward = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
    backward = [(target, source) for source, target in forward]
    return [edge for edge in dict.fromkeys(forward + backward) if edge[0] != edge[1]]


class SingleRankTransport:
    """The transport of a pipeline with one rank: nothing leaves it but what goes to other replicas."""

    rank = 0
    num_ranks = 1

    def __init__(self, world: World | None = None, replicas: ReplicaGroup | None = None) -> None:
        """`world` is that of all replicas, if there are several; `close` ends it."""
        self._sent: deque[Tensor] = deque()
        self._world, self.replicas = world, replicas
        self.all_ranks: RankGroup = world or self

    def post_receive(self, source: int) -> None:
        """Nothing to announce: the sender is this rank."""

    def receive(self, source: int) -> Tensor:
        return self._sent.popleft()

    def send(self, tensor: Tensor, target: int) -> None:
        self._sent.append(tensor)

    def finish_step(self) -> None:
        """Nothing is under way."""

    def limit_pending_sends(self, max_pending_sends: int) -> None:
        """Nothing is bounded: what is sent waits for this rank itself."""

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        return values

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        raise AssertionError("a single rank has no peer")

    def barrier(self) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """End the connections to other replicas."""
        if self._world is not None:
            self._world.close()


def all_gather_numbers(ranks: RankGroup, own: Sequence[float]) -> Tensor:
    """A row of numbers from every rank, [num_ranks, len(own)] in float64; collective."""
    table = torch.zeros(ranks.num_ranks, len(own), dtype=torch.float64)
    table[ranks.rank] = torch.tensor(own, dtype=torch.float64)
    return ranks.sum_over_ranks(table)
