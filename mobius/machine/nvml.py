"""What only the driver's management library tells of two GPUs: NVLinks between them, and its own word on their ways.

Owns the questions to NVML and nothing else. It needs the package nvidia-ml-py, which is optional: without it NVLinks
are not known, and the kernel's tree of bridges has to do. GPUs are named by PCI address, because NVML's numbers are
not CUDA's.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from mobius.machine.topology import Ancestor

logger = logging.getLogger(__name__)

_SWITCH = "switch"
_ANCESTORS = (
    ("NVML_TOPOLOGY_INTERNAL", Ancestor.PIX),
    ("NVML_TOPOLOGY_SINGLE", Ancestor.PIX),
    ("NVML_TOPOLOGY_MULTIPLE", Ancestor.PXB),
    ("NVML_TOPOLOGY_HOSTBRIDGE", Ancestor.PHB),
    ("NVML_TOPOLOGY_NODE", Ancestor.NODE),
    ("NVML_TOPOLOGY_SYSTEM", Ancestor.SYS),
)


@dataclass(frozen=True)
class DriverLinks:
    """What NVML told of pairs (first, second), first < second; a pair that is missing was not told."""

    ancestors: dict[tuple[int, int], Ancestor] = field(default_factory=dict)
    num_nvlinks: dict[tuple[int, int], int] = field(default_factory=dict)


def import_nvml() -> Any | None:
    """The module of nvidia-ml-py, or None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def read_driver_links(addresses: Sequence[str], nvml: Any | None) -> DriverLinks:
    """Ask `nvml` (the module pynvml, or None) about every two of the GPUs at these PCI addresses."""
    if nvml is None:
        return DriverLinks()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        logger.info("NVML tells nothing about the GPUs' links: %s", error)
        return DriverLinks()
    try:
        return _ask(addresses, nvml)
    except nvml.NVMLError as error:
        logger.info("NVML tells nothing about the GPUs' links: %s", error)
        return DriverLinks()
    finally:
        nvml.nvmlShutdown()


def _ask(addresses: Sequence[str], nvml: Any) -> DriverLinks:
    levels = {getattr(nvml, name): ancestor for name, ancestor in _ANCESTORS}
    handles = [nvml.nvmlDeviceGetHandleByPciBusId(address) for address in addresses]
    ends = [_nvlink_ends(handle, nvml) for handle in handles]
    told = DriverLinks()
    for first, second in combinations(range(len(handles)), 2):
        pair = (first, second)
        level = _answer(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handles[first], handles[second])
        if level in levels:
            told.ancestors[pair] = levels[level]
        direct = ends[first].count(_normal(addresses[second]))
        through_switches = min(ends[first].count(_SWITCH), ends[second].count(_SWITCH))
        if through_switches and not direct and not _has_nvlink_p2p(handles[first], handles[second], nvml):
            through_switches = 0
        told.num_nvlinks[pair] = direct or through_switches
    return told


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


def _has_nvlink_p2p(first: Any, second: Any, nvml: Any) -> bool:
    status = _answer(nvml, nvml.nvmlDeviceGetP2PStatus, first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return bool(status == nvml.NVML_P2P_STATUS_OK)


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
