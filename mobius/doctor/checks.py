"""Judgement of a machine's facts: ok, slow or wrong, and what to do. This module does not query the machine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from inspect import signature
from typing import Final

from mobius.doctor.apart import Problem
from mobius.doctor.machine import Disk, Gpu, Host, HostSpeed, Links, Software
from mobius.planner.gpu_specs import HOST_BANDWIDTH, PCIE_BYTES
from mobius.units import GIB, format_bytes


class Status(StrEnum):
    """Judgement of a check; UNKNOWN: the check did not finish."""

    OK = "ok"
    SLOW = "slow"
    WRONG = "wrong"
    UNKNOWN = "?"


OK, SLOW, WRONG, UNKNOWN = Status
Judgement = tuple[Status, str, str]
"""Status, facts as text, and advice, which is empty if all is well."""

PROCESS_BYTES = 2.65 * GIB
"""Largest host memory of a process without its stages (docs/user/planning.md)."""
OLDEST_TORCH = (2, 11)
OLDEST_DRIVER: Final[Mapping[int, int]] = {12: 525, 13: 580}
"""CUDA -> oldest driver (docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""
LEAST_SHARED = GIB
"""Size of /dev/shm that NCCL's User Guide recommends for containers (Troubleshooting, --shm-size=1g)."""
LINK_SHARE, CORES_PER_GPU, LEAST_WRITE = 0.7, 4, 0.5e9
"""Bounds below which something counts as slow, chosen by judgement: share of a link's rate, cores, written bytes/s."""


NCCL_PROBLEMS: Final = (
    # 2.26.2 (torch 2.7) fails for messages of 512 KiB and more (NVIDIA/nccl#2418, pytorch/pytorch#152780). 2.25.1 fails
    # for all messages (NVIDIA/nccl#1637). 2.27.3 (torch 2.8) works (Nerogar/OneTrainer#1020).
    ((0,), (2, 27, 3), "12.", "", "messages crash on RTX 50 (NVIDIA/nccl#2418)"),
    ((0,), (2, 29, 3), "", "aarch64", "messages hang on ARM (marin-community/marin#8038)"),
    ((2, 29, 2), (2, 29, 3), "", "", "messages hang (pytorch/pytorch#174338)"),
)
"""First version that fails, first version that works, affected compute capability and processor, and the symptom."""


def _judge_gpus(gpus: Sequence[Gpu]) -> Judgement:
    each = Counter(f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, {gpu.capability}" for gpu in gpus)
    found = "; ".join(f"{number} x {kind}" for kind, number in each.items()) or "none"
    if any(_numbers(gpu.capability) < (8,) for gpu in gpus):
        return SLOW, found, "no bf16 before compute capability 8.0: use --fp16"
    if len(each) > 1:
        return SLOW, found, "ranks wait for the slowest GPU: choose equal ones by CUDA_VISIBLE_DEVICES"
    return OK, found, ""


def _judge_lanes(gpus: Sequence[Gpu]) -> Judgement:
    found = _by_gpu([f"x{gpu.lanes or '?'} of x{gpu.most_lanes or '?'}" for gpu in gpus])
    if any((gpu.lanes or 16) < (gpu.most_lanes or 0) for gpu in gpus):
        advice = "use a slot with all lanes to the CPU, reseat card and riser, check the bifurcation in the BIOS"
        return SLOW, found, f"weights take longer to load than the table says: {advice}"
    return OK, found, ""


def _judge_copies(gpus: Sequence[Gpu], links: Links) -> Judgement:
    rates = [*zip(links.to_gpu, links.from_gpu, strict=True)]
    found = _by_gpu([f"{down / 1e9:.1f} GB/s to the GPU, {up / 1e9:.1f} back" for down, up in rates])
    generation = min((each for each in links.generations if each), default=0)
    if not rates or not generation:
        return OK, found, ""
    most = max(gpu.most_generation or 0 for gpu in gpus)
    found += f", PCIe {generation} of {most}"
    if generation < most:
        return (
            SLOW,
            found,
            "copies run below the links' generation: check the slot's setting in the BIOS, and the riser",
        )
    usual = PCIE_BYTES.get(generation, 0.0) * min(gpu.lanes or 16 for gpu in gpus) / 16
    if min(map(min, rates)) < LINK_SHARE * usual:
        return SLOW, found, f"{usual / 1e9:.0f} GB/s are usual: other programs? IOMMU? memory of another NUMA node?"
    return OK, found, ""


def _judge_peer_copies(links: Links) -> Judgement:
    pairs = len(links.to_gpu) * (len(links.to_gpu) - 1)
    if not pairs:
        return OK, "no two GPUs", ""
    found = f"{pairs - len(links.broken)} of {pairs} right, {links.direct_pairs} direct; {links.order or 'usual order'}"
    if links.broken:
        broken = ", ".join(f"GPU {source} to GPU {target}" for source, target in links.broken)
        return WRONG, found, f"wrong bytes arrive from {broken}: NCCL_P2P_DISABLE=1; IOMMU and ACS off in the BIOS"
    return OK, found, ""


def _judge_torch(gpus: Sequence[Gpu], software: Software) -> Judgement:
    found = f"{software.torch}, CUDA {software.cuda or 'none'}" + "".join(f", driver {gpu.driver}" for gpu in gpus[:1])
    if _numbers(software.torch) < OLDEST_TORCH:
        return WRONG, found, f"torch {'.'.join(map(str, OLDEST_TORCH))} or later is needed: pip install -U torch"
    if not gpus:
        return OK, found, ""
    if software.cuda is None:
        return WRONG, found, "this torch is for CPUs: install one for CUDA (pytorch.org/get-started)"
    major = _numbers(software.cuda)[0]
    if _numbers(gpus[0].driver) < (OLDEST_DRIVER.get(major, 0),):
        return WRONG, found, f"CUDA {major} needs driver {OLDEST_DRIVER[major]} or later; or a torch for an older CUDA"
    if not software.sees_gpus:
        return WRONG, found, "torch sees no GPU: CUDA_VISIBLE_DEVICES? nvidia-smi? a container started with --gpus all?"
    return OK, found, ""


def _judge_nccl(gpus: Sequence[Gpu], software: Software) -> Judgement:
    found = ".".join(map(str, software.nccl)) or "none; CPUs use gloo"
    for since, fixed, capability, processor, text in NCCL_PROBLEMS if software.nccl else ():
        is_here = processor in ("", software.processor) and any(gpu.capability.startswith(capability) for gpu in gpus)
        if is_here and since <= software.nccl < fixed:
            package = f"nvidia-nccl-cu{_numbers(software.cuda or '')[0]}>={'.'.join(map(str, fixed))}"
            return WRONG, found, f"{text}: pip install -U '{package}'"
    return OK, found, ""


def _judge_iommu(gpus: Sequence[Gpu], host: Host) -> Judgement:
    access = "unknown (root may read it)" if host.redirecting is None else ", ".join(host.redirecting) or "off"
    found = f"{host.translation or 'off'}, ACS {access}"
    if len(gpus) > 1 and (host.translation.startswith("DMA") or host.redirecting):
        advice = "iommu=pt on the kernel's command line, ACS off in the BIOS"
        return SLOW, found, f"copies between GPUs pass through the CPU; on some hosts wrong bytes arrive: {advice}"
    return OK, found, ""


def _judge_nodes(host: Host) -> Judgement:
    found = ", ".join(map(format_bytes, host.node_bytes)) or "one node"
    if host.node_bytes and min(host.node_bytes) < max(host.node_bytes) / 2:
        return SLOW, found, "the node with less memory has fewer channels: spread the modules over all sockets"
    return OK, found, ""


def _judge_memory(gpus: Sequence[Gpu], host: Host) -> Judgement:
    found = f"{format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)} available"
    if host.available_bytes < PROCESS_BYTES * max(1, len(gpus)):
        return WRONG, found, f"each process takes {format_bytes(PROCESS_BYTES)} without any weights: end other programs"
    if host.available_bytes < host.total_bytes / 2:
        return SLOW, found, "other programs use most of it, and streamed stages must fit into the rest"
    return OK, found, ""


def _judge_host_speed(speed: HostSpeed) -> Judgement:
    found = f"{speed.bandwidth / 1e9:.0f} GB/s of memory, {speed.updates / 1e9:.2f} billion updates/s"
    if speed.threads:
        found += f" with {speed.threads} threads"
    else:
        return SLOW, found, "there is no C kernel, and torch is slower: install a compiler (apt install gcc)"
    if speed.bandwidth < HOST_BANDWIDTH / 2:
        advice = "steps that stream take longer than the table says. Modules in all channels? Other programs?"
        return SLOW, found, f"plans count on {HOST_BANDWIDTH / 1e9:.0f} GB/s: {advice}"
    return OK, found, ""


def _judge_cores(gpus: Sequence[Gpu], host: Host) -> Judgement:
    found = f"{host.cores}, {host.load:.1f} processes per core of the machine"
    if host.load > 1:
        return SLOW, found, "other programs use the cores and disturb measurements: end them, run doctor again"
    if host.cores < CORES_PER_GPU * len(gpus):
        return SLOW, found, f"with fewer than {CORES_PER_GPU} per GPU, updates on the CPU take longer than copies"
    return OK, found, ""


def _judge_disk(disk: Disk) -> Judgement:
    if disk.write is None or disk.read is None:
        return WRONG, disk.folder, "nothing can be written there: free space, or name another folder by --folder"
    rates = f"writes {disk.write / 1e9:.2f} and reads {disk.read / 1e9:.2f} GB/s in a burst"
    found = f"{disk.folder} {rates}, {format_bytes(disk.free_bytes)} free"
    if disk.write < LEAST_WRITE:
        return SLOW, found, f"a checkpoint of 8B, 90 GB, takes {90e9 / disk.write / 60:.0f} minutes: use an NVMe drive"
    return OK, found, ""


def _judge_shared_memory(gpus: Sequence[Gpu], host: Host) -> Judgement:
    if len(gpus) > 1 and host.shared_bytes < LEAST_SHARED:
        return WRONG, format_bytes(host.shared_bytes), "too little for NCCL: docker run --ipc=host, or --shm-size=1g"
    return OK, format_bytes(host.shared_bytes), ""


def _judge_limits(gpus: Sequence[Gpu], links: Links, host: Host) -> Judgement:
    locked = "unlimited" if host.locked_bytes is None else format_bytes(host.locked_bytes)
    found, needed = f"-n {host.open_files or 'unlimited'}, -l {locked}", 64 + 16 * len(gpus)
    if host.open_files is not None and host.open_files < needed:
        return WRONG, found, f"{needed} open files are needed: ulimit -n 4096, docker run --ulimit nofile=4096"
    if not links.can_pin:
        return WRONG, found, "no host memory can be pinned: ulimit -l unlimited, docker run --ulimit memlock=-1"
    return OK, found, ""


CHECKS: Final[Mapping[str, Callable[..., Judgement]]] = {
    "GPUs": _judge_gpus,
    "GPU lanes": _judge_lanes,
    "GPU copies": _judge_copies,
    "peer copies": _judge_peer_copies,
    "torch": _judge_torch,
    "NCCL": _judge_nccl,
    "IOMMU": _judge_iommu,
    "NUMA": _judge_nodes,
    "host memory": _judge_memory,
    "CPU AdamW": _judge_host_speed,
    "cores": _judge_cores,
    "disk": _judge_disk,
    "/dev/shm": _judge_shared_memory,
    "ulimit": _judge_limits,
}
"""Line of the report -> function that judges it; its parameters are named like the facts that they get."""
_DRIVER: Final = "the driver does not answer: look for Xid in dmesg, restart the machine"
IF_LATE: Final = {
    "GPUs": _DRIVER,
    "GPU copies": f"copies hang: NCCL_P2P_DISABLE=1, IOMMU and ACS off in the BIOS; or {_DRIVER}",
    "disk": "the disk does not answer: dmesg, or another folder by --folder",
}
"""Line of the report -> advice; such a line is WRONG if its facts come too late."""


@dataclass(frozen=True)
class Finding:
    """Line of the report."""

    name: str
    status: Status
    found: str
    advice: str


def judge_all(facts: Mapping[str, object]) -> Iterator[Finding]:
    """Judge all facts. If a fact is a Problem, the checks that need this fact are UNKNOWN.

    Late facts are WRONG if `IF_LATE` has advice for them, unless the machine is busy.
    """
    host = facts["host"]
    is_busy = isinstance(host, Host) and host.load > 1
    for name, judge in CHECKS.items():
        values = [facts[each] for each in signature(judge).parameters]
        problem = next((each for each in values if isinstance(each, Problem)), None)
        if problem is None:
            yield Finding(name, *judge(*values))
        elif problem.is_late and name in IF_LATE and not is_busy:
            yield Finding(name, WRONG, problem.text, IF_LATE[name])
        else:
            yield Finding(name, UNKNOWN, f"not checked: {problem.text}", "")


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _by_gpu(texts: Sequence[str]) -> str:
    """One text if it is the same for all GPUs, else the text of each GPU."""
    if len({*texts}) <= 1:
        return texts[0] if texts else "no GPU"
    return ", ".join(f"GPU {index} {text}" for index, text in enumerate(texts))
