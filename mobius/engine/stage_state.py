"""The training state of one stage as flat tensors, on the host (streamed) or on the GPU (resident)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mobius.distributed.shards import Shards
from mobius.engine.split_master import join_master, split_master
from mobius.models.layout import StageLayout

CHUNK_ELEMENTS = 2**22
"""Elements split at a time: bounds the extra memory of writing a master to 32 MiB."""
HOST_CHUNK_ELEMENTS = 2**18
"""On a CPU: fits the cache and needs no new pages (430 million elements a second and core on a cloud VM, 2026-11-24;
150 with `CHUNK_ELEMENTS`)."""


@dataclass(frozen=True)
class MasterRemainder:
    """Difference between bf16 weights and their fp32 master (`split_master.py`); together they are the master."""

    bits: Tensor
    """int16."""


@dataclass(frozen=True)
class OwnedShard:
    """A contiguous range of trained elements whose optimizer state is here."""

    place: slice
    """Range within the stage's trained elements."""
    state: StageState
    """State of these elements only."""

    def overlap(self, part: slice) -> tuple[slice, slice] | None:
        """Return the intersection with `part`: its slice in `state` and its slice in `part`; None if it is empty."""
        start, stop = max(part.start, self.place.start), min(part.stop, self.place.stop)
        if start >= stop:
            return None
        own, other = self.place.start, part.start
        return slice(start - own, stop - own), slice(start - other, stop - other)


@dataclass(frozen=True)
class StageState:
    """Flat tensors of one stage on one device: `layout.num_elements` weights, and `num_owned` of the rest.

    Owned elements are all trained ones, or this replica's shard.
    """

    layout: StageLayout
    weights: Tensor
    """Working copy in the compute dtype: the rounded master, and frozen parameters, which have no master."""
    gradients: Tensor
    """In the dtype of `weights` or fp32. Streamed: as copied from the GPU. Resident: owned, or a view of the sum."""
    master: Tensor | MasterRemainder
    """fp32, or the remainder that complements bf16 weights; in an fp32 run the same tensor as `weights`."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    shards: Shards | None = None
    """None if everything is owned: there is one replica."""

    @classmethod
    def with_buffers(
        cls,
        layout: StageLayout,
        weights: Tensor,
        gradients: Tensor,
        zeros: Callable[[int, torch.dtype], Tensor],
        shards: Shards | None = None,
    ) -> StageState:
        """Return a state with `weights` and `gradients`; `zeros` (length, dtype) allocates the other tensors."""
        count = num_owned(layout, shards)
        master: Tensor | MasterRemainder
        if weights.dtype == torch.float32:
            master = weights
        elif weights.dtype == torch.bfloat16:
            master = MasterRemainder(zeros(count, torch.int16))
        else:  # fp16 is not the high half of fp32
            master = zeros(count, torch.float32)
        moments = zeros(count, torch.float32), zeros(count, torch.float32)
        return cls(layout, weights, gradients, master, *moments, shards)

    @cached_property
    def owned(self) -> tuple[OwnedShard, ...]:
        """Each owned range as a separate state; with one replica, a single range of everything."""
        if self.shards is None:
            whole = slice(0, self.layout.num_trained)
            return (OwnedShard(whole, self),)
        return tuple(OwnedShard(place, self._part(place, inner)) for place, inner in self.shards.places())

    def _part(self, place: slice, inner: slice) -> StageState:
        weights, master = self.weights[place], self.master
        own: Tensor | MasterRemainder
        if isinstance(master, MasterRemainder):
            own = MasterRemainder(master.bits[inner])
        else:
            own = weights if master is self.weights else master[inner]
        moments = self.exp_avg[inner], self.exp_avg_sq[inner]
        return StageState(self.layout.part(place), weights, self.gradients[inner], own, *moments)

    def own_gradient(self, name: str) -> Tensor:
        """Return the flat gradient of one parameter's owned elements, which are contiguous."""
        part = self.layout.slice_of(name)
        cuts = ((own.state.gradients, own.overlap(part)) for own in self.owned)
        return next((gradients[cut[0]] for gradients, cut in cuts if cut is not None), self.gradients[:0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Distinct tensors that hold the state."""
        master = self.master.bits if isinstance(self.master, MasterRemainder) else self.master
        own_master = () if master is self.weights else (master,)
        return (self.weights, self.gradients, *own_master, self.exp_avg, self.exp_avg_sq)

    def read_master(self, part: slice = slice(None)) -> Tensor:
        """Return the fp32 master of the trained elements in `part`: a view if it is stored unsplit, else new memory."""
        trained = slice(0, self.layout.num_trained)
        if not isinstance(self.master, MasterRemainder):
            return self.master[trained][part]
        weights = self.weights[trained][part]
        return join_master(weights, self.master.bits[part], out=torch.empty_like(weights, dtype=torch.float32))

    def write_master(self, part: slice, values: Tensor) -> None:
        """Set the master of the trained elements in `part`, and their working copy, from flat `values`.

        `values` may have any dtype and device. A split master may move by one fp32 step (`split_master.py`).
        """
        trained = slice(0, self.layout.num_trained)
        weights, master = self.weights[trained][part], self.master
        if isinstance(master, MasterRemainder):
            if values.dtype == weights.dtype:  # the remainder is zero
                weights.copy_(values)
                master.bits[part].zero_()
                return
            size = HOST_CHUNK_ELEMENTS if weights.device.type == "cpu" else CHUNK_ELEMENTS
            chunks = (tensor.split(size) for tensor in (values, weights, master.bits[part]))
            for chunk, rounded, remainder in zip(*chunks, strict=True):
                split_master(chunk.to(weights.device, torch.float32), weights=rounded, remainder=remainder)
            return
        master[trained][part].copy_(values)
        if master is not self.weights:
            weights.copy_(master[part])

    def set_parameter(self, name: str, value: Tensor, *, offset: int = 0) -> None:
        """Set one parameter's working copy, and its master if it is trained, from `value` of any dtype and device.

        `value` may be partial: its elements are written from the parameter's element `offset` on.
        """
        start, flat = self.layout.slice_of(name).start + offset, value.reshape(-1)
        part = slice(start, start + len(flat))
        if self.shards is not None or not self.layout.is_trained(name):
            # In chunks: otherwise torch first copies the full GPU tensor to the host in its own dtype.
            chunks = (tensor.split(CHUNK_ELEMENTS) for tensor in (flat, self.weights[part]))
            for chunk, weights in zip(*chunks, strict=True):
                weights.copy_(chunk)
        if self.layout.is_trained(name):
            for own in self.owned:
                if (cut := own.overlap(part)) is not None:
                    own.state.write_master(cut[0], flat[cut[1]])


def num_owned(layout: StageLayout, shards: Shards | None) -> int:
    """Return the number of trained elements whose gradients and optimizer state are here."""
    return layout.num_trained if shards is None else shards.num_elements
