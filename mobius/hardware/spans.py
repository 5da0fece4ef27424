"""Timeline of one rank's work in a few steps: named spans of the device and the host, on lanes.

Nothing synchronizes during a step: two events measure a device span, and they are read after the run.

    perf_counter     base ........................ start ====== end       one clock for all processes of a node
                      |                              |           |
    CUDA events    base event .................... event ===== event      base + base.elapsed_time(event)
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch

from mobius.hardware.streams import timed_mark
from mobius.schedule.action import Direction
from mobius.schedule.lanes import Lane, LaneSpan


class Waitable(Protocol):
    """A message in flight."""

    def wait(self) -> object:
        """Make the current stream wait for the message."""


_NOTHING = nullcontext()


class Spans:
    """Interface through which parts of a rank report their work; thread-safe. This base class records nothing."""

    def device_span(self, lane: Lane, name: str) -> AbstractContextManager[object]:
        """Record how long the work of the block takes on the current stream; on a CPU, the host's time."""
        return _NOTHING

    def host_span(self, lane: Lane, name: str) -> AbstractContextManager[object]:
        """Record how long the block takes on the host."""
        return _NOTHING

    def message(self, lane: Lane, peer: int, direction: Direction, work: Waitable) -> None:
        """Record a message from now, on the current stream, until it completes; call it right after enqueuing it.

        On a CPU the span has no duration, because nothing reports when a message completes.
        """


NO_SPANS = Spans()
_Mark = float | torch.cuda.Event


class SpanRecorder(Spans):
    """Spans of one rank in `steps`. For each edge, one stream waits for the messages of the edge."""

    def __init__(self, device: torch.device, steps: range) -> None:
        """Record the steps in `steps`, counted from 1; allocates memory only for these steps."""
        self._device, self._steps = device, steps
        self._is_cuda = device.type == "cuda"
        self._step: int | None = None
        self._current = ""
        # Fields of a LaneSpan, but start and end may be events that are not reached yet. Appending is thread-safe.
        self._recorded: list[tuple[Lane, str, int, _Mark, _Mark, int | None]] = []
        self._base: tuple[float, torch.cuda.Event] | None = None
        """Host time of a reference event."""
        self._edges: dict[tuple[Lane, int, Direction], torch.cuda.Stream] = {}

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record all spans that start before the next step, if `number` is in `steps`.

        The first recorded step synchronizes once.
        """
        if number not in self._steps:
            self._step = None
            yield
            return
        if self._is_cuda and self._base is None:
            torch.cuda.synchronize(self._device)  # sync: once, before the first recorded step
            before, event = time.perf_counter(), timed_mark(self._device)
            event.synchronize()
            self._base = (before + time.perf_counter()) / 2, event
        self._step, start = number, time.perf_counter()
        yield
        self._recorded.append((Lane.STEP, f"step {number}", number, start, time.perf_counter(), None))

    def device_span(self, lane: Lane, name: str) -> AbstractContextManager[object]:
        """Record the time between two events around the block; does nothing outside of `steps`."""
        step = self._step
        return _NOTHING if step is None else self._span(lane, name, step, self._mark)

    def host_span(self, lane: Lane, name: str) -> AbstractContextManager[object]:
        """Record how long the block takes on the host; does nothing outside of `steps`."""
        step = self._step
        return _NOTHING if step is None else self._span(lane, name, step, time.perf_counter)

    def message(self, lane: Lane, peer: int, direction: Direction, work: Waitable) -> None:
        """Record a message; on a GPU, the stream of the message's edge waits for it."""
        if self._step is None:
            return
        start = end = self._mark()
        if self._is_cuda:
            # One stream per edge: messages of an edge arrive in order, so waiting for one does not delay another.
            edge = lane, peer, direction
            if edge not in self._edges:
                self._edges[edge] = torch.cuda.Stream(self._device)
            with torch.cuda.stream(self._edges[edge]):
                work.wait()
                end = self._mark()
        name = f"{self._current} to {peer}".lstrip() if lane is Lane.SEND else f"from {peer}"
        self._recorded.append((lane, name, self._step, start, end, peer))

    def collect(self) -> list[LaneSpan]:
        """Return all spans so far, by start time; synchronizes. Compute spans begin after the waits within them."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)  # sync: once, after the last step
        measured = [
            LaneSpan(lane, name, step, self._seconds(start), self._seconds(end), peer)
            for lane, name, step, start, end, peer in self._recorded
        ]
        return sorted(compute_without_waits(messages_in_turn(measured)), key=lambda span: (span.start, -span.end))

    @contextmanager
    def _span(self, lane: Lane, name: str, step: int, mark: Callable[[], _Mark]) -> Iterator[None]:
        start = mark()
        if lane is Lane.COMPUTE:
            self._current = name
        yield
        if lane is Lane.COMPUTE:
            self._current = ""
        self._recorded.append((lane, name, step, start, mark(), None))

    def _mark(self) -> _Mark:
        return timed_mark(self._device) if self._is_cuda else time.perf_counter()

    def _seconds(self, mark: _Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert self._base is not None
        seconds, base = self._base
        milliseconds: float = base.elapsed_time(mark)
        return seconds + milliseconds / 1000


def messages_in_turn(spans: list[LaneSpan]) -> list[LaneSpan]:
    """Return spans where each message to (or from) a rank starts after the previous message to (or from) it ends.

    Spans are sorted by end, because messages of different edges between two ranks may overtake each other.
    """
    turned: list[LaneSpan] = []
    ends: dict[tuple[Lane, int | None], float] = {}
    for span in sorted(spans, key=lambda span: span.end):
        if span.lane in (Lane.SEND, Lane.RECEIVE):
            peer = (span.lane, span.peer)
            start = max(span.start, ends.get(peer, span.start))
            ends[peer] = max(span.end, start)
            span = replace(span, start=start, end=ends[peer])
        turned.append(span)
    return turned


def compute_without_waits(spans: list[LaneSpan]) -> list[LaneSpan]:
    """Start each compute span after the last wait within it, because an action's waits come before its work."""
    waits = sorted((span.start, span.end) for span in spans if span.lane is Lane.WAIT)
    trimmed = []
    for span in spans:
        if span.lane is Lane.COMPUTE:
            within = waits[bisect_left(waits, (span.start,)) : bisect_right(waits, (span.end,))]
            span = replace(span, start=max([span.start, *(end for _, end in within if end <= span.end)]))
        trimmed.append(span)
    return trimmed
