"""Holds what forward leaves for backward, by stage and microbatch; that of stashed stages waits on the host.

A copy never stops the host. The memory of what leaves is kept until compute has waited for its copy, so that what
compute makes next cannot lie where a copy still reads:

    compute     F0   F1   F2   waits for S0, whose memory is free then   F3   waits for S1   F4
    to host          S0   S1   S2 ...
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from mobius.limits import MAX_LEAVING
from mobius.memory.activation_home import ActivationHome
from mobius.memory.spans import NO_SPANS, Spans
from mobius.memory.streams import Event, new_stream, record_current
from mobius.runtime.stage import Kept, tensors_of
from mobius.schedule.lanes import Lane

Waiting = Callable[[], AbstractContextManager[None]]
ALIGNMENT = 16
"""Bytes of which each tensor on the host begins at a multiple."""


@dataclass(frozen=True)
class _Leaving:
    kept: list[Tensor]
    arrival: Event


@dataclass(frozen=True)
class _Part:
    """A tensor that waits on the host."""

    shape: torch.Size
    dtype: torch.dtype

    def in_place(self, place: Tensor) -> Tensor:
        """View of the bytes that begin at a place as the tensor."""
        return place[: self.shape.numel() * self.dtype.itemsize].view(self.dtype).view(self.shape)


def home_bytes(*parts: tuple[Sequence[int], torch.dtype]) -> int:
    """Bytes of a place in which tensors of such shapes and formats wait."""
    return sum(-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in parts)


def _in_places(place: Tensor, parts: Sequence[_Part]) -> Iterator[Tensor]:
    start = 0
    for part in parts:
        yield part.in_place(place[start:])
        start += home_bytes((part.shape, part.dtype))


class Stash:
    """Owns the activations of one rank between forward and backward."""

    def __init__(
        self, home: ActivationHome | None, *, device: torch.device, waiting: Waiting, spans: Spans = NO_SPANS
    ) -> None:
        """`home` has places for the stashed stages; `waiting` makes contexts in which compute is told to wait."""
        self._home, self._device, self._waiting, self._spans = home, device, waiting, spans
        self._to_host, self._to_device = new_stream(device), new_stream(device)
        self._kept: dict[tuple[int, int], list[Kept]] = {}
        self._leaving: deque[_Leaving] = deque()
        self._arrivals: dict[tuple[int, int], Event] = {}
        """Ends of the last copies: to the host, then back."""
        self._parts: dict[int, list[_Part]] = {}
        """Tensors that a stage keeps of each microbatch, where they wait on the host."""

    def __len__(self) -> int:
        return len(self._kept) + len(self._arrivals)

    def put(self, stage: int, microbatch: int, kept: list[Kept]) -> None:
        """Keep what `StageModule.forward` gave."""
        self._kept[stage, microbatch] = kept

    def take(self, stage: int, microbatch: int) -> list[Kept]:
        """Give back what was put, for backward; compute waits for what came back."""
        key = stage, microbatch
        arrival = self._arrivals.pop(key, None)
        if arrival is not None:
            with self._waiting():
                arrival.wait()
        return self._kept.pop(key)

    def look(self, stage: int, microbatch: int, *, comes_again: bool) -> list[Tensor]:
        """Return what was put, for keys and values; what came back from the host and `comes_again` is forgotten."""
        key = stage, microbatch
        was_stashed = key in self._arrivals
        kept = self.take(stage, microbatch)
        if not (was_stashed and comes_again):
            self._kept[key] = kept
        return tensors_of(kept)

    def send(self, stage: int, microbatch: int) -> None:
        """Start to copy what was put to the host; compute waits for the copies before the last ones."""
        place, key = self._place(stage, microbatch), (stage, microbatch)
        leaving = tensors_of(self._kept.pop(key))
        parts = self._parts[stage] = [_Part(each.shape, each.dtype) for each in leaving]
        done = record_current(self._device)
        with self._to_host.run():
            done.wait()
            with self._spans.device_span(Lane.STASH, f"S{stage}.{microbatch}"):
                for target, source in zip(_in_places(place, parts), leaving, strict=True):
                    target.copy_(source, non_blocking=True)
            arrival = self._arrivals[key] = self._to_host.record()
        self._leaving.append(_Leaving(leaving, arrival))
        self._let_go(MAX_LEAVING)

    def fetch(self, stage: int, microbatch: int) -> None:
        """Start to copy it back; `take` then gives it."""
        key, parts = (stage, microbatch), self._parts[stage]
        sources = [*_in_places(self._place(stage, microbatch), parts)]
        self._let_go(0)
        back = [torch.empty(part.shape, dtype=part.dtype, device=self._device) for part in parts]
        is_free = record_current(self._device)  # of what their memory was before
        with self._to_device.run():
            is_free.wait()
            if key in self._arrivals:  # or it has come back before
                self._arrivals[key].wait()
            with self._spans.device_span(Lane.FETCH, f"T{stage}.{microbatch}"):
                for target, source in zip(reversed(back), reversed(sources), strict=True):
                    target.copy_(source, non_blocking=True)
            self._arrivals[key] = self._to_device.record()
        self._kept[key] = [*back]

    def clear(self) -> None:
        """Forget everything, after an error; copies may still run."""
        self._kept.clear()
        self._arrivals.clear()
        self._leaving.clear()
        self._parts.clear()

    def _place(self, stage: int, microbatch: int) -> Tensor:
        assert self._home is not None, f"there is no room on the host for what stage {stage} keeps"
        return self._home.place(stage, microbatch)

    def _let_go(self, most: int) -> None:
        """Give back the memory of what has left, but for the last `most`; compute waits until it has."""
        while len(self._leaving) > most:
            with self._waiting():
                self._leaving.popleft().arrival.wait()
