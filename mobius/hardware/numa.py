"""Binds each rank to its share of the CPUs of its GPU's NUMA node, as the kernel lists them under /sys.

Every rank sees all GPUs and computes the same shares, without communication. Memory needs no binding: the kernel
allocates a page on the node of the CPU that touches it first.

    node 0: CPUs 0-15,64-79   GPU 0, GPU 1   ->   rank 0: 0-7,64-71    rank 1: 8-15,72-79
    node 1: CPUs 16-31,80-95  GPU 2          ->   rank 2: 16-31,80-95
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mobius.ranks import Ranks

logger = logging.getLogger(__name__)


def bind_to_gpu_node(ranks: Ranks, order: Sequence[int], root: Path = Path("/")) -> frozenset[int] | None:
    """Bind this process to its share of the CPUs of its GPU's node; return these CPUs.

    Returns None and logs why if the machine does not report the node of every rank's GPU, or if shares would be too
    small. A rank that its launcher has bound stays on its CPUs. `order[rank]` is the index of the rank's GPU. Call it
    on the main thread before the stages' memory is allocated; existing threads are bound too. `root` is for tests.
    """
    try:
        places = read_gpu_locations(gpu_addresses(order), root)
        own, common = os.sched_getaffinity(0), _launcher_cpus()
        share = split_cpus_by_rank(places, read_siblings(common, root), allowed=common)[ranks.local_rank]
        if not share <= own:
            logger.debug("rank %d stays on the %d CPUs that its launcher bound it to", ranks.rank, len(own))
            return frozenset(own)
        _bind_threads(share)
    except (OSError, ValueError) as error:
        logger.info("ranks are not bound to NUMA nodes: %s", error)
        return None
    place = places[ranks.local_rank]
    logger.debug("rank %d: GPU %s, NUMA node %d, %d CPUs", ranks.rank, place.address, place.node, len(share))
    return share


@dataclass(frozen=True)
class GpuLocation:
    """PCI address and NUMA node of a GPU."""

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
    for part in text.split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def slice_cpus(
    cpus: Collection[int], siblings: Mapping[int, frozenset[int]], *, num_shares: int, index: int
) -> frozenset[int]:
    """Return share `index` of `num_shares` of `cpus`: complete cores with consecutive numbers; shares are disjoint.

    `siblings` lists the CPUs of each CPU's core, itself included; a CPU that it lacks counts as one core. A share is
    empty if there are fewer cores than shares.
    """
    cores = {cpu: min(siblings.get(cpu, {cpu})) for cpu in cpus}  # named by the first of their CPUs
    names = sorted(set(cores.values()))
    taken = names[len(names) * index // num_shares : len(names) * (index + 1) // num_shares]
    return frozenset(cpu for cpu, core in cores.items() if core in taken)


def split_cpus_by_rank(
    places: Sequence[GpuLocation], siblings: Mapping[int, frozenset[int]], *, allowed: frozenset[int]
) -> list[frozenset[int]]:
    """Return the CPUs of every rank: its share of the `allowed` CPUs of its GPU's node; `places` are in rank order.

    Either all ranks are bound or none, so that no rank computes on another rank's CPUs. Raises ValueError with the
    reason if binding would leave some rank less than half of an even share: that costs more than memory of another
    node.
    """
    shares = []
    for rank, place in enumerate(places):
        ranks_on_node = [other for other, its in enumerate(places) if its.node == place.node]
        cpus = place.cpus & allowed
        share = slice_cpus(cpus, siblings, num_shares=len(ranks_on_node), index=ranks_on_node.index(rank))
        if not share or 2 * len(share) * len(places) < len(allowed):
            raise ValueError(
                f"GPU {place.address} is on NUMA node {place.node}, which has {len(cpus)} of the "
                f"{len(allowed)} CPUs for {len(ranks_on_node)} of the {len(places)} ranks"
            )
        shares.append(share)
    if sum(map(len, shares)) > len(frozenset().union(*shares)):
        raise ValueError("the NUMA nodes of the GPUs share CPUs")
    return shares


def gpu_addresses(indices: Iterable[int]) -> list[str]:
    """PCI addresses of GPUs, as the kernel writes them, by torch's numbers (after CUDA_VISIBLE_DEVICES).

    Raises ValueError if this build of torch does not report them.
    """
    addresses = []
    for index in indices:
        properties: Any = torch.cuda.get_device_properties(index)  # torch's stubs do not have all of them
        try:
            domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        except AttributeError:
            raise ValueError(f"torch {torch.__version__} does not report the PCI address of a GPU") from None
        addresses.append(f"{domain:04x}:{bus:02x}:{device:02x}.0")  # a GPU's function is always 0
    return addresses


def read_gpu_locations(addresses: Sequence[str], root: Path) -> list[GpuLocation]:
    """Read the GPUs' locations from the kernel; raises OSError or ValueError if they are missing or invalid."""
    places = []
    for address in addresses:
        folder = root / "sys/bus/pci/devices" / address
        node = int((folder / "numa_node").read_text())
        if node < 0:
            raise ValueError(f"the machine does not report the node of GPU {address}")
        places.append(GpuLocation(address, node, parse_cpu_list((folder / "local_cpulist").read_text())))
    return places


def num_numa_nodes(root: Path = Path("/")) -> int:
    """Number of NUMA nodes of the machine; 1 if the kernel reports none. `root` is for tests."""
    return max(1, len(list(root.glob("sys/devices/system/node/node[0-9]*"))))


def read_siblings(cpus: Iterable[int], root: Path) -> dict[int, frozenset[int]]:
    """Return the CPUs of the core of each of `cpus`, without CPUs whose entry is missing or invalid."""
    siblings = {}
    for cpu in cpus:
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        with contextlib.suppress(OSError, ValueError):
            siblings[cpu] = parse_cpu_list(file.read_text())
    return {cpu: found for cpu, found in siblings.items() if cpu in found}


def _launcher_cpus() -> frozenset[int]:
    """Return the CPUs that all ranks may use together: the launcher's, if it bound this rank to a part of its own."""
    own = frozenset(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        launcher = frozenset(os.sched_getaffinity(os.getppid()))
        if own < launcher:
            return launcher
    return own


def _bind_threads(cpus: frozenset[int]) -> None:
    """Bind this thread, from which new threads inherit, and all threads with the same affinity; raises OSError."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            if os.sched_getaffinity(int(thread.name)) == before:
                os.sched_setaffinity(int(thread.name), cpus)
