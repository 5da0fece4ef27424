"""Reads how this machine's GPUs are attached: the kernel's tree under /sys, NVML, and P2P from torch.

GPUs have torch's numbers (after CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER). Queries to kernel and driver use PCI
addresses, because NVML's numbers are not CUDA's. NVML needs the optional package nvidia-ml-py: without it, NVLinks are
unknown and only the kernel's tree of bridges is used. No context is created on any GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from mobius.hardware.numa import gpu_addresses
from mobius.hardware.topology import Ancestor, Gpu, Link, Topology, common_ancestor

logger = logging.getLogger(__name__)

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_SWITCH = "switch"
_ANCESTORS = {
    "NVML_TOPOLOGY_INTERNAL": Ancestor.PIX,
    "NVML_TOPOLOGY_SINGLE": Ancestor.PIX,
    "NVML_TOPOLOGY_MULTIPLE": Ancestor.PXB,
    "NVML_TOPOLOGY_HOSTBRIDGE": Ancestor.PHB,
    "NVML_TOPOLOGY_NODE": Ancestor.NODE,
    "NVML_TOPOLOGY_SYSTEM": Ancestor.SYS,
}


def import_nvml() -> Any | None:
    """The module of nvidia-ml-py, or None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def read_topology(num_gpus: int, root: Path = Path("/")) -> Topology:
    """Read the topology of torch's first `num_gpus` GPUs; facts that the machine does not report are left out.

    What two GPUs share comes from the kernel's tree of bridges, or from the driver where the tree has gaps. `root` is
    for tests.
    """
    gpus = [_read_gpu(index, root) for index in range(num_gpus)]
    addresses = [gpu.address for gpu in gpus if gpu.address is not None]
    nvml = import_nvml() if len(addresses) == num_gpus > 1 else None
    driver_links = _ask_driver(addresses, nvml) if nvml is not None else {}
    links = []
    for one, other in combinations(gpus, 2):
        a, b = one.index, other.index
        ancestor, num_nvlinks = driver_links.get((a, b), (None, 0))
        # The driver says that each can reach the other's memory; peer_check.py tries whether that works.
        has_p2p = torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a)
        links.append(Link(a, b, common_ancestor(one, other) or ancestor, num_nvlinks, has_p2p))
    return Topology(tuple(gpus), tuple(links))


def _read_gpu(index: int, root: Path) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    gpu = Gpu(index, name=str(properties.name))
    try:
        (address,) = gpu_addresses([index])
    except ValueError:
        return gpu
    device = root / "sys/bus/pci/devices" / address
    node = -1  # the kernel's value for no node
    with contextlib.suppress(OSError, ValueError):
        node = int((device / "numa_node").read_text())
    # The folders from the host bridge down to the device, itself left out; none if the kernel does not show it.
    parts = device.resolve().parts if device.exists() else ()
    hosts = [place for place, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)]
    bridges = parts[hosts[-1] : -1] if hosts else ()
    return replace(gpu, address=address, numa_node=node if node >= 0 else None, bridges=bridges)


def _ask_driver(addresses: Sequence[str], nvml: Any) -> dict[tuple[int, int], tuple[Ancestor | None, int]]:
    """Common ancestor and number of NVLinks of every pair of GPUs at these PCI addresses; empty if NVML fails."""
    try:
        nvml.nvmlInit()
        try:
            return _read_pairs(addresses, nvml)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        logger.debug("NVML reports nothing about the GPUs' links: %s", error)
        return {}


def _read_pairs(addresses: Sequence[str], nvml: Any) -> dict[tuple[int, int], tuple[Ancestor | None, int]]:
    levels = {getattr(nvml, name): ancestor for name, ancestor in _ANCESTORS.items()}
    handles = [nvml.nvmlDeviceGetHandleByPciBusId(address) for address in addresses]
    ends = [_nvlink_ends(handle, nvml) for handle in handles]
    found = {}
    for first, second in combinations(range(len(handles)), 2):
        pair = handles[first], handles[second]
        num_nvlinks = ends[first].count(_normal(addresses[second]))
        through_switches = min(ends[first].count(_SWITCH), ends[second].count(_SWITCH))
        if through_switches and not num_nvlinks:
            status = _answer(nvml, nvml.nvmlDeviceGetP2PStatus, *pair, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            num_nvlinks = through_switches if status == nvml.NVML_P2P_STATUS_OK else 0
        level = _answer(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, *pair)
        found[first, second] = levels.get(level), num_nvlinks
    return found


def _nvlink_ends(handle: Any, nvml: Any) -> list[str]:
    """Remote end of each active NVLink of a GPU: the PCI address of another GPU, or a switch."""
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
    """Result of an NVML query, or None if this GPU or driver does not support it, such as a card without NVLink."""
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None


def _normal(address: str | bytes) -> str:
    """A PCI address in one form: NVML writes the domain with eight digits, the kernel with four."""
    text = address.decode() if isinstance(address, bytes) else address
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
