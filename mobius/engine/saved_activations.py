"""Keeps activations between forward and backward, by stage and microbatch; some stages offload them to the host.

A layer saves one tensor or, as `SavedProducts`, several. Offloading moves the products of as many layers as fit into
the microbatch's region. Of all other layers, it moves only the inputs, and backward recomputes these layers.

A copy never blocks the host. The source of a copy is freed only after compute has waited for the copy, so that new
tensors cannot overwrite memory that is still being read:

    compute     F0   F1   F2   waits for OA0, then its memory is free     F3   waits for OA1   F4
    to host          OA0  OA1  OA2 ...
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from mobius.engine.host_arena import PinnedActivationBuffer
from mobius.engine.stage_layers import SavedForBackward, tensors_of
from mobius.hardware.spans import NO_SPANS, Spans
from mobius.hardware.streams import Event, new_stream, record_current
from mobius.limits import max_pending_offloads
from mobius.models.compiled import SavedProducts
from mobius.schedule.lanes import Lane

Waiting = Callable[[], AbstractContextManager[None]]
ALIGNMENT = 16
"""Alignment of each tensor in host memory, in bytes."""
SMALL_BYTES = 64
"""Minimum bytes of a saved tensor to offload. Attention kernels' seeds are smaller, and may be on the host already."""


