"""Counts the work of disks in a run: bytes, and the times during which requests were running."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Moved = npt.NDArray[np.float64]
"""Result of `moved_by_kind`."""
LONGEST_SPAN = 1.0
"""Seconds after which a span ends even if requests are running."""
MOST_SPANS = 1024
"""Number of spans that are kept; older spans are dropped."""


class BusySpan(NamedTuple):
    """A period in which requests ran without a pause, by `time.monotonic`, a clock that all processes share."""

    begin: float
    end: float
    num_bytes: int


NO_SPAN = BusySpan(0.0, 0.0, 0)


class Traffic:
    """Requests of one kind, reads or writes, in one folder; several threads may count."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.spans: deque[BusySpan] = deque(maxlen=MOST_SPANS)
        self._begin, self._moved, self._running, self._lock = 0.0, 0, 0, threading.Lock()

    @contextmanager
    def request(self, num_bytes: int) -> Iterator[None]:
        """Context of a request; its bytes count when it ends."""
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
        """Return all bytes of ended spans: a span at time 0 with the bytes of dropped spans, then the kept spans."""
        with self._lock:
            left = self.num_bytes - self._moved - sum(span.num_bytes for span in self.spans)
            return [NO_SPAN._replace(num_bytes=left), *self.spans]


def moved_by_kind(reads: Iterable[BusySpan], writes: Iterable[BusySpan], since: float) -> Moved:
    """Return bytes and seconds of the spans that begin at `since` or later.

    [3, 3]: read bytes, written bytes and seconds (columns) while there were only reads, only writes, or both (rows).
    The bytes of a span are spread evenly over its time.
    """
    changes = list[tuple[float, int, int, float]]()
    for way, spans in enumerate((reads, writes)):
        for begin, end, num_bytes in spans:
            if begin >= since and end > begin:
                rate = num_bytes / (end - begin)
                changes += [(begin, way, 1, rate), (end, way, -1, -rate)]
    moved, running, rates, before = np.zeros((3, 3)), [0, 0], np.zeros(2), 0.0
    for now, way, number, rate in sorted(changes):
        if any(running):
            row = 2 if all(running) else 0 if running[0] else 1
            moved[row] += (now - before) * np.array([*rates, 1.0])
        running[way] += number
        rates[way] += rate
        before = now
    return moved
