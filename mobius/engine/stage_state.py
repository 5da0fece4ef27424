"""The training state of one stage as flat tensors, on the host (streamed) or on the GPU (resident)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mobius.distributed.shards import Shards
from mobius.engine.state_codec import CHUNK_ELEMENTS, CODECS, StateCodec
from mobius.models.layout import StageLayout


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
    parts: Mapping[str, Tensor]
    """Owned moments, and what `weights` lack of their fp32 master, as `codec` names them."""
    codec: StateCodec
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
        codec = CODECS[weights.dtype]
        parts = {part: zeros(count, dtype) for part, dtype in codec.parts.items()}
        return cls(layout, weights, gradients, parts, codec, shards)

    @classmethod
    def on_device(
        cls,
        layout: StageLayout,
        device: torch.device,
        dtype: torch.dtype,
        gradients: Tensor | None = None,
        shards: Shards | None = None,
    ) -> StageState:
        """Return a zeroed state on `device` with weights in `dtype`, and gradients in it unless they are given."""

        def zeros(num_elements: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(num_elements, dtype=kind, device=device)

        weights = zeros(layout.num_elements, dtype)
        if gradients is None:
            gradients = zeros(num_owned(layout, shards), dtype)
        return cls.with_buffers(layout, weights, gradients, zeros, shards)

    @property
    def exp_avg(self) -> Tensor:
        """The first moment."""
        return self.parts["exp_avg"]

    @property
    def exp_avg_sq(self) -> Tensor:
        """The second moment."""
        return self.parts["exp_avg_sq"]

    @cached_property
    def owned(self) -> tuple[OwnedShard, ...]:
        """Each owned range as a separate state; with one replica, a single range of everything."""
        if self.shards is None:
            whole = slice(0, self.layout.num_trained)
            return (OwnedShard(whole, self),)
        return tuple(OwnedShard(place, self._part(place, inner)) for place, inner in self.shards.places())

    def _part(self, place: slice, inner: slice) -> StageState:
        parts = {part: tensor[inner] for part, tensor in self.parts.items()}
        return StageState(self.layout.part(place), self.weights[place], self.gradients[inner], parts, self.codec)

    def own_gradient(self, name: str) -> Tensor:
        """Return the flat gradient of one parameter's owned elements, which are contiguous."""
        part = self.layout.slice_of(name)
        cuts = ((own.state.gradients, own.overlap(part)) for own in self.owned)
        return next((gradients[cut[0]] for gradients, cut in cuts if cut is not None), self.gradients[:0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Distinct tensors that hold the state."""
        return (self.weights, self.gradients, *self.parts.values())

    def read_master(self, part: slice = slice(None)) -> Tensor:
        """Return the fp32 master of the trained elements in `part`: a view if it is stored unsplit, else new memory."""
        return self.codec.decode_master(*self._trained(part))

    def write_master(self, part: slice, values: Tensor) -> None:
        """Set the master of the trained elements in `part`, and their working copy, from flat `values`.

        `values` may have any dtype and device. A split master may move by one fp32 step (`split_master.py`).
        """
        self.codec.encode_master(values, *self._trained(part))

    def _trained(self, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        weights = self.weights[: self.layout.num_trained][part]
        return weights, {name: tensor[part] for name, tensor in self.parts.items()}

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
