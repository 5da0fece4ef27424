"""Measures how fast ranks of one place give each other weights over the link between replicas. Collective.

What travels is a part of a stage, by the code and the connections of a run: NCCL between GPUs, over whatever is between
them. Sums of gradients travel the same way in a run, and are added up faster than they come.
"""

from __future__ import annotations

import torch

from mobius.distributed.shards import cut
from mobius.planner.replica_traffic import ReplicaRates
from mobius.planner.timer import CollectiveTimer

LINK_ELEMENTS = 2**25
"""bf16 weights of all replicas together: 64 MiB of each GPU's memory for a moment."""
LINK_SECONDS = 0.5
"""Over sockets 16 rates measured in so long a time each lay within 19 % of the lowest, measured in 0.15 s within 34 %,
and in 1 s no nearer (two processes on one H200, 2026-11-23)."""


def measure_replica_rates(timer: CollectiveTimer, *, is_through_host: bool) -> ReplicaRates:
    """Time gathers of all places of the pipelines at once, and of one after the other.

    `is_through_host` is how the link is known to be. The transport has replicas.
    """
    transport = timer.transport
    replicas = transport.replicas
    assert replicas is not None, "there is a link between replicas"
    segment = cut(0, LINK_ELEMENTS, replicas.num_replicas)
    weights = torch.zeros(LINK_ELEMENTS, dtype=torch.bfloat16, device=timer.device)
    sent = (replicas.num_replicas - 1) * segment[0].stop * weights.element_size()

    def all_gather_for_load() -> None:
        replicas.all_gather_for_load(weights, [segment])

    together = transport.num_ranks * sent / timer.seconds(all_gather_for_load)
    alone = together if transport.num_ranks == 1 else min(together, sent / timer.seconds_alone(all_gather_for_load))
    return ReplicaRates(together, alone, is_through_host)
