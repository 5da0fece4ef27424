"""Streams and events of one device behind one small interface; what runs on which is the caller's business.

On a CPU everything is synchronous and they do nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Make the current stream wait for the point; the host goes on."""

    def synchronize(self) -> None:
        """Make the host wait for the point."""

    def query(self) -> bool:
        """Whether the point has been reached; nobody waits."""


class Stream(Protocol):
    """An ordered queue of device work."""

    def run(self) -> AbstractContextManager[object]:
        """Within it, work goes to this stream."""

    def record(self) -> Event:
        """The point behind all work given to this stream so far."""

    def keep(self, tensor: Tensor) -> None:
        """Do not reuse the memory of `tensor`, which another stream made, before this stream is done with it."""


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def record(self) -> Event:
        return cast(Event, self._stream.record_event())

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)


class _NoEvent:
    def wait(self) -> None:
        return

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


class _NoStream:
    def run(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> Event:
        return _NoEvent()

    def keep(self, tensor: Tensor) -> None:
        return


def new_stream(device: torch.device) -> Stream:
    """A copy stream of `device`."""
    return _CudaStream(device) if device.type == "cuda" else _NoStream()


def record_current(device: torch.device) -> Event:
    """The point behind all work given to the current (compute) stream so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else _NoEvent()
