"""Counts what disks really do in a run: bytes, and the times in which requests were under way."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

LONGEST_SPAN = 1.0
"""Seconds after which a span ends although requests are under way."""
MOST_SPANS = 1024
"""Spans that are remembered; older ones go."""


class BusySpan(NamedTuple):
    """A time in which requests were under way without a pause, by `time.monotonic`, which processes share."""

    begin: float
    end: float
    num_bytes: int


NO_SPAN = BusySpan(0.0, 0.0, 0)


class Traffic:
    """Requests of one kind, reads or writes, in one folder; threads count them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.spans: deque[BusySpan] = deque(maxlen=MOST_SPANS)
        self._begin, self._moved, self._running, self._lock = 0.0, 0, 0, threading.Lock()

    @contextmanager
    def request(self, num_bytes: int) -> Iterator[None]:
        """Context of a request, whose bytes count when it ends."""
        with self._lock:
            if not self._running:
                self._begin = time.monotonic()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._moved += num_bytes
                self.num_bytes += num_bytes
                now = time.monotonic()
                if not self._running or now - self._begin > LONGEST_SPAN:
                    self.spans.append(BusySpan(self._begin, now, self._moved))
                    self._begin, self._moved = now, 0

    def history(self) -> list[BusySpan]:
        """All bytes that have ended: a span at time 0 with those that are forgotten, and the spans."""
        with self._lock:
            left = self.num_bytes - self._moved - sum(span.num_bytes for span in self.spans)
            return [NO_SPAN._replace(num_bytes=left), *self.spans]


def rate_of(spans: Iterable[BusySpan], since: float) -> float:
    """Bytes per second of the spans that begin from `since` on, while at least one of them lasts."""
    num_bytes, seconds, until = 0, 0.0, since
    for span in sorted(span for span in spans if span.begin >= since):
        num_bytes += span.num_bytes
        seconds += max(0.0, span.end - max(until, span.begin))
        until = max(until, span.end)
    return num_bytes / max(seconds, 1e-9)
