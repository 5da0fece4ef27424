"""Binds each rank to the CPUs of its GPU's NUMA node, as the kernel lists them under /sys.

Memory needs no binding: the kernel allocates a page on the node of the CPU that touches it first.

    node 0: CPUs 0-15,64-79   GPU 0, GPU 1   ->   ranks 0 and 1: 0-15,64-79, 16 CPUs for each
    node 1: CPUs 16-31,80-95  GPU 2          ->   rank 2: 16-31,80-95
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from mobius.process.ranks import Ranks

logger = logging.getLogger(__name__)


def bind_to_gpu_node(ranks: Ranks, order: Sequence[int], root: Path = Path("/")) -> int | None:
    """Bind this process to the CPUs of its GPU's node; return how many of these CPUs each rank of the node has.

    Returns None and logs the reason if the machine does not report these CPUs, or if there are less than half of an
    even share: so few CPUs cost more time than memory of another node. A rank that its launcher has bound keeps these
    CPUs. `order[rank]` is the index of the rank's GPU. Call it on the main thread before the stages' memory is
    allocated; existing threads are bound, too. `root` is for tests.
    """
    try:
        addresses = gpu_addresses(order)
        folders = [root / "sys/bus/pci/devices" / address for address in addresses]
        nodes = [parse_cpu_list((folder / "local_cpulist").read_text()) for folder in folders]
        own, common = frozenset(os.sched_getaffinity(0)), _launcher_cpus()
        cpus, num_sharing = nodes[ranks.local_rank] & common, nodes.count(nodes[ranks.local_rank])
        num_cpus = len(cpus) // num_sharing
        if 2 * num_cpus * len(nodes) < len(common):
            raise ValueError(
                f"the node of GPU {addresses[ranks.local_rank]} has {len(cpus)} of the {len(common)} CPUs for "
                f"{num_sharing} of the {len(nodes)} ranks"
            )
        near = cpus & own or own
        _bind_threads(near)
    except (OSError, ValueError) as error:
        logger.info("rank %d is not bound to a NUMA node: %s", ranks.rank, error)
        return None
    logger.debug("rank %d: GPU %s, bound to %d CPUs", ranks.rank, addresses[ranks.local_rank], len(near))
    return min(num_cpus, len(near))


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a CPU list of the kernel, such as `0-15,64-79`; an empty text means no CPU.

    Raises ValueError for any other text.
    """
    cpus: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def gpu_addresses(indices: Iterable[int]) -> list[str]:
    """PCI addresses, in the kernel's format, of the GPUs with these torch indices (after CUDA_VISIBLE_DEVICES).

    Raises ValueError if this build of torch does not report addresses.
    """
    addresses = []
    for index in indices:
        properties: Any = torch.cuda.get_device_properties(index)  # torch's stubs lack some properties
        try:
            domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        except AttributeError:
            raise ValueError(f"torch {torch.__version__} does not report the PCI address of a GPU") from None
        addresses.append(f"{domain:04x}:{bus:02x}:{device:02x}.0")  # a GPU's function is always 0
    return addresses


def num_numa_nodes(root: Path = Path("/")) -> int:
    """Number of NUMA nodes of the machine; 1 if the kernel reports none. `root` is for tests."""
    return max(1, len(list(root.glob("sys/devices/system/node/node[0-9]*"))))


def _launcher_cpus() -> frozenset[int]:
    """Return the CPUs of all ranks: the launcher's CPUs if this rank is bound to some of them, else this rank's."""
    own = frozenset(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        launcher = frozenset(os.sched_getaffinity(os.getppid()))
        if own < launcher:
            return launcher
    return own


def _bind_threads(cpus: frozenset[int]) -> None:
    """Bind this thread and all threads with the same affinity; new threads inherit it. Raises OSError."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            if os.sched_getaffinity(int(thread.name)) == before:
                os.sched_setaffinity(int(thread.name), cpus)
