"""Host memory of this rank's streamed stages and offloaded activations, in mappings of exactly the needed size.

Memory that copies of the GPU read or write is registered with CUDA.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mobius.distributed.shards import Shards
from mobius.engine.stage_state import StageState, num_owned
from mobius.errors import HostMemoryError
from mobius.models.layout import StageLayout
from mobius.schedule.memory_layout import Part, Place, StageRegions
from mobius.units import format_bytes

if TYPE_CHECKING:
    from mobius.engine.state_files import StateFiles

_MADV_COLLAPSE = 25
"""Linux's constant for `madvise` to move small pages (from fragmented memory or late growth) to huge pages."""


class PinnedMemory:
    """Zeroed host memory, page-locked for asynchronous copies if there is a GPU.

    Call `close` before the process ends. `pin_memory=True` is not used: the caching host allocator rounds sizes up to
    powers of two.
    """

    def __init__(self, *, register: bool) -> None:
        """`register`: whether to page-lock the memory that `_map` returns."""
        self._register = register
        self.num_bytes = 0
        """Bytes that are mapped now."""
        self._registered: list[Tensor] = []

    def _map(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeros. Raises HostMemoryError."""
        tensor = self._map_unlocked(num_elements, dtype)
        if self._register and num_elements > 0:
            lock_pages(tensor)
            self._registered.append(tensor)
        return tensor

    def _map_unlocked(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in memory that is not page-locked, for the CPU alone. Raises HostMemoryError."""
        self.num_bytes += num_elements * dtype.itemsize
        return map_zeros(num_elements, dtype)

    def close(self) -> None:
        """Unregister all memory; copies to and from it must have ended. May be called twice."""
        while self._registered:
            unlock_pages(self._registered.pop())


class HostArena(PinnedMemory):
    """One StageState per streamed stage, whose weights and gradients are page-locked."""

    def __init__(
        self,
        layouts: Mapping[int, StageLayout],
        *,
        dtype: torch.dtype,
        register: bool,
        regions: Mapping[int, StageRegions] | None = None,
        gradient_dtype: torch.dtype | None = None,
        shards: Mapping[int, Shards] | None = None,
    ) -> None:
        """Map zeroed memory for `layouts` (stage -> layout): weights in `dtype`, with split masters if that is bf16.

        Tensors that a stage's `regions` place elsewhere have only a shape (`device="meta"`); without `regions`, all
        tensors are on the host. `register` page-locks weights and gradients for asynchronous copies. `gradient_dtype`
        is fp32 or, by default, the weights' dtype. Unfinished fp32 sums share memory with finished gradients. For a
        stage in `shards`, all tensors but weights and sums have only this replica's shard. Raises HostMemoryError.
        """
        super().__init__(register=register)
        self.states: dict[int, StageState] = {}
        self._kept: list[Callable[[], None]] = []
        self.state_files: StateFiles | None = None
        """Files of the optimizer states on disks, if any."""
        self.sums: dict[int, Tensor] = {}
        """Stage that offloads unfinished sums -> fp32 [num_trained], in the same memory as the stage's gradients."""
        leaving = gradient_dtype or dtype
        try:
            for stage, layout in layouts.items():
                own_regions = (regions or {}).get(stage)
                places = {} if own_regions is None else {part: own_regions.place_of(part) for part in Part}
                on_disks = {part for part, place in places.items() if place is Place.DISKS}
                offloads_sums = own_regions is not None and own_regions.offloads_sums
                weights = (_without_memory if Part.WEIGHTS in on_disks else self._map)(layout.num_units, dtype)
                own = (shards or {}).get(stage)
                count = layout.num_trained if offloads_sums else num_owned(layout, own)
                allocate = _without_memory if places.get(Part.GRADIENTS) is Place.BUFFER else self._map
                gradients = allocate(count, torch.float32 if offloads_sums else leaving)
                if offloads_sums:
                    self.sums[stage] = gradients
                    gradients = gradients.view(leaving)[: num_owned(layout, own)]
                zeros = _without_memory if Part.STATES in on_disks else self._map_unlocked
                state = StageState.with_buffers(layout, weights, gradients, zeros, own)
                if Part.STATES in on_disks:
                    state = state.with_parts(_without_memory(state.part_bytes, torch.uint8))
                self.states[stage] = state
        except BaseException:
            self.close()
            raise

    def map_bytes(self, num_bytes: int) -> Tensor:
        """Return zeros, uint8 [num_bytes], which `close` releases. Raises HostMemoryError."""
        return self._map(num_bytes, torch.uint8)

    def keep(self, close: Callable[[], None]) -> None:
        """Call `close` when the arena is closed."""
        self._kept.append(close)

    def close(self) -> None:
        while self._kept:
            self._kept.pop()()
        super().close()


class PinnedActivationBuffer(PinnedMemory):
    """Host memory for offloaded activations, with one fixed region per stage and microbatch.

    When a rank's first backward starts, the activations of all stages are in this memory, so stages share no region.
    Later microbatches reuse the regions of earlier microbatches. Fixed regions need no allocator and cannot run out.
    """

    def __init__(self, region_bytes: Mapping[int, Sequence[int]], *, register: bool) -> None:
        """Allocate for each stage regions of `region_bytes` (`activation_offloading.num_host_regions`).

        `register` page-locks them for asynchronous copies. Raises HostMemoryError.
        """
        super().__init__(register=register)
        self._regions: dict[int, Sequence[Tensor]] = {}
        try:
            for stage, sizes in region_bytes.items():
                self._regions[stage] = self._map(sum(sizes), torch.uint8).split([*sizes])
        except BaseException:
            self.close()
            raise

    def region(self, stage: int, microbatch: int) -> Tensor:
        """Return the region, uint8 [bytes], of a stage and microbatch."""
        regions = self._regions[stage]
        return regions[microbatch % len(regions)]


def lock_pages(tensor: Tensor) -> None:
    """Page-lock the memory of `tensor` for asynchronous copies, until `unlock_pages`. Raises HostMemoryError."""
    error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(error) != 0:
        raise HostMemoryError(
            f"CUDA cannot page-lock {format_bytes(tensor.nbytes, digits=2)} of host memory (cudaHostRegister: "
            f"{error}). Raise the limit of locked memory (`ulimit -l unlimited`; in a container --ulimit "
            "memlock=-1)."
        )


def unlock_pages(tensor: Tensor) -> None:
    """Undo `lock_pages`; copies from and to the memory must have ended."""
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


def _without_memory(num_elements: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(num_elements, dtype=dtype, device="meta")


def map_zeros(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return a zero tensor [num_elements] in an anonymous mapping of exactly its size, on huge pages if possible.

    Writes all pages now, with all torch threads. Otherwise the first update would take seconds longer, and registering
    the memory would be slower. Raises HostMemoryError.
    """
    num_bytes = num_elements * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(0, dtype=dtype)
    num_pages = -(-num_bytes // mmap.PAGESIZE)
    try:
        memory = mmap.mmap(-1, num_pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryError(
            f"the system refuses {format_bytes(num_bytes, digits=2)} of host memory: {error}"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).zero_()  # the tensor keeps the mapping alive
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # fails before Linux 6.1, or if no huge page is free
            memory.madvise(_MADV_COLLAPSE)
    return tensor[:num_bytes].view(dtype)


def whole_pages(tensor: Tensor) -> Tensor:
    """Return all memory, uint8, that `map_zeros` mapped for `tensor` or for the tensor of which `tensor` is a view."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
