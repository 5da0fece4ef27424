"""What replicas make of values that all of them know, over real process groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mobius.distributed import replicas as messages
from mobius.distributed.replicas import create_replica_group
from mobius.distributed.shards import Shards
from mobius.distributed.world import World
from mobius.models.layout import StageLayout
from mobius.ranks import Ranks

LAYOUT = StageLayout.of({"tied": (50, 32), "matrix": (33, 7), "frozen": (9, 9), "norm": (37,)}, frozen={"frozen"})
TIED = ("tied",)
DTYPES = (torch.float32, torch.bfloat16)


def values_of(replica: int) -> torch.Tensor:
    """Gradients of a replica: of all sizes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(replica)
    sizes = 10.0 ** torch.randint(-4, 4, (LAYOUT.num_trained,), generator=generator)
    return torch.randn(LAYOUT.num_trained, generator=generator) * sizes


def shares_of(replica: int, num_replicas: int) -> Shards:
    """Shares of one of the replicas, unequal ones."""
    own: Any = SimpleNamespace(index=replica, num_replicas=num_replicas)
    return Shards.of(LAYOUT, own, tied=TIED)


def use_all(output: str, device: str = "cpu") -> None:
    """Use each connection once, and leave what came of it as `output`.RANK."""
    messages.HOST_CHUNK_ELEMENTS = messages.REDUCE_CHUNK_ELEMENTS = 100  # shares take several
    ranks = Ranks.from_environment()
    rank, number = ranks.rank, ranks.num_ranks
    place = torch.device(device, ranks.local_rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    world, shards = World(rank=rank, num_ranks=number, device=place), shares_of(rank, number)
    found: dict[str, torch.Tensor | None] = {}
    for dtype in DTYPES:
        replicas = create_replica_group(world, index=rank, num_replicas=number, device=place, reduce_dtype=dtype)
        summed = values_of(rank).to(place)
        replicas.reduce_scatter(summed, shards.segments)
        found[f"reduced in {dtype}"] = summed
        found[f"total in {dtype}"] = replicas.sum_over_replicas(torch.tensor(0.1 + rank, device=place))
    for name, give in (("spread", replicas.all_gather), ("gathered", replicas.all_gather_for_load)):
        values = values_of(rank).bfloat16().to(place)
        give(values, shards.segments)
        found[name] = values
    found["spread on hosts"] = values_of(rank).bfloat16()
    replicas.all_gather_on_host(found["spread on hosts"], shards.segments)
    own = torch.cat([values_of(rank)[part] for part in shards.own])
    found["collected"] = replicas.gather_to_first(own, shards)
    torch.save({key: None if value is None else value.cpu() for key, value in found.items()}, Path(f"{output}.{rank}"))
    world.barrier()
    world.close()
