"""The arithmetic of CPU shares: which CPUs a rank keeps to, near its GPU; it neither reads the machine nor binds.

node 0: CPUs 0-15,64-79   GPU 0, GPU 1   ->   rank 0: 0-7,64-71    rank 1: 8-15,72-79
node 1: CPUs 16-31,80-95  GPU 2          ->   rank 2: 16-31,80-95
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

MAX_CPUS = 2**16
"""More CPUs than any kernel knows: a larger number in a list is an error, not a CPU."""


@dataclass(frozen=True)
class GpuPlace:
    """Where a GPU is attached."""

    address: str
    """PCI address as the kernel writes it, `0000:17:00.0`."""
    node: int
    """NUMA node, from 0."""
    cpus: frozenset[int]
    """All CPUs of that node, whether this process may use them or not."""


def parse_cpu_list(text: str) -> frozenset[int]:
    """The CPUs of a list as the kernel writes it, such as `0-15,64-79`; an empty text is no CPU.

    Raises ValueError if it is anything else.
    """
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        if not re.fullmatch(r"[0-9]+(-[0-9]+)?", part):
            raise ValueError(f"{text.strip()!r} is no list of CPUs")
        first, _, last = part.partition("-")
        start, end = int(first), int(last or first)
        if not start <= end < MAX_CPUS:
            raise ValueError(f"{text.strip()!r} is no list of CPUs")
        cpus.update(range(start, end + 1))
    return frozenset(cpus)


def pci_address(domain: int, bus: int, device: int) -> str:
    """The kernel's name of a GPU on the PCI bus; a GPU's function is always 0."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def share_cpus(
    cpus: Collection[int], siblings: Mapping[int, frozenset[int]], *, num_shares: int, index: int
) -> frozenset[int]:
    """Share `index` of `num_shares` of `cpus`: whole cores with neighbouring numbers; the shares are disjoint.

    `siblings` has the CPUs of each one's core, itself included; a CPU that it lacks is a core of its own. A share is
    empty if there are fewer cores than shares.
    """
    cores: dict[int, set[int]] = {}
    for cpu in cpus:
        cores.setdefault(min(siblings.get(cpu, {cpu})), set()).add(cpu)
    names = sorted(cores)
    taken = names[len(names) * index // num_shares : len(names) * (index + 1) // num_shares]
    return frozenset(cpu for name in taken for cpu in cores[name])


def cut_shares(
    places: Sequence[GpuPlace], siblings: Mapping[int, frozenset[int]], *, allowed: frozenset[int]
) -> list[frozenset[int]]:
    """The CPUs of every rank, disjoint: its part of those of its GPU's node that are `allowed`; `places` go by rank.

    All ranks are bound or none, so that nobody computes on another's CPUs. Raises ValueError with the reason if binding
    would leave some rank less than half of an even share: that costs more than memory of another node.
    """
    shares = []
    for rank, place in enumerate(places):
        ranks_on_node = [other for other, its in enumerate(places) if its.node == place.node]
        share = share_cpus(
            place.cpus & allowed, siblings, num_shares=len(ranks_on_node), index=ranks_on_node.index(rank)
        )
        if not share or 2 * len(share) * len(places) < len(allowed):
            raise ValueError(
                f"GPU {place.address} is on NUMA node {place.node}, which has {len(place.cpus & allowed)} of the "
                f"{len(allowed)} CPUs for {len(ranks_on_node)} of the {len(places)} ranks"
            )
        shares.append(share)
    if sum(len(share) for share in shares) > len(frozenset().union(*shares)):
        raise ValueError("the NUMA nodes of the GPUs share CPUs")
    return shares
