"""Where a rank computes, and how it finds the other ranks before they are connected."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mobius.config.config import Config
from mobius.distributed.device_order import order_devices
from mobius.distributed.rendezvous import Rendezvous, join_node, join_pipeline
from mobius.hardware.devices import choose_device, has_gpus
from mobius.ranks import Ranks, set_cuda_max_connections


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """This rank's device and meeting points."""

    ranks: Ranks
    device: torch.device
    device_order: tuple[int, ...]
    """The index of the GPU of each of this node's ranks, if there are GPUs."""
    pipeline_rendezvous: Rendezvous | None = None
    """Where a pipeline's ranks with GPUs can meet before they have communicators."""
    node_rendezvous: Rendezvous | None = None
    """Where the node's ranks with GPUs can, those of several pipelines too."""
    replica_rendezvous: Rendezvous | None = None
    """Rendezvous of all replicas. Without torchrun its store is the first rank's process, while that holds it."""

    @property
    def widest_rendezvous(self) -> Rendezvous | None:
        """Where most ranks of the run can meet before they are connected; None for a rank that plans alone."""
        return self.replica_rendezvous or self.pipeline_rendezvous


def join_ranks(config: Config, ranks: Ranks, *, replica_rendezvous: Rendezvous | None = None) -> RankContext:
    """Meet the ranks that share GPUs and choose each one's device; collective if ranks have GPUs.

    `replica_rendezvous` is that of all replicas, if there are several. Raises ConfigError for a device that is not
    there.
    """
    pipeline = config.pipeline
    if pipeline.copy_messages or ranks.num_replicas > 1:
        set_cuda_max_connections()
    rendezvous, node = _join_others(ranks) if has_gpus(pipeline.device, ranks) else (None, None)
    device_order = tuple(range(ranks.num_local))
    # Each of several pipelines has the GPUs as listed.
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
    """Rendezvous of this rank's pipeline and of its node; None for one that is alone."""
    pipeline = join_pipeline(ranks) if ranks.num_pipeline_ranks > 1 else None
    return pipeline, pipeline if ranks.num_pipeline_ranks == ranks.num_local else join_node(ranks)