@dataclass(frozen=True)
class _Part:
    """A tensor stored in host memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Part:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    @property
    def extent(self) -> int:
        """Number of elements from the first to the last, including gaps."""
        if self.shape.numel() == 0:
            return 0
        return 1 + sum(step * (size - 1) for step, size in zip(self.stride, self.shape, strict=True))

    @property
    def num_bytes(self) -> int:
        return pinned_buffer_bytes(((self.extent,), self.dtype))

    def in_a_row(self, tensor: Tensor) -> Tensor:
        """Return a flat view of `tensor`, which has this layout, so that one contiguous block is copied."""
        return tensor.as_strided((self.extent,), (1,))

    def in_place(self, region: Tensor) -> Tensor:
        """Return a flat view of the part's elements at the start of `region`."""
        return region[: self.extent * self.dtype.itemsize].view(self.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """Return an empty tensor with the same shape and strides, because compiled graphs require the strides."""
        return torch.empty(self.extent, dtype=self.dtype, device=device).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Layer:
    """A layer's offloaded tensors, in the order of copying."""

    inputs: _Part
    saved: Sequence[_Part | Tensor] | None = None
    """Further tensors of `SavedProducts`, some still on the device. None: only the input was saved."""

    @property
    def parts(self) -> list[_Part]:
        return [self.inputs, *(each for each in self.saved or () if isinstance(each, _Part))]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def saved_for_backward(self, back: Iterator[Tensor]) -> SavedForBackward:
        """Return the value that forward saved, rebuilt from the prefetched tensors (`back`)."""
        inputs = next(back)
        if self.saved is None:
            return inputs
        return SavedProducts(inputs, [next(back) if isinstance(each, _Part) else each for each in self.saved])


def _select_for_offload(saved_for_backward: Sequence[SavedForBackward], room: int) -> tuple[list[_Layer], list[Tensor]]:
    """Select tensors to offload into `room` bytes; return their layers, and the tensors in the order of copying."""
    layers, leaving = list[_Layer](), list[Tensor]()
    inputs = tensors_of([each.inputs if isinstance(each, SavedProducts) else each for each in saved_for_backward])
    room -= sum(_Part.of(each).num_bytes for each in inputs)
    for each, own in zip(saved_for_backward, inputs, strict=True):
        layer, tensors = _Layer(_Part.of(own)), [own]
        if isinstance(each, SavedProducts):
            offloaded = [saved.device == own.device and saved.nbytes >= SMALL_BYTES for saved in each.saved]
            parts = [_Part.of(saved) if leaves else saved for saved, leaves in zip(each.saved, offloaded, strict=True)]
            whole = _Layer(layer.inputs, parts)
            if whole.num_bytes - layer.num_bytes <= room:
                room -= whole.num_bytes - layer.num_bytes
                layer, tensors = whole, [own, *itertools.compress(each.saved, offloaded)]
        layers.append(layer)
        leaving += tensors
    return layers, leaving


def pinned_buffer_bytes(*parts: tuple[Sequence[int], torch.dtype]) -> int:
    """Return the bytes of a region for tensors of these shapes and dtypes."""
    return sum(-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in parts)


def _in_places(region: Tensor, parts: Sequence[_Part]) -> Iterator[Tensor]:
    start = 0
    for part in parts:
        yield part.in_place(region[start:])
        start += part.num_bytes


class SavedActivations:
    """Activations of one rank between forward and backward."""

    def __init__(
        self,
        activation_buffer: PinnedActivationBuffer | None,
        *,
        device: torch.device,
        waiting: Waiting,
        copy_lookahead: int = 1,
        alternates: bool = False,
        spans: Spans = NO_SPANS,
    ) -> None:
        """`activation_buffer` has regions for every stage that offloads.

        `waiting` returns a context manager around waits of the compute stream. `copy_lookahead`: number of compute
        actions during which a copy may run, from the schedule. `alternates`: whether forwards and backwards alternate;
        then a prefetch leaves offloads pending, otherwise it first frees their memory.
        """
        self._max_pending_offloads = max_pending_offloads(copy_lookahead)
        self._max_pending_beside_prefetch = self._max_pending_offloads if alternates else 0
        self._activation_buffer, self._device, self._waiting, self._spans = activation_buffer, device, waiting, spans
        self._to_host, self._to_device = new_stream(device), new_stream(device)
        self._saved: dict[tuple[int, int], list[SavedForBackward]] = {}
        self._pending_offloads: deque[tuple[list[Tensor], Event]] = deque()
        """Sources of copies to the host, and the event at the end of each copy."""
        self._arrivals: dict[tuple[int, int], Event] = {}
        """(Stage, microbatch) -> event at the end of its latest copy: first to the host, later to the device."""
        self._offloaded: dict[tuple[int, int], list[_Layer]] = {}
        """(Stage, microbatch) -> layers whose tensors are in host memory."""

    def __len__(self) -> int:
        return len(self._saved) + len(self._arrivals)

    def put(self, stage: int, microbatch: int, saved_for_backward: list[SavedForBackward]) -> None:
        """Store the result of `StageModule.forward`."""
        self._saved[stage, microbatch] = saved_for_backward

    def take(self, stage: int, microbatch: int) -> list[SavedForBackward]:
        """Remove and return the stored activations; compute waits for their prefetch."""
        key = stage, microbatch
        arrival = self._arrivals.pop(key, None)
        if arrival is not None:
            with self._waiting():
                arrival.wait()
        return self._saved.pop(key)

    def look(self, stage: int, microbatch: int, *, comes_again: bool) -> list[Tensor]:
        """Return the stored tensors for recomputing keys and values; if `comes_again`, drop the prefetched copies."""
        key = stage, microbatch
        was_prefetched = key in self._arrivals
        saved_for_backward = self.take(stage, microbatch)
        if not (was_prefetched and comes_again):
            self._saved[key] = saved_for_backward
        return tensors_of(saved_for_backward)

    def offload(self, stage: int, microbatch: int) -> None:
        """Start copying the stored activations to the host; compute waits for older copies."""
        region, key = self._region(stage, microbatch), (stage, microbatch)
        self._offloaded[key], leaving = _select_for_offload(self._saved.pop(key), region.nbytes)
        parts = [part for layer in self._offloaded[key] for part in layer.parts]
        done = record_current(self._device)
        with self._to_host.run():
            done.wait()
            with self._spans.device_span(Lane.OFFLOAD_ACTIVATIONS, f"OA{stage}.{microbatch}"):
                for target, part, source in zip(_in_places(region, parts), parts, leaving, strict=True):
                    target.copy_(part.in_a_row(source), non_blocking=True)
            arrival = self._arrivals[key] = self._to_host.record()
        self._pending_offloads.append((leaving, arrival))
        self._free_sources(self._max_pending_offloads)

    def prefetch(self, stage: int, microbatch: int) -> None:
        """Start copying the stored activations back to the device; `take` then returns them."""
        key = stage, microbatch
        parts = [part for layer in self._offloaded[key] for part in layer.parts]
        sources = [*_in_places(self._region(stage, microbatch), parts)]
        self._free_sources(self._max_pending_beside_prefetch)
        back = [part.empty(self._device) for part in parts]
        is_free = record_current(self._device)  # before, compute may still read the targets' memory
        with self._to_device.run():
            is_free.wait()
            if key in self._arrivals:  # wait for the offload, unless this is a second prefetch
                self._arrivals[key].wait()
            with self._spans.device_span(Lane.PREFETCH_ACTIVATIONS, f"PA{stage}.{microbatch}"):
                for part, target, source in reversed([*zip(parts, back, sources, strict=True)]):
                    part.in_a_row(target).copy_(source, non_blocking=True)
            self._arrivals[key] = self._to_device.record()
        tensors = iter(back)
        self._saved[key] = [layer.saved_for_backward(tensors) for layer in self._offloaded[key]]

    def clear(self) -> None:
        """Drop everything after an error; copies may still be running."""
        self._saved.clear()
        self._arrivals.clear()
        self._pending_offloads.clear()
        self._offloaded.clear()

    def _region(self, stage: int, microbatch: int) -> Tensor:
        assert self._activation_buffer is not None, f"stage {stage} has no pinned buffer for its activations"
        return self._activation_buffer.region(stage, microbatch)

    def _free_sources(self, most: int) -> None:
        """Make compute wait for all but the latest `most` offloads, then free the sources of these offloads."""
        while len(self._pending_offloads) > most:
            with self._waiting():
                self._pending_offloads.popleft()[1].wait()
