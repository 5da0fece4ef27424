"""Binds a rank to CPUs of its GPU's NUMA node, as the kernel tells them under /sys; the shares are machine/numa.py's.

Every rank sees all GPUs and finds the same shares, so none has to ask another. Memory needs nothing more: the kernel
takes a page from the node of the CPU that touches it first.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from mobius.machine.numa import GpuPlace, cut_shares, parse_cpu_list, pci_address
from mobius.ranks import Ranks

logger = logging.getLogger(__name__)


def bind_to_gpu_node(
    ranks: Ranks, root: Path = Path("/"), *, order: Sequence[int] | None = None
) -> frozenset[int] | None:
    """Keep this process to its share of the CPUs of its GPU's node; returns the CPUs that it is bound to.

    `order[rank]` is the index of the rank's GPU; None: rank r has GPU r.

    Call it on the main thread before the stages' memory is made; threads that exist already are bound too. A rank that
    its launcher has bound otherwise keeps what it has. None, with a line that tells why, if the machine does not tell
    the node of every rank's GPU or the shares would be too small. `root` is for tests.
    """
    try:
        places = read_places(gpu_addresses(range(ranks.num_ranks) if order is None else order), root)
        own, common = os.sched_getaffinity(0), _launcher_cpus()
        share = cut_shares(places, read_siblings(common, root), allowed=common)[ranks.rank]
        if not share <= own:
            logger.info("rank %d keeps the %d CPUs that its launcher bound it to", ranks.rank, len(own))
            return frozenset(own)
        _bind_threads(share)
    except (OSError, ValueError) as error:
        logger.info("ranks are not bound to NUMA nodes: %s", error)
        return None
    place = places[ranks.rank]
    logger.info("rank %d: GPU %s, NUMA node %d, %d CPUs", ranks.rank, place.address, place.node, len(share))
    return share


def gpu_addresses(indices: Iterable[int]) -> list[str]:
    """PCI addresses of GPUs by their numbers as torch counts them, that is after CUDA_VISIBLE_DEVICES.

    Raises ValueError if this build of torch does not tell them.
    """
    addresses = []
    for index in indices:
        properties = torch.cuda.get_device_properties(index)
        # torch's stubs do not have them.
        numbers = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
        known = [number for number in numbers if isinstance(number, int)]
        if len(known) < len(numbers):
            raise ValueError(f"torch {torch.__version__} does not tell the PCI address of a GPU")
        addresses.append(pci_address(*known))
    return addresses


def read_places(addresses: Sequence[str], root: Path) -> list[GpuPlace]:
    """Where the kernel says that GPUs are; raises OSError or ValueError if it does not say, or nothing sensible."""
    places = []
    for address in addresses:
        folder = root / "sys/bus/pci/devices" / address
        node = int((folder / "numa_node").read_text())
        if node < 0:
            raise ValueError(f"the machine does not tell the node of GPU {address}")
        places.append(GpuPlace(address, node, parse_cpu_list((folder / "local_cpulist").read_text())))
    return places


def num_nodes(root: Path = Path("/")) -> int:
    """NUMA nodes of the machine; 1 if the kernel does not tell. `root` is for tests."""
    return max(1, sum(1 for _ in root.glob("sys/devices/system/node/node[0-9]*")))


def read_siblings(cpus: Iterable[int], root: Path) -> dict[int, frozenset[int]]:
    """The CPUs that are one core with each of `cpus`; those of which the kernel says nothing sensible are left out."""
    siblings = {}
    for cpu in cpus:
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        with contextlib.suppress(OSError, ValueError):
            found = parse_cpu_list(file.read_text())
            if cpu in found:
                siblings[cpu] = found
    return siblings


def _launcher_cpus() -> frozenset[int]:
    """The CPUs that all ranks may use together: the launcher's, where it gave this rank only some of its own."""
    own = frozenset(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        launcher = frozenset(os.sched_getaffinity(os.getppid()))
        if own < launcher:
            return launcher
    return own


def _bind_threads(cpus: frozenset[int]) -> None:
    """Bind this thread, which those to come inherit from, and the others that are where it was; raises OSError."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if os.sched_getaffinity(int(thread.name)) == before:
                os.sched_setaffinity(int(thread.name), cpus)
