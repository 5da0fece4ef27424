"""Owns what a launch can be told: how many processes there are, where they meet, and which make a pipeline."""

from dataclasses import dataclass
from typing import Annotated

from mobius.config.bounds import Bounds, Port, RankCount


@dataclass(frozen=True)
class LaunchConfig:
    """Launch (read by train.sh, pipeline_ranks by main.py; under torchrun use its own options and the environment)"""

    cuda_visible_devices: str | None = None
    """GPUs in the order of the ranks, such as 0,2,1,3; of an ascending list, cross_mapping chooses the order. Ignored
    without GPUs. Default: all."""
    master_port: Port = 29502
    """TCP port where the ranks of the run meet; two runs on a machine need two ports."""
    nproc_per_node: RankCount | None = None
    """Ranks (processes, one per GPU). Default: one for each listed GPU, or for all; 2 without GPUs."""
    nnodes: Annotated[int, Bounds(minimum=1, ceiling=1025)] = 1
    """Nodes (machines), on each of which train.sh is started with the same options but for node_rank."""
    node_rank: Annotated[int, Bounds(minimum=0)] | None = None
    """Number of this node, from 0; node 0 speaks for the run and writes its files. Needed with several nodes."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of node 0, where all processes meet; it must be reachable from the other nodes. Needed with several."""
    pipeline_ranks: RankCount | None = None
    """Ranks of a pipeline; a node's processes make as many pipelines as they are a multiple of it. All pipelines train
    one model: they share each step's batch and the optimizer's work. Default: all of a node."""
    max_restarts: Annotated[int, Bounds(minimum=0)] = 0
    """How often all ranks start again, from the newest checkpoint, after one of them has died."""
