"""Owns which numbers go together when several pipelines share each step's batch."""

import re
from collections.abc import Iterator
from typing import Final

from mobius.config.config import Config
from mobius.excerpt import quoted

_ENDPOINT: Final = re.compile(r"[^\s:]+:\d{1,5}|\[[0-9a-fA-F:.]+\]:\d{1,5}")


def find_replica_conflicts(config: Config, num_replicas: int) -> Iterator[tuple[str, str]]:
    """Names of options that do not go together, and a line that says so."""
    launch = config.launch
    if launch.node_rank is not None and launch.node_rank >= launch.nnodes:
        told = f"nodes are numbered from 0, and there are {launch.nnodes} (`--nnodes`); use one below that"
        yield "node_rank nnodes", f"`--node_rank` {launch.node_rank}: {told}"
    if launch.nnodes > 1 and not config.planning.dry_run:
        missing = [name for name in ("node_rank", "rdzv_endpoint") if getattr(launch, name) is None]
        for name in missing:
            yield f"nnodes {name}", f"`--nnodes` {launch.nnodes} needs `--{name}` on each node; add it (--help)"
    if launch.rdzv_endpoint is not None and not _ENDPOINT.fullmatch(launch.rdzv_endpoint):
        told = "is not HOST:PORT, such as node0:29502"
        yield "rdzv_endpoint", f"`--rdzv_endpoint` {quoted(launch.rdzv_endpoint)} {told}"
    pipeline, is_planned = config.pipeline, config.planning.plan is not None
    batch, chunks = pipeline.batch_size, pipeline.num_chunks or 1
    parts = num_replicas * chunks
    if num_replicas > 1 and not is_planned and batch % parts:
        each = f" of {chunks} microbatches each (--num_chunks)" if chunks > 1 else ""
        nearest = " or ".join(str(number) for number in (batch // parts * parts, -(-batch // parts) * parts) if number)
        yield (
            "batch_size num_chunks pipeline_ranks plan",
            f"`--batch_size` {batch} cannot be shared by {num_replicas} replicas{each}: it must be a multiple of "
            f"{parts}; use --batch_size {nearest}, or another number of nodes or microbatches",
        )
