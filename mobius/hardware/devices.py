"""Chooses this rank's device and CPU threads, caps its GPU memory and reads its memory use."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mobius.config.config import Device, Dtype
from mobius.errors import GpuMemoryError
from mobius.hardware.host_memory import peak_host_bytes
from mobius.hardware.numa import bind_to_gpu_node, num_numa_nodes
from mobius.process.ranks import Ranks, num_cpus_per_rank, omp_num_threads
from mobius.units import GIB

NUM_RESERVED_THREADS = 2
MIN_THREADS_TO_SPARE = 8
SATURATING_THREADS = 32
"""Number of optimizer threads, of all ranks together, that use up the memory bandwidth of a NUMA node. On 64 cores of a
machine with four H200 and one node, 6 to 14 threads per rank updated equally fast, and steps varied least with 8
(docs/decisions/0005-update-order.md)."""
TORCH_DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}


def has_gpus(wanted: Device, ranks: Ranks) -> bool:
    """Whether ranks compute on GPUs.

    Raises GpuMemoryError if the user wants GPUs, or the machine has GPUs, but there are fewer GPUs than ranks.
    """
    count = torch.cuda.device_count() if wanted is not Device.CPU and torch.cuda.is_available() else 0
    if wanted is Device.CPU or (wanted is Device.AUTO and count == 0):
        return False
    if count < ranks.num_local:
        raise GpuMemoryError(
            f"{ranks.num_local} ranks need one GPU each, but torch sees {count}. Start fewer ranks (--nproc_per_node), "
            "check CUDA_VISIBLE_DEVICES and the driver (nvidia-smi), or use --device cpu."
        )
    return True


def choose_device(wanted: Device, ranks: Ranks, order: Sequence[int]) -> torch.device:
    """Return this rank's device and make it torch's current device; `order` has the index of each local rank's GPU.

    Raises GpuMemoryError like `has_gpus`.
    """
    if not has_gpus(wanted, ranks):
        return torch.device("cpu")
    device = torch.device("cuda", order[ranks.local_rank])
    use_device(device)
    return device


def use_device(device: torch.device) -> None:
    """Make `device` torch's current device in this thread, if it is a GPU.

    In a new thread, the first GPU is current, also after each use of a stream. A context on that GPU takes memory.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def set_host_threads(ranks: Ranks, device: torch.device, order: Sequence[int]) -> None:
    """Bind this rank to its CPUs, near its GPU if the machine reports them, with one thread per CPU.

    Call it on the main thread before the stages' host memory is allocated. If the user has not set OMP_NUM_THREADS,
    torchrun sets it to 1, which would limit AdamW to one core. A larger number comes from the user and is kept, unless
    the rank is bound to fewer CPUs. `order` is as in `choose_device`.
    """
    bound = bind_to_gpu_node(ranks, order) if device.type == "cuda" else None
    wanted = omp_num_threads() or 1
    if bound is not None and (wanted == 1 or wanted > bound):
        torch.set_num_threads(bound)
    elif wanted == 1:
        torch.set_num_threads(max(1, num_cpus_per_rank(ranks.num_local)))


def num_optimizer_threads(num_ranks: int) -> int:
    """Return the number of CPU optimizer threads of each rank of a node.

    Two cores stay free for the thread that launches kernels and for autograd.
    """
    threads = torch.get_num_threads()
    if threads < MIN_THREADS_TO_SPARE:
        return threads
    saturating = SATURATING_THREADS * num_numa_nodes() // num_ranks
    return min(threads - NUM_RESERVED_THREADS, max(saturating, MIN_THREADS_TO_SPARE - NUM_RESERVED_THREADS))


def check_dtype(dtype: Dtype, device: torch.device) -> None:
    """Raise GpuMemoryError if the device does not compute in `dtype`."""
    if dtype is Dtype.BF16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise GpuMemoryError(f"{torch.cuda.get_device_name(device)} does not compute in bf16: use --fp16 or --fp32.")


def cap_gpu_memory(device: torch.device, limit_gib: float | None) -> int | None:
    """Limit this process to `limit_gib` of GPU memory; return the bytes that it may use, or None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    if limit_gib is None:
        return free
    limit = int(limit_gib * GIB)
    if limit > total:
        raise GpuMemoryError(
            f"--gpu_memory_limit {limit_gib:g} is more than the {total / GIB:.1f} GiB of "
            f"{torch.cuda.get_device_name(device)}."
        )
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    return min(limit, free)


def free_cached_memory(device: torch.device) -> None:
    """Release unused GPU memory, including memory of unreachable objects; does nothing on a CPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class MemoryReading:
    """Bytes that one rank uses, now and at most since its start; GPU numbers are 0 on a CPU."""

    peak_allocated: int
    peak_reserved: int
    allocated: int
    peak_host: int


class MemoryMeter:
    """Reads the memory use of a rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self.has_gpu else "cpu"

    @property
    def has_gpu(self) -> bool:
        return self._device.type == "cuda"

    def read(self) -> MemoryReading:
        """Return the current numbers, from torch and the kernel; does not synchronize."""
        if not self.has_gpu:
            return MemoryReading(0, 0, 0, peak_host_bytes())
        stats = torch.cuda.memory_stats(self._device)  # only one call, because each call computes all numbers
        peak_allocated, allocated = stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.current"]
        return MemoryReading(peak_allocated, stats["reserved_bytes.all.peak"], allocated, peak_host_bytes())

    def synchronize(self) -> None:
        """Wait for the device, before its clock is read or its host memory is freed."""
        if self.has_gpu:
            torch.cuda.synchronize(self._device)
