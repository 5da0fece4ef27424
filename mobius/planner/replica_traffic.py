"""Traffic between replicas in a step: its rates, and when it overlaps computation.

    compute       last backward of s  | backward of the next stage ..        | next step: forward of s
    reduce                            | sums of s to their owners
    host or GPU                                                   | update of the own share
    load                                                                     | own share, gather others' | s computes

The two sums of a rank take turns: a stage's backward begins when the stage before the last one is reduced.
"""

from __future__ import annotations

from mobius.planner.profile import ReplicaRates

NODE_LINK = 12.5
"""GB/s of a node's link to the others, in each direction, where nobody has said or measured it: 100 Gbit/s."""
CLEARED_BYTES = 4
"""GPU memory traffic per parameter that is left on compute's own stream after a stage's last backward."""


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
