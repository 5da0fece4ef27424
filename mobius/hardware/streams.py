"""Minimal interface to the streams and events of one device; callers decide which stream runs which work.

On a CPU, everything is synchronous, and the base classes do nothing. An event finds its stream by device index:
otherwise torch would look up the current device, which takes longer than the event, five hundred times in a step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor


class Event:
    """A point in a stream; on a CPU it is reached at once."""

    def wait(self) -> None:
        """Make the current stream wait for the point; does not block the host."""

    def synchronize(self) -> None:
        """Make the host wait for the point."""

    def is_completed(self) -> bool:
        """Return whether the point has been reached, without waiting."""
        return True


class Stream:
    """An ordered queue of device work."""

    def run(self) -> AbstractContextManager[object]:
        """Return a context in which work goes to this stream."""
        return nullcontext()

    def record(self) -> Event:
        """Return the point after all work on this stream so far."""
        return Event()

    def record_use(self, tensor: Tensor) -> None:
        """Prevent reuse of the memory of `tensor`, from another stream, until this stream is done with it."""


@dataclass(eq=False)
class DeviceBuffer:
    """Device memory that streams use one after the other."""

    values: Tensor
    free: Event = field(default_factory=Event)
    """Event after the last use; the next use waits for it."""
    ready: Event | None = None
    """Event after the copy that fills the buffer; None once the compute stream waits for it."""


class CudaEvent(Event):
    """A point in a stream of one GPU."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Record the point after all work on `stream` so far."""
        self._device_index = stream.device.index
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device_index))

    def synchronize(self) -> None:
        """Make the host wait for the point."""
        self._event.synchronize()

    def is_completed(self) -> bool:
        """Return whether the point has been reached, without waiting."""
        return bool(self._event.query())


class _CudaStream(Stream):
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def record(self) -> Event:
        return CudaEvent(self._stream)

    def record_use(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)


def new_stream(device: torch.device) -> Stream:
    """Return a new copy stream of `device`."""
    return _CudaStream(device) if device.type == "cuda" else Stream()


def record_current(device: torch.device) -> Event:
    """Return the point after all work on the current (compute) stream so far."""
    return CudaEvent(torch.cuda.current_stream(device.index)) if device.type == "cuda" else Event()


def timed_mark(device: torch.device) -> torch.cuda.Event:
    """Return a timed event after all work on the current stream so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device.index))
    return event
