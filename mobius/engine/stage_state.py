"""Training state of one stage as flat tensors, on the host (streamed) or on the GPU (resident)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from mobius.distributed.shards import Shards
from mobius.engine.reduced_states import codec_for
from mobius.engine.state_codec import CHUNK_ELEMENTS, StateCodec
from mobius.models.layout import StageLayout
from mobius.schedule.memory_layout import PART_ALIGNMENT, aligned


@dataclass(frozen=True)
class OwnedShard:
    """A contiguous range of trained elements, with their optimizer state."""

    place: slice
    """Range within the stage's trained elements."""
    state: StageState
    """State of the elements in `place` only."""

    def overlap(self, part: slice) -> tuple[slice, slice] | None:
        """Return the overlap with `part` as a slice of `state` and a slice of `part`; None if there is no overlap."""
        start, stop = max(part.start, self.place.start), min(part.stop, self.place.stop)
        if start >= stop:
            return None
        own, other = self.place.start, part.start
        return slice(start - own, stop - own), slice(start - other, stop - other)


@dataclass(frozen=True)
class StateBlock:
    """Optimizer states in one format, for a contiguous range of a stage's owned elements."""

    place: slice
    """Range within the owned elements."""
    trained: slice
    """Range of all replicas with this format, within the stage's trained elements."""
    codec: StateCodec
    parts: Mapping[str, Tensor]
    """Tensors by the names of `codec`: moments, and the bits of the fp32 master that the weights lack."""

    def part(self, inner: slice) -> StateBlock:
        """Return the block's elements `inner` (counted from the block's first element) as a block that begins at 0."""
        whole = slice(0, inner.stop - inner.start)
        return StateBlock(whole, whole, self.codec, self.codec.part_of(self.parts, inner))


