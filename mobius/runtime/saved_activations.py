"""Holds what forward leaves for backward, by stage and microbatch; that of stashed stages waits on the host.

That is a tensor of each layer or, of `SavedProducts`, several. Products of as many layers leave as there is room for in
the microbatch's place; of the other layers the input does, and they are run again.

A copy never stops the host. The memory of what leaves is kept until compute has waited for its copy, so that what
compute makes next cannot lie where a copy still reads:

    compute     F0   F1   F2   waits for S0, whose memory is free then   F3   waits for S1   F4
    to host          S0   S1   S2 ...
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

from mobius.limits import max_pending_offloads
from mobius.memory.pinned_activation_buffer import PinnedActivationBuffer
from mobius.memory.spans import NO_SPANS, Spans
from mobius.memory.streams import Event, new_stream, record_current
from mobius.models.compiled import SavedProducts
from mobius.runtime.stage import SavedForBackward, tensors_of
from mobius.schedule.lanes import Lane

Waiting = Callable[[], AbstractContextManager[None]]
ALIGNMENT = 16
"""Bytes of which each tensor on the host begins at a multiple."""
SMALL_BYTES = 64
"""Bytes below which a made tensor stays: seeds of attention kernels, which are not always on the device."""


@dataclass(frozen=True)
class _PendingOffload:
    saved_for_backward: list[Tensor]
    arrival: Event


@dataclass(frozen=True)
class _Part:
    """A tensor that waits on the host."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Part:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    @property
    def extent(self) -> int:
        """Elements from the first to the last one, gaps between its own counted."""
        if self.shape.numel() == 0:
            return 0
        return 1 + sum(step * (size - 1) for step, size in zip(self.stride, self.shape, strict=True))

    @property
    def num_bytes(self) -> int:
        return pinned_buffer_bytes(((self.extent,), self.dtype))

    def in_a_row(self, tensor: Tensor) -> Tensor:
        """View of a tensor like this one as its elements in a row, so that a copy is one piece of memory."""
        return tensor.as_strided((self.extent,), (1,))

    def in_place(self, region: Tensor) -> Tensor:
        """View of the bytes that begin at a place as the elements in a row."""
        return region[: self.extent * self.dtype.itemsize].view(self.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """A tensor like this one, with the same strides: compiled graphs go by them."""
        return torch.empty(self.extent, dtype=self.dtype, device=device).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Layer:
    """A layer whose tensors have left, in the order of their way."""

    inputs: _Part
    saved: Sequence[_Part | Tensor] | None = None
    """The other tensors of `SavedProducts`, some of which have stayed. None: the input alone was kept."""

    @property
    def parts(self) -> list[_Part]:
        return [self.inputs, *(each for each in self.saved or () if isinstance(each, _Part))]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def saved_for_backward(self, back: Iterator[Tensor]) -> SavedForBackward:
        """The layer as it was kept, of tensors that have come back."""
        inputs = next(back)
        if self.saved is None:
            return inputs
        return SavedProducts(inputs, [next(back) if isinstance(each, _Part) else each for each in self.saved])


def _select_for_offload(saved_for_backward: Sequence[SavedForBackward], room: int) -> tuple[list[_Layer], list[Tensor]]:
    """Layers of which tensors leave into `room` bytes, and these tensors."""
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
    """Bytes of a place in which tensors of such shapes and formats wait."""
    return sum(-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in parts)


def _in_places(region: Tensor, parts: Sequence[_Part]) -> Iterator[Tensor]:
    start = 0
    for part in parts:
        yield part.in_place(region[start:])
        start += part.num_bytes


class SavedActivations:
    """Owns the activations of one rank between forward and backward."""

    def __init__(
        self,
        activation_buffer: PinnedActivationBuffer | None,
        *,
        device: torch.device,
        waiting: Waiting,
        copy_lookahead: int = 1,
        spans: Spans = NO_SPANS,
    ) -> None:
        """Take the buffer, which has regions for the stages that offload.

        `waiting` makes contexts in which compute is told to wait.
        `copy_lookahead` is the schedule's: the number of computations that a copy may take.
        """
        self._max_pending_offloads = max_pending_offloads(copy_lookahead)
        self._activation_buffer, self._device, self._waiting, self._spans = activation_buffer, device, waiting, spans
        self._to_host, self._to_device = new_stream(device), new_stream(device)
        self._saved: dict[tuple[int, int], list[SavedForBackward]] = {}
        self._pending_offloads: deque[_PendingOffload] = deque()
        self._arrivals: dict[tuple[int, int], Event] = {}
        """Ends of the last copies: to the host, then back."""
        self._offloaded: dict[tuple[int, int], list[_Layer]] = {}
        """Layers of a stage and microbatch whose tensors wait on the host."""

    def __len__(self) -> int:
        return len(self._saved) + len(self._arrivals)

    def put(self, stage: int, microbatch: int, saved_for_backward: list[SavedForBackward]) -> None:
        """Keep what `StageModule.forward` gave."""
        self._saved[stage, microbatch] = saved_for_backward

    def take(self, stage: int, microbatch: int) -> list[SavedForBackward]:
        """Give back what was put, for backward; compute waits for what came back."""
        key = stage, microbatch
        arrival = self._arrivals.pop(key, None)
        if arrival is not None:
            with self._waiting():
                arrival.wait()
        return self._saved.pop(key)

    def look(self, stage: int, microbatch: int, *, comes_again: bool) -> list[Tensor]:
        """Return what was put, for keys and values; what came back from the host and `comes_again` is forgotten."""
        key = stage, microbatch
        was_stashed = key in self._arrivals
        saved_for_backward = self.take(stage, microbatch)
        if not (was_stashed and comes_again):
            self._saved[key] = saved_for_backward
        return tensors_of(saved_for_backward)

    def offload(self, stage: int, microbatch: int) -> None:
        """Start to copy what was put to the host; compute waits for the copies before the last ones."""
        region, key = self._region(stage, microbatch), (stage, microbatch)
        self._offloaded[key], leaving = _select_for_offload(self._saved.pop(key), region.nbytes)
        parts = [part for layer in self._offloaded[key] for part in layer.parts]
        done = record_current(self._device)
        with self._to_host.run():
            done.wait()
            with self._spans.device_span(Lane.OFFLOAD_ACTIVATIONS, f"S{stage}.{microbatch}"):
                for target, part, source in zip(_in_places(region, parts), parts, leaving, strict=True):
                    target.copy_(part.in_a_row(source), non_blocking=True)
            arrival = self._arrivals[key] = self._to_host.record()
        self._pending_offloads.append(_PendingOffload(leaving, arrival))
        self._let_go(self._max_pending_offloads)

    def prefetch(self, stage: int, microbatch: int) -> None:
        """Start to copy it back; `take` then gives it."""
        key = stage, microbatch
        parts = [part for layer in self._offloaded[key] for part in layer.parts]
        sources = [*_in_places(self._region(stage, microbatch), parts)]
        self._let_go(0)
        back = [part.empty(self._device) for part in parts]
        is_free = record_current(self._device)  # of what their memory was before
        with self._to_device.run():
            is_free.wait()
            if key in self._arrivals:  # or it has come back before
                self._arrivals[key].wait()
            with self._spans.device_span(Lane.PREFETCH_ACTIVATIONS, f"T{stage}.{microbatch}"):
                for part, target, source in reversed([*zip(parts, back, sources, strict=True)]):
                    part.in_a_row(target).copy_(source, non_blocking=True)
            self._arrivals[key] = self._to_device.record()
        tensors = iter(back)
        self._saved[key] = [layer.saved_for_backward(tensors) for layer in self._offloaded[key]]

    def clear(self) -> None:
        """Forget everything, after an error; copies may still run."""
        self._saved.clear()
        self._arrivals.clear()
        self._pending_offloads.clear()
        self._offloaded.clear()

    def _region(self, stage: int, microbatch: int) -> Tensor:
        assert self._activation_buffer is not None, f"there is no room on the host for what stage {stage} keeps"
        return self._activation_buffer.region(stage, microbatch)

    def _let_go(self, most: int) -> None:
        """Give back the memory of what has left, but for the last `most`; compute waits until it has."""
        while len(self._pending_offloads) > most:
            with self._waiting():
                self._pending_offloads.popleft().arrival.wait()
