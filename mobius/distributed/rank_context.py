"""Chooses a rank's device, and finds the other ranks before they are connected."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mobius.config.config import Config
from mobius.distributed.device_order import order_devices
from mobius.distributed.rendezvous import Rendezvous, join_node, join_pipeline
from mobius.hardware.devices import choose_device, has_gpus
from mobius.process.ranks import Ranks, set_cuda_max_connections


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """This rank's device, and its rendezvous with other ranks."""

    ranks: Ranks
    device: torch.device
    device_order: tuple[int, ...]
    """Index of each rank's GPU, for the ranks of this node, if there are GPUs."""
    pipeline_rendezvous: Rendezvous | None = None
    """Rendezvous of the pipeline's ranks, used before they have communicators; None without GPUs."""
    node_rendezvous: Rendezvous | None = None
    """Rendezvous of this node's ranks, which may belong to several pipelines; None without GPUs."""
    replica_rendezvous: Rendezvous | None = None
    """Rendezvous of all replicas. Without torchrun, the first rank's process serves the store while this exists."""

    @property
    def widest_rendezvous(self) -> Rendezvous | None:
        """Rendezvous with the most ranks before they are connected; None for a rank that plans alone."""
        return self.replica_rendezvous or self.pipeline_rendezvous


def join_ranks(config: Config, ranks: Ranks, *, replica_rendezvous: Rendezvous | None = None) -> RankContext:
    """Connect to the ranks of this pipeline and node, and choose this rank's device; collective if ranks have GPUs.

    `replica_rendezvous` joins all replicas, if there are several. Raises ConfigError for a device that does not exist.
    """
    pipeline = config.pipeline
    if pipeline.copy_messages or ranks.num_replicas > 1:
        set_cuda_max_connections()
    rendezvous, node = _join_others(ranks) if has_gpus(pipeline.device, ranks) else (None, None)
    device_order = tuple(range(ranks.num_local))
    # If a node has several pipelines, its GPUs stay in the listed order.
    if rendezvous is not None and ranks.num_pipeline_ranks == ranks.num_local:
        device_order = order_devices(config, ranks.num_pipeline_ranks, rendezvous)
    return RankContext(
        ranks=ranks,
        device=choose_device(pipeline.device, ranks, device_order),
        device_order=device_order,
        pipeline_rendezvous=rendezvous,
        node_rendezvous=node,
        replica_rendezvous=replica_rendezvous,
    )


def _join_others(ranks: Ranks) -> tuple[Rendezvous | None, Rendezvous | None]:
    """Rendezvous of this rank's pipeline and of its node; None if the rank is alone in it."""
    pipeline = join_pipeline(ranks) if ranks.num_pipeline_ranks > 1 else None
    return pipeline, pipeline if ranks.num_pipeline_ranks == ranks.num_local else join_node(ranks)
