"""A machine's GPUs and the links between them, as data.

pci0000:16 ─ 0000:16:01.0 ─ 0000:17:00.0 ┬ 0000:18:00.0 ─ GPU 0     0 and 1: one switch above both, PIX
host bridge   root port      switch      └ 0000:18:01.0 ─ GPU 1
           └ 0000:16:03.0 ─────────────────────────────── GPU 2     0 and 2: one host bridge, PHB
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile


class Ancestor(StrEnum):
    """Nearest component that the paths of two GPUs to the CPU share, named as in `nvidia-smi topo -m`."""

    PIX = "PIX"
    """One PCIe switch (or one board)."""
    PXB = "PXB"
    """Several PCIe bridges, no host bridge."""
    PHB = "PHB"
    """A host bridge: the same root complex, with different root ports."""
    NODE = "NODE"
    """The NUMA node, with different host bridges."""
    SYS = "SYS"
    """Only the link between NUMA nodes."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as CUDA counts it."""

    index: int
    name: str = ""
    address: str | None = None
    """PCI address as the kernel writes it, `0000:17:00.0`."""
    numa_node: int | None = None
    bridges: tuple[str, ...] = ()
    """Path from the CPU: the host bridge (`pci0000:16`), the root port, bridges of switches; without the GPU."""


@dataclass(frozen=True)
class Link:
    """Link between GPU `first` and GPU `second`, `first` < `second`."""

    first: int
    second: int
    ancestor: Ancestor | None = None
    """None: the machine does not report it."""
    num_nvlinks: int = 0
    has_p2p: bool = False
    """Whether each can read and write the other's memory."""


@dataclass(frozen=True)
class Topology:
    """All GPUs of a run, in CUDA's order, and the link of every two of them."""

    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]

    def link(self, one: int, other: int) -> Link:
        """The link between two different GPUs, in whichever order they are given."""
        first, second = sorted((one, other))
        return next(link for link in self.links if (link.first, link.second) == (first, second))

    @property
    def unknown_reason(self) -> str | None:
        """Reason why it is unknown how loads share links; None if it is known."""
        for link in self.links:
            if link.ancestor is None:
                homeless = [index for index in (link.first, link.second) if self.gpus[index].address is None]
                what = f"the PCI address of GPU {homeless[0]}" if homeless else f"the way to GPU {link.first}"
                return f"the machine does not report {what}"
        return None

    def describe(self) -> str:
        """A table like `nvidia-smi topo -m`: NV# is the number of NVLinks, * means no P2P."""
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
        return text if link.has_p2p else f"{text}*"


def common_ancestor(one: Gpu, other: Gpu) -> Ancestor | None:
    """Nearest component that the paths of two GPUs share, by their bridges and nodes; None if a path is unknown.

    A switch is an upstream port with a downstream port for each device, so two devices of one switch have all bridges
    in common except the last. Without reported nodes, one node is assumed.
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
