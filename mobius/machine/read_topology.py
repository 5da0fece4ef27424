"""Reads how this machine's GPUs are attached: the kernel's tree under /sys, NVML's word, and P2P from torch.

GPUs go by torch's numbers, that is after CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; to kernel and driver they are
named by PCI address, because NVML's numbers are not CUDA's. NVML needs the optional package nvidia-ml-py: without it
NVLinks are not known, and the kernel's tree of bridges has to do. No context is made on any GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from mobius.machine.numa import gpu_addresses
from mobius.machine.topology import Ancestor, Gpu, Topology, link_gpus

logger = logging.getLogger(__name__)

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_SWITCH = "switch"
_ANCESTORS = (
    ("NVML_TOPOLOGY_INTERNAL", Ancestor.PIX),
    ("NVML_TOPOLOGY_SINGLE", Ancestor.PIX),
    ("NVML_TOPOLOGY_MULTIPLE", Ancestor.PXB),
    ("NVML_TOPOLOGY_HOSTBRIDGE", Ancestor.PHB),
    ("NVML_TOPOLOGY_NODE", Ancestor.NODE),
    ("NVML_TOPOLOGY_SYSTEM", Ancestor.SYS),
)
_DriverLinks = tuple[dict[tuple[int, int], Ancestor], dict[tuple[int, int], int]]
"""Ancestors and NVLinks of pairs (first, second), first < second; a pair that is missing was not told."""


def import_nvml() -> Any | None:
    """The module of nvidia-ml-py, or None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def read_topology(
    num_gpus: int,
    *,
    root: Path = Path("/"),
    import_driver: Callable[[], Any | None] = import_nvml,
) -> Topology:
    """The first `num_gpus` GPUs as torch counts them; facts that the machine does not tell are left out.

    `root` and `import_driver` are for tests.
    """
    gpus = [_read_gpu(index, root) for index in range(num_gpus)]
    ancestors: dict[tuple[int, int], Ancestor] = {}
    num_nvlinks: dict[tuple[int, int], int] = {}
    addresses = [gpu.address for gpu in gpus if gpu.address is not None]
    nvml = import_driver() if len(addresses) == num_gpus > 1 else None
    if nvml is not None:
        ancestors, num_nvlinks = _read_driver_links(addresses, nvml)
    p2p = {(a, b): _has_p2p(a, b) for a, b in combinations(range(num_gpus), 2)}
    return link_gpus(gpus, ancestors=ancestors, num_nvlinks=num_nvlinks, p2p=p2p)


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
    """Whether the driver says that each can reach the other's memory; peer_check.py tries whether that works."""
    return torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)


def _read_driver_links(addresses: Sequence[str], nvml: Any) -> _DriverLinks:
    """The links of every two of the GPUs at these PCI addresses, as `nvml` (the module pynvml) tells them."""
    try:
        nvml.nvmlInit()
        try:
            return _ask(addresses, nvml)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        logger.info("NVML tells nothing about the GPUs' links: %s", error)
        return {}, {}


def _ask(addresses: Sequence[str], nvml: Any) -> _DriverLinks:
    ancestors, num_nvlinks = {}, {}
    levels = {getattr(nvml, name): ancestor for name, ancestor in _ANCESTORS}
    handles = [nvml.nvmlDeviceGetHandleByPciBusId(address) for address in addresses]
    ends = [_nvlink_ends(handle, nvml) for handle in handles]
    for first, second in combinations(range(len(handles)), 2):
        pair = (first, second)
        level = _answer(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handles[first], handles[second])
        if level in levels:
            ancestors[pair] = levels[level]
        num_nvlinks[pair] = ends[first].count(_normal(addresses[second]))
        through_switches = min(ends[first].count(_SWITCH), ends[second].count(_SWITCH))
        if through_switches and not num_nvlinks[pair]:
            ask, capability = nvml.nvmlDeviceGetP2PStatus, nvml.NVML_P2P_CAPS_INDEX_NVLINK
            if _answer(nvml, ask, handles[first], handles[second], capability) == nvml.NVML_P2P_STATUS_OK:
                num_nvlinks[pair] = through_switches
    return ancestors, num_nvlinks


def _nvlink_ends(handle: Any, nvml: Any) -> list[str]:
    """Where each active NVLink of a GPU ends: the PCI address of another GPU, or a switch."""
    ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if _answer(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) != nvml.NVML_FEATURE_ENABLED:
            continue
        kind = _answer(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            remote = _answer(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            ends.append(_normal(remote.busId) if remote is not None else "")
        else:
            ends.append(_SWITCH)  # virtual machines do not name it
    return ends


def _answer(nvml: Any, ask: Any, *arguments: object) -> Any:
    """The answer, or None where this GPU or driver has none: a card without NVLink refuses to be asked."""
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None


def _normal(address: str | bytes) -> str:
    """A PCI address in one form: NVML writes the domain with eight digits, the kernel with four."""
    text = address.decode() if isinstance(address, bytes) else address
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
