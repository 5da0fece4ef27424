"""Traffic between replicas in a step: its bytes, its rates, and when it overlaps computation.

    compute       last backward of s  | backward of the next stage ..        | next step: forward of s
    reduce                            | sums of s to their owners
    host or GPU                                                   | update of the own share
    load                                                                     | own share, gather others' | s computes

The two sums of a rank take turns: a stage's backward begins when the stage before the last one is reduced.
"""

from __future__ import annotations

from dataclasses import dataclass

from mobius.limits import REDUCE_CHUNK_ELEMENTS, largest_shard
from mobius.planner.state_bytes import SUM_BYTES

NODE_LINK = 12.5
"""GB/s of a node's link to the others, in each direction, where nobody has said or measured it: 100 Gbit/s."""
CLEARED_BYTES = 4
"""GPU memory traffic per parameter that is left on compute's own stream after a stage's last backward."""


@dataclass(frozen=True)
class ReplicaRates:
    """Between the ranks of one place in different replicas, in bytes per second of each direction."""

    together: float
    """All ranks of a pipeline at once."""
    alone: float
    """One rank, the others idle."""
    is_through_host: bool
    """Whether it takes the GPUs' PCIe links and the host's memory, too, as a network does."""

    def times(self, factor: float) -> ReplicaRates:
        """Links that are so many times as fast."""
        return ReplicaRates(factor * self.together, factor * self.alone, self.is_through_host)


def rates_of_nodes(link: float, *, num_replicas: int, num_nodes: int) -> ReplicaRates:
    """Rates over the nodes' links of `link` bytes per second in each direction; every node has as many replicas.

    Each rank gives every other replica its share. With K of R replicas on a node K (R - K) / R of a stage's bytes leave
    the node, where a rank alone sends (R - 1) / R.
    """
    own = num_replicas // num_nodes
    rate = link * (num_replicas - 1) / (own * (num_replicas - own))
    return ReplicaRates(rate, rate, is_through_host=True)


def link_of_nodes(rates: ReplicaRates, *, num_replicas: int, num_nodes: int) -> float:
    """Bytes per second of a node's link that give these rates to all ranks at once; the inverse of `rates_of_nodes`."""
    own = num_replicas // num_nodes
    return rates.together * own * (num_replicas - own) / (num_replicas - 1)


@dataclass(frozen=True)
class ReplicaSharding:
    """How many replicas share a stage, and bytes per parameter of what they give each other."""

    num_replicas: int = 1
    reduced: int = SUM_BYTES
    """Gradients: 4, or 2 where they travel in bf16."""

    def shard_size(self, parameters: int) -> int:
        """Parameters of a stage that this replica updates."""
        return largest_shard(parameters, self.num_replicas)

    def remote_size(self, parameters: int) -> int:
        """Parameters that the others update: so many gradients go out and come in, and so many weights come in."""
        return parameters - self.shard_size(parameters)

    @property
    def received_bytes(self) -> int:
        """Bytes of GPU memory for gradients on their way; bf16 ones are cast when they go and when they come."""
        parts = 0 if self.num_replicas == 1 else 1 if self.reduced == SUM_BYTES else 2
        return parts * SUM_BYTES * REDUCE_CHUNK_ELEMENTS

    def reduce_bytes(self, parameters: int) -> int:
        """Bytes of a stage's gradients that leave a rank, and as many come."""
        return self.reduced * self.remote_size(parameters)
