"""What replicas make of values that all of them know, over real process groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mobius.memory.layout import StageLayout
from mobius.memory.shares import Shares
from mobius.messages import replicas as messages
from mobius.messages.replicas import meet_replicas
from mobius.messages.world import World
from mobius.ranks import Ranks

LAYOUT = StageLayout.of({"tied": (50, 32), "matrix": (33, 7), "frozen": (9, 9), "norm": (37,)}, frozen={"frozen"})
TIED = ("tied",)
DTYPES = (torch.float32, torch.bfloat16)


def values_of(replica: int) -> torch.Tensor:
    """Gradients of a replica: of all sizes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(replica)
    sizes = 10.0 ** torch.randint(-4, 4, (LAYOUT.num_trained,), generator=generator)
    return torch.randn(LAYOUT.num_trained, generator=generator) * sizes


def shares_of(replica: int, num_replicas: int) -> Shares:
    """Shares of one of the replicas, unequal ones."""
    own: Any = SimpleNamespace(index=replica, num_replicas=num_replicas)
    return Shares.of(LAYOUT, own, tied=TIED)


def use_all(output: str, device: str = "cpu") -> None:
    """Use each connection once, and leave what came of it as `output`.RANK."""
    messages.HOST_CHUNK_ELEMENTS = messages.RECEIVED_ELEMENTS = 100  # shares take several
    ranks = Ranks.from_environment()
    rank, number = ranks.rank, ranks.num_ranks
    place = torch.device(device, ranks.local_rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    world, shares = World(rank=rank, num_ranks=number, device=place), shares_of(rank, number)
    found: dict[str, torch.Tensor | None] = {}
    for dtype in DTYPES:
        replicas = meet_replicas(world, index=rank, num_replicas=number, device=place, reduce_dtype=dtype)
        summed = values_of(rank).to(place)
        replicas.reduce(summed, shares.segments)
        found[f"reduced in {dtype}"] = summed
        found[f"total in {dtype}"] = replicas.total(torch.tensor(0.1 + rank, device=place))
    for name, give in (("spread", replicas.spread), ("gathered", replicas.gather)):
        values = values_of(rank).bfloat16().to(place)
        give(values, shares.segments)
        found[name] = values
    found["spread on hosts"] = values_of(rank).bfloat16()
    replicas.spread_on_host(found["spread on hosts"], shares.segments)
    own = torch.cat([values_of(rank)[part] for part in shares.own])
    found["collected"] = replicas.collect(own, shares)
    torch.save({key: None if value is None else value.cpu() for key, value in found.items()}, Path(f"{output}.{rank}"))
    world.barrier()
    world.close()
