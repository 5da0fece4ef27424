"""Facts of this machine that checks judge: read from kernel and driver, or measured; each query may hang or fail.

A fact that a machine does not report is None or empty. `root` and `nvidia_smi` are for tests.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import torch
from torch import Tensor

from mobius.config.launch import count_cores
from mobius.distributed.peer_check import MESSAGE_SIZES
from mobius.distributed.transport import SingleRankTransport
from mobius.engine.adamw_cpu import load_adamw_cpu
from mobius.engine.host_arena import lock_pages, map_zeros, unlock_pages
from mobius.errors import HostMemoryError
from mobius.hardware.devices import use_device
from mobius.hardware.disk_rate import measure_rates
from mobius.hardware.host_memory import available_host_bytes, total_host_bytes
from mobius.hardware.numa import gpu_addresses
from mobius.hardware.topology import choose_order, read_topology
from mobius.planner.host_rates import Copies, measure_host_rates, with_fewest_threads
from mobius.planner.timer import CollectiveTimer
from mobius.process.ranks import cache_folder

_QUERY = (
    "--query-gpu=name,memory.total,compute_cap,driver_version,pci.bus_id,pcie.link.gen.current,pcie.link.gen.max,"
    "pcie.link.width.current,pcie.link.width.max"
)
_ACS, _REDIRECTS = 0x000D, 0b1100
"""Extended capability for access control, and its bits that redirect requests and answers between devices to the CPU
(PCI Express Base Specification, Access Control Services)."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it, in nvidia-smi's order."""

    name: str
    memory_bytes: int
    capability: str
    driver: str
    address: str
    generation: int | None
    """Current PCIe generation of the link: an idle GPU lowers it."""
    most_generation: int | None
    lanes: int | None
    most_lanes: int | None
    """Lanes of the card itself; its slot may have fewer."""


@dataclass(frozen=True)
class Links:
    """Bytes per second of copies to and from each of torch's GPUs alone, and facts about copies between GPUs."""

    to_gpu: tuple[float, ...] = ()
    from_gpu: tuple[float, ...] = ()
    generations: tuple[int | None, ...] = ()
    """PCIe generations of the links right after the copies."""
    direct_pairs: int = 0
    """Number of ordered pairs (a, b) where GPU a can access the memory of GPU b directly."""
    broken: tuple[tuple[int, int], ...] = ()
    """Pairs (source, target) between which a copy arrived with wrong bytes."""
    order: str = ""
    """Order of the GPUs by rank, and the reason."""
    can_pin: bool = True


@dataclass(frozen=True)
class Software:
    """Versions of software that a run uses; `cuda` is the version for which torch was built."""

    torch: str
    cuda: str | None
    sees_gpus: bool
    nccl: tuple[int, ...]
    processor: str


@dataclass(frozen=True)
class Host:
    """Facts of the machine apart from its GPUs; limits are hard limits, None means no limit."""

    cores: int
    load: float
    """Load of the last minute: processes that wanted a core / cores of the whole machine."""
    total_bytes: int
    available_bytes: int
    shared_bytes: int
    """Size of /dev/shm."""
    open_files: int | None
    locked_bytes: int | None
    node_bytes: tuple[int, ...]
    """Memory of each NUMA node."""
    translation: str = ""
    """How the IOMMU treats GPUs (`identity`, `DMA`, ...); empty without one."""
    redirecting: tuple[str, ...] | None = None
    """PCIe bridges that redirect copies between GPUs to the CPU; None: only root may read the bridges' settings."""


@dataclass(frozen=True)
class HostSpeed:
    """Parameters per second that AdamW updates on the CPU, and bytes per second that these updates move."""

    updates: float
    bandwidth: float
    threads: int
    """Smallest number of threads that updates nearly as fast as one thread per core; 0 without the C kernel."""


@dataclass(frozen=True)
class Disk:
    """Bytes per second of a folder's disk in one or two seconds, perhaps only of its cache; None: not writable."""

    folder: str
    write: float | None
    read: float | None
    free_bytes: int


def read_gpus(root: Path = Path("/"), nvidia_smi: str = "nvidia-smi") -> list[Gpu]:
    """All GPUs of the machine; none without a driver."""
    if shutil.which(nvidia_smi) is None:
        return []
    command = [nvidia_smi, _QUERY, "--format=csv,noheader,nounits"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False)
    if listing.returncode:
        raise RuntimeError(f"nvidia-smi: {(listing.stdout + listing.stderr).strip()}")
    return [_gpu([field.strip() for field in line.split(",")], root) for line in listing.stdout.splitlines()]


def _gpu(fields: Sequence[str], root: Path) -> Gpu:
    name, memory, capability, driver, bus, *link = fields
    address = bus.lower()[-12:]  # in the kernel's form, such as 0000:17:00.0
    generation, most_generation, lanes, most_lanes = (int(each) if each.isdecimal() else None for each in link)
    with contextlib.suppress(OSError, ValueError):  # the card's own lanes; nvidia-smi may show the slot's instead
        own = int((root / "sys/bus/pci/devices" / address / "max_link_width").read_text())
        most_lanes = max(most_lanes or 0, own) if own <= 16 else most_lanes
    num_bytes = int(memory) * 2**20 if memory.isdecimal() else 0
    return Gpu(name, num_bytes, capability, driver, address, generation, most_generation, lanes, most_lanes)


