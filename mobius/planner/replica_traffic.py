"""Traffic between replicas in a step: its rates, and when it overlaps computation.

    compute       last backward of s  | backward of the next stage ..        | next step: forward of s
    reduce                            | sums of s to their owners
    host or GPU                                                   | update of the own share
    load                                                                     | own share, gather others' | s computes

The two sums of a rank take turns: a stage's backward begins when the stage before the last one is reduced.
"""

from __future__ import annotations

from dataclasses import dataclass

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
