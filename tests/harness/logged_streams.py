"""Streams and events that remember what lies behind what, on a machine without a GPU.

Each stream counts its own points; an event hands its stream's knowledge to the stream that waits for it. So a point
precedes another one if the order of streams and events says so, and not because the test ran it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from mobius.engine import gradient_sums, reductions, stage_weights
from mobius.hardware.streams import Event, Stream

Clock = dict[str, int]


class LoggedEvent(Event):
    """A point of one stream."""

    def __init__(self, log: StreamLog, clock: Clock) -> None:
        self._log, self._clock = log, dict(clock)

    def wait(self) -> None:
        self._log.learn(self._log.current, self._clock)

    def synchronize(self) -> None:
        self._log.learn("host", self._clock)


class LoggedStream(Stream):
    """A stream by its name."""

    def __init__(self, log: StreamLog, name: str) -> None:
        self._log, self._name = log, name

    def run(self) -> AbstractContextManager[object]:
        return self._log.within(self._name)

    def record(self) -> Event:
        return self._log.record(self._name)


class StreamLog:
    """Owns the clocks; what is not within a stream runs on "compute"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put such streams and events in the place of those of the memory."""
        self.current = "compute"
        self._clocks: dict[str, Clock] = {"compute": {}, "host": {}}
        self._points: dict[str, tuple[str, Clock]] = {}
        for module in (stage_weights, reductions):
            monkeypatch.setattr(module, "new_stream", self._new_stream)
        for module in (stage_weights, reductions, gradient_sums):
            monkeypatch.setattr(module, "record_current", lambda device: self.record(self.current))

    def mark(self, name: str, *, on: str | None = None) -> None:
        """Enqueue work of that name to the current stream; `on` the host, what it knows by then."""
        stream = on or self.current
        clock = self._clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        self._points[name] = stream, dict(clock)

    def precedes(self, first: str, second: str) -> bool:
        """Whether the work of the first name is done before that of the second begins, by streams and events alone."""
        stream, clock = self._points[first]
        return self._points[second][1].get(stream, 0) >= clock[stream]

    @contextmanager
    def within(self, stream: str) -> Iterator[None]:
        """Let work go to a stream."""
        before, self.current = self.current, stream
        yield
        self.current = before

    def record(self, stream: str) -> Event:
        """The point behind all that the stream was given so far."""
        clock = self._clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1  # a point of its own, behind the work before
        return LoggedEvent(self, clock)

    def learn(self, stream: str, clock: Clock) -> None:
        """Let a stream go on behind all that `clock` knows."""
        own = self._clocks[stream]
        for name, count in clock.items():
            own[name] = max(own.get(name, 0), count)

    def _new_stream(self, device: torch.device) -> Stream:
        name = f"stream {len(self._clocks)}"
        self._clocks[name] = {}
        return LoggedStream(self, name)
