"""A machine's GPUs and the ways between them, as data that can be recorded and read back.

pci0000:16 ─ 0000:16:01.0 ─ 0000:17:00.0 ┬ 0000:18:00.0 ─ GPU 0     0 and 1: one switch above both, PIX
host bridge   root port      switch      └ 0000:18:01.0 ─ GPU 1
           └ 0000:16:03.0 ─────────────────────────────── GPU 2     0 and 2: one host bridge, PHB
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import combinations, takewhile


class Ancestor(StrEnum):
    """The nearest thing that the ways of two GPUs to the CPU have in common, named as `nvidia-smi topo -m` does."""

    PIX = "PIX"
    """One PCIe switch (or one board)."""
    PXB = "PXB"
    """Several PCIe bridges, no host bridge."""
    PHB = "PHB"
    """A host bridge: the same root complex, behind different root ports."""
    NODE = "NODE"
    """The NUMA node, behind different host bridges."""
    SYS = "SYS"
    """Only the link between NUMA nodes."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as CUDA counts it."""

    index: int
    name: str = ""
    uuid: str | None = None
    address: str | None = None
    """PCI address as the kernel writes it, `0000:17:00.0`."""
    numa_node: int | None = None
    bridges: tuple[str, ...] = ()
    """The way from the CPU: the host bridge (`pci0000:16`), the root port, bridges of switches; without the GPU."""


@dataclass(frozen=True)
class Link:
    """The way between GPU `first` and GPU `second`, `first` < `second`."""

    first: int
    second: int
    ancestor: Ancestor | None = None
    """None: the machine does not tell."""
    num_nvlinks: int = 0
    has_p2p: bool = False
    """Whether each can read and write the other's memory."""
    slowdown: float | None = None
    """Time of a load from host memory beside one of the other GPU, over its time alone; None: not measured."""


@dataclass(frozen=True)
class Topology:
    """All GPUs of a run, in CUDA's order, and the link of every two of them."""

    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    description: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError unless GPUs are numbered from 0 and every pair has one link."""
        if [gpu.index for gpu in self.gpus] != list(range(len(self.gpus))):
            raise ValueError("the GPUs of a topology are not numbered 0, 1, 2, ...")
        pairs = sorted((link.first, link.second) for link in self.links)
        if pairs != list(combinations(range(len(self.gpus)), 2)):
            raise ValueError(f"a topology of {len(self.gpus)} GPUs does not have one link for each two of them")
        if any(link.slowdown is not None and not 0 < link.slowdown < math.inf for link in self.links):
            raise ValueError("a slowdown of a topology is not a finite number above 0")

    def link(self, one: int, other: int) -> Link:
        """The link between two different GPUs, in whichever order they are given."""
        first, second = sorted((one, other))
        return next(link for link in self.links if (link.first, link.second) == (first, second))

    @property
    def is_measured(self) -> bool:
        return bool(self.links) and all(link.slowdown is not None for link in self.links)

    @property
    def unknown_reason(self) -> str | None:
        """Why nothing can be said of how loads share links; None if something can."""
        if self.is_measured:
            return None
        for link in self.links:
            if link.ancestor is None:
                homeless = [index for index in (link.first, link.second) if self.gpus[index].address is None]
                what = f"the PCI address of GPU {homeless[0]}" if homeless else f"the way to GPU {link.first}"
                return f"the machine does not tell {what}"
        return None

    def with_slowdowns(self, slowdowns: Mapping[tuple[int, int], float]) -> Topology:
        """The topology with a measured slowdown for every pair (first, second), first < second."""
        links = tuple(replace(link, slowdown=slowdowns[link.first, link.second]) for link in self.links)
        return replace(self, links=links)

    def to_json(self) -> str:
        """One line per GPU and per link, so that a recorded machine can be read and compared by eye."""
        gpus, links = (
            ",\n".join(f"  {json.dumps(asdict(part))}" for part in parts) for parts in (self.gpus, self.links)
        )
        return (
            f'{{\n"description": {json.dumps(self.description)},\n"gpus": [\n{gpus}\n],\n"links": [\n{links}\n]\n}}\n'
        )

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Read what `to_json` wrote; fields with defaults may be left out. Raises ValueError if it is anything else."""
        try:
            record = json.loads(text)
            gpus = [Gpu(**{**entry, "bridges": tuple(entry.get("bridges", ()))}) for entry in record["gpus"]]
            links = [
                Link(
                    **{**entry, "ancestor": Ancestor(entry["ancestor"]) if entry.get("ancestor") is not None else None}
                )
                for entry in record["links"]
            ]
            return cls(tuple(gpus), tuple(links), str(record.get("description", "")))
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"this is no recorded topology: {error}") from error

    def describe(self) -> str:
        """A table like `nvidia-smi topo -m`: NV# is the number of NVLinks, * means no P2P, x1.8 a measured slowdown."""
        width = max((len(self._cell(link)) for link in self.links), default=1) + 2
        lines = ["      " + "".join(f"{f'GPU{gpu.index}':<{width}}" for gpu in self.gpus) + "node  PCI address"]
        for gpu in self.gpus:
            cells = ["X" if other is gpu else self._cell(self.link(gpu.index, other.index)) for other in self.gpus]
            node = "?" if gpu.numa_node is None else str(gpu.numa_node)
            row = "".join(f"{cell:<{width}}" for cell in cells)
            lines.append(f"{f'GPU{gpu.index}':<6}{row}{node:<6}{gpu.address or '?'}  {gpu.name}".rstrip())
        return "\n".join(lines)

    @staticmethod
    def _cell(link: Link) -> str:
        way = link.ancestor.value if link.ancestor is not None else "?"
        text = f"NV{link.num_nvlinks}/{way}" if link.num_nvlinks else way
        text += "" if link.has_p2p else "*"
        return text if link.slowdown is None else f"{text} x{link.slowdown:.1f}"


def common_ancestor(one: Gpu, other: Gpu) -> Ancestor | None:
    """The nearest thing that the ways of two GPUs share, by their bridges and nodes; None if a way is not known.

    A switch is an upstream port with a downstream port for each device, so two devices of one switch have all bridges
    in common but the last. Where no nodes are told there is taken to be only one.
    """
    if not one.bridges or not other.bridges:
        return None
    pairs = zip(one.bridges, other.bridges, strict=False)
    num_common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if num_common == 0:
        return Ancestor.NODE if one.numa_node == other.numa_node else Ancestor.SYS
    if num_common == 1:
        return Ancestor.PHB
    is_one_switch = max(len(one.bridges), len(other.bridges)) - num_common <= 1
    return Ancestor.PIX if is_one_switch else Ancestor.PXB
