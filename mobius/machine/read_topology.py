"""Reads how this machine's GPUs are attached: the kernel's tree under /sys, the driver's word, and P2P from torch.

What follows from it is machine/topology.py's and mapping.py's business. GPUs go by torch's numbers, that is after
CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; to kernel and driver they are named by PCI address. No context is made on
any GPU.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from mobius.machine.numa_binding import gpu_addresses
from mobius.machine.nvml import DriverLinks, import_nvml, read_driver_links
from mobius.machine.topology import Gpu, Topology, link_gpus

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


def read_topology(
    num_gpus: int,
    *,
    root: Path = Path("/"),
    import_driver: Callable[[], Any | None] = import_nvml,
) -> Topology:
    """The first `num_gpus` GPUs as torch counts them; what the machine does not tell is left out.

    `root` and `import_driver` are for tests.
    """
    gpus = [_read_gpu(index, root) for index in range(num_gpus)]
    told = DriverLinks()
    addresses = [gpu.address for gpu in gpus if gpu.address is not None]
    if len(addresses) == num_gpus > 1:
        told = read_driver_links(addresses, import_driver())
    p2p = {(a, b): _has_p2p(a, b) for a, b in combinations(range(num_gpus), 2)}
    return link_gpus(gpus, ancestors=told.ancestors, num_nvlinks=told.num_nvlinks, p2p=p2p)


def _read_gpu(index: int, root: Path) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    address = None
    with contextlib.suppress(ValueError):
        (address,) = gpu_addresses([index])
    uuid = str(getattr(properties, "uuid", "") or "").removeprefix("GPU-")
    return Gpu(
        index,
        name=str(properties.name),
        uuid=f"GPU-{uuid}" if uuid else None,
        address=address,
        numa_node=_read_node(address, root) if address is not None else None,
        bridges=_read_bridges(address, root) if address is not None else (),
    )


def _read_node(address: str, root: Path) -> int | None:
    """The kernel's number of a GPU's NUMA node; None where it has none, which it writes as -1."""
    with contextlib.suppress(OSError, ValueError):
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def _read_bridges(address: str, root: Path) -> tuple[str, ...]:
    """The folders from the host bridge down to a device, itself left out; none if the kernel does not show it."""
    device = root / "sys/bus/pci/devices" / address
    if not device.exists():
        return ()
    parts = device.resolve().parts
    hosts = [place for place, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)]
    return parts[hosts[-1] : -1] if hosts else ()


def _has_p2p(one: int, other: int) -> bool:
    """Whether the driver says that each can reach the other's memory; whether that works is another question."""
    return torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)