@dataclass(frozen=True)
class StageState:
    """Flat tensors of one stage on one device: weights of `layout.num_units`, other tensors of `num_owned` elements.

    Owned elements are all trained elements or, with replicas, this replica's shard.
    """

    layout: StageLayout
    weights: Tensor
    """Working copy in the compute dtype: the rounded master, and frozen parameters, which have no master.

    Weights of `layout.regions` in fp32 are their own masters.
    """
    gradients: Tensor
    """In the dtype of `weights` or fp32. Streamed: copied from the GPU. Resident: new memory, or a view of the sum."""
    blocks: tuple[StateBlock, ...]
    """Optimizer states: blocks in a reduced format, in the usual one, and of fp32 weights; some may be missing."""
    shards: Shards | None = None
    """None if there is one replica, which owns all elements."""

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
        bounds = 0, layout.num_reduced, layout.first_in_fp32, layout.num_trained
        formats = (weights.dtype, layout.reduced_format), (weights.dtype, ""), (torch.float32, "")
        blocks = []
        for trained, (weight_dtype, reduced) in zip(pairwise(bounds), formats, strict=True):
            place = slice(*(num_owned(layout, shards, end) for end in trained))
            count = place.stop - place.start
            if count or (weight_dtype is weights.dtype and not reduced and not num_owned(layout, shards)):
                codec = codec_for(weight_dtype, reduced)
                parts = {part: zeros(codec.length(part, count), dtype) for part, dtype in codec.parts.items()}
                blocks.append(StateBlock(place, slice(*trained), codec, parts))
        return cls(layout, weights, gradients, tuple(blocks), shards)

    @classmethod
    def on_device(
        cls,
        layout: StageLayout,
        device: torch.device,
        dtype: torch.dtype,
        gradients: Tensor | None = None,
        shards: Shards | None = None,
    ) -> StageState:
        """Return a zeroed state on `device` with weights in `dtype`; unless given, gradients have `dtype`, too."""

        def zeros(num_elements: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(num_elements, dtype=kind, device=device)

        weights = zeros(layout.num_units, dtype)
        if gradients is None:
            gradients = zeros(num_owned(layout, shards), dtype)
        return cls.with_buffers(layout, weights, gradients, zeros, shards)

    @property
    def codec(self) -> StateCodec:
        """Format of the state, which must have only one format."""
        return self._block.codec

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """Parts of the state, which must have only one format."""
        return self._block.parts

    @property
    def _block(self) -> StateBlock:
        (block,) = self.blocks
        return block

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
        """Owned ranges, each with one format and a separate state; often there is one range with all elements."""
        whole = slice(0, self.layout.num_trained)
        if self.shards is None and len(self.blocks) == 1 and not self.layout.regions:
            return (OwnedShard(whole, replace(self)),)  # with `self`, a cycle would keep the memory
        places = ((whole, whole),) if self.shards is None else self.shards.places()
        owned = []
        for place, inner in places:
            for block in self.blocks:
                start, stop = max(inner.start, block.place.start), min(inner.stop, block.place.stop)
                if start < stop:
                    first = place.start + start - inner.start
                    owned.append(self._part(slice(first, first + stop - start), slice(start, stop), block))
        return tuple(owned)

    def _part(self, place: slice, inner: slice, block: StateBlock) -> OwnedShard:
        """Return the range at `place` of the trained and `inner` of the owned elements; it must be within `block`."""
        own = block.part(slice(inner.start - block.place.start, inner.stop - block.place.start))
        weights, gradients = self.layout.part_of_weights(self.weights, place), self.gradients[inner]
        return OwnedShard(place, StageState(self.layout.part(place), weights, gradients, (own,)))

    @property
    def part_bytes(self) -> int:
        """Bytes of the optimizer states without weights and gradients; each part takes whole cache lines."""
        return sum(aligned(part.nbytes, PART_ALIGNMENT) for block in self.blocks for part in block.parts.values())

    def with_parts(self, buffer: Tensor) -> StageState:
        """Return the state with its parts in `buffer`, uint8 [part_bytes or more]."""
        blocks, start = [], 0
        for block in self.blocks:
            parts = {}
            for name, part in block.parts.items():
                parts[name] = buffer[start : start + part.nbytes].view(part.dtype)
                start += aligned(part.nbytes, PART_ALIGNMENT)
            blocks.append(replace(block, parts=parts))
        return replace(self, blocks=tuple(blocks))

    def own_gradient(self, name: str) -> Tensor:
        """Return the flat gradient of the owned elements of parameter `name`, which are contiguous."""
        part = self.layout.slice_of(name)
        cuts = ((own.state.gradients, own.overlap(part)) for own in self.owned)
        return next((gradients[cut[0]] for gradients, cut in cuts if cut is not None), self.gradients[:0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Distinct tensors of the state."""
        return (self.weights, self.gradients, *(part for block in self.blocks for part in block.parts.values()))

    def read_master(self, part: slice = slice(None)) -> Tensor:
        """Return the fp32 master of the trained elements in `part`: new memory if it is stored split, else a view."""
        return self.codec.decode_master(*self._trained(part))

    def write_master(self, part: slice, values: Tensor) -> None:
        """Set the master and the working copy of the trained elements in `part` from flat `values`.

        `values` may have any dtype and device. A split master may move by one fp32 step (`split_master.py`).
        """
        self.codec.encode_master(values, *self._trained(part))

    def _trained(self, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        weights = self.weights[: self.layout.num_trained][part]
        return weights, {name: tensor[part] for name, tensor in self.parts.items() if name not in self.codec.per_group}

    def set_parameter(self, name: str, value: Tensor, *, offset: int = 0) -> None:
        """Set a parameter's working copy, and its master if it is trained, from `value` of any dtype and device.

        `value` may have fewer elements than the parameter: they are written from the parameter's element `offset` on.
        """
        if (codec := self.layout.codec_of(name)) is not None:
            codec.encode_part(value, self.layout.weight(self.weights, name), self.layout.offsets[name][1], offset)
            return
        start, flat = self.layout.slice_of(name).start + offset, value.reshape(-1)
        part = slice(start, start + len(flat))
        if self.shards is not None or not self.layout.is_trained(name):
            # Copy in chunks: otherwise torch first copies the complete GPU tensor to the host in the tensor's dtype.
            target = self.layout.part_of_weights(self.weights, part)
            chunks = (tensor.split(CHUNK_ELEMENTS) for tensor in (flat, target))
            for chunk, weights in zip(*chunks, strict=True):
                weights.copy_(chunk)
        if self.layout.is_trained(name):
            for own in self.owned:
                if (cut := own.overlap(part)) is not None:
                    own.state.write_master(cut[0], flat[cut[1]])


def num_owned(layout: StageLayout, shards: Shards | None, before: int | None = None) -> int:
    """Return the number of trained elements (only before element `before`, if given) whose optimizer state is here."""
    stop = layout.num_trained if before is None else before
    owned = (slice(0, layout.num_trained),) if shards is None else shards.own
    return sum(max(0, min(part.stop, stop) - part.start) for part in owned)