def measure_links() -> Links:
    """Measure copies between host and each GPU, and check a copy between each two GPUs; empty if torch sees no GPU."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if not devices:
        return Links()
    try:
        lock_pages(pages := map_zeros(2**26, torch.float32))
        unlock_pages(pages)
    except HostMemoryError:
        return Links(can_pin=False)
    to_gpu, from_gpu = zip(*map(_copy_rates, devices), strict=True)
    addresses = gpu_addresses(range(len(devices)))
    generations = tuple(gpu.generation for gpu in read_gpus() if gpu.address in addresses)
    names = [str(device.index) for device in devices]
    _, order = choose_order(read_topology(len(devices)), num_microbatches=2 * len(devices), names=names, is_given=False)
    direct = sum(torch.cuda.can_device_access_peer(*pair) for pair in permutations(range(len(devices)), 2))
    return Links(to_gpu, from_gpu, generations, direct, tuple(find_broken_copies(devices)), order or "")


def _copy_rates(device: torch.device) -> tuple[float, float]:
    use_device(device)
    timer = CollectiveTimer(device, SingleRankTransport(), part_seconds=0.1)
    with Copies(device) as copies:
        ways = (copies.host_to_device, copies.device_to_host)
        down, up = (copies.num_bytes / timer.seconds_alone(way) for way in ways)
    return down, up


def find_broken_copies(
    devices: Sequence[torch.device], copy: Callable[[Tensor, Tensor], object] = Tensor.copy_
) -> Iterator[tuple[int, int]]:
    """Yield the pairs (source, target) between which a copy of one of the sizes arrives with wrong bytes."""

    def pattern(place: int, source: int, num_bytes: int) -> Tensor:
        return torch.arange(num_bytes // 4, dtype=torch.int32, device=devices[place]).add_(1 + source)

    for source, target in permutations(range(len(devices)), 2):
        for size in MESSAGE_SIZES:
            expected = pattern(target, source, size)
            received = torch.full_like(expected, -1)
            copy(received, pattern(source, source, size))
            if not torch.equal(received, expected):  # sync
                yield source, target
                break


def read_software() -> Software:
    """Read versions of software, and ask the driver whether torch sees GPUs."""
    nccl = tuple(torch.cuda.nccl.version()) if torch.version.cuda else ()
    return Software(torch.__version__, torch.version.cuda, torch.cuda.is_available(), nccl, platform.machine())


def read_host(root: Path = Path("/")) -> Host:
    """Read the kernel's facts about the machine, and the limits of this process."""
    shared = os.statvfs(root / "dev/shm") if (root / "dev/shm").is_dir() else None
    devices = (root / "sys/bus/pci/devices").glob("*")
    gpus = [each for each in devices if _text(each / "vendor") == "0x10de" and _text(each / "class")[:4] == "0x03"]
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    return Host(
        cores=count_cores(root / "sys/fs/cgroup/cpu.max"),
        load=os.getloadavg()[0] / (os.cpu_count() or 1),
        total_bytes=total_host_bytes(root),
        available_bytes=available_host_bytes(root),
        shared_bytes=shared.f_frsize * shared.f_blocks if shared else 0,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        node_bytes=tuple(int(_text(node / "meminfo").split("MemTotal:")[1].split()[0]) * 1024 for node in nodes),
        translation=", ".join(sorted({_text(gpu / "iommu_group/type") for gpu in gpus} - {""})),
        redirecting=_redirecting_bridges(gpus),
    )


def _redirecting_bridges(gpus: Sequence[Path]) -> tuple[str, ...] | None:
    found = set[str]()
    for bridge in {bridge for gpu in gpus for bridge in gpu.resolve().parents if (bridge / "config").is_file()}:
        values, place = (bridge / "config").read_bytes(), 0x100
        if len(values) < 4096:
            return None
        while place:  # each capability has the offset of the next one
            header = int.from_bytes(values[place : place + 4], "little")
            if header & 0xFFFF == _ACS and values[place + 6] & _REDIRECTS:
                found.add(bridge.name)
            place = header >> 20
    return tuple(sorted(found))


def _limit(which: int) -> int | None:
    hard = resource.getrlimit(which)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def measure_host() -> HostSpeed:
    """Run AdamW on all cores for a second; the first time, its kernel is compiled."""
    torch.set_num_threads(count_cores())
    kernel = load_adamw_cpu(cache_folder(), num_threads=count_cores())
    device, transport = torch.device("cpu"), SingleRankTransport()
    kernel = with_fewest_threads(torch.bfloat16, device=device, transport=transport, kernel=kernel)
    rates = measure_host_rates(torch.bfloat16, device=device, transport=transport, kernel=kernel)
    updates = rates.cpu_adamw_together
    return HostSpeed(updates, updates * rates.cpu_adamw_bytes, rates.optimizer_threads)


def measure_disk(folder: Path) -> Disk:
    """Measure a burst of writes and reads, for about two seconds."""
    write, read = measure_rates(folder) or (None, None)
    return Disk(str(folder), write, read, shutil.disk_usage(folder).free)
