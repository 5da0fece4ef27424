"""Measures how long compute waited in a step, by cause, without synchronizing while the step runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mobius.hardware.streams import timed_mark
from mobius.schedule.lanes import WaitCause


class WaitClock:
    """Sums waits per cause. On a GPU a wait is the time between two events around it on the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._host_seconds: defaultdict[WaitCause, float] = defaultdict(float)
        self._pairs: list[tuple[WaitCause, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def waiting(self, cause: WaitCause) -> Iterator[None]:
        """Count the time that the compute stream (on a CPU: this thread) waits within the block."""
        if not self._is_cuda:
            with self.blocking(cause):
                yield
            return
        before = timed_mark(self._device)
        yield
        self._pairs.append((cause, before, timed_mark(self._device)))

    @contextmanager
    def blocking(self, cause: WaitCause) -> Iterator[None]:
        """Count the host's time within the block, for waits that block the host while the device is idle."""
        start = time.perf_counter()
        yield
        self._host_seconds[cause] += time.perf_counter() - start

    def collect(self) -> dict[str, float]:
        """Return seconds per cause since the last call; the compute stream must have been synchronized."""
        seconds = {cause.value: self._host_seconds.pop(cause, 0.0) for cause in WaitCause}
        for cause, before, after in self._pairs:
            seconds[cause.value] += before.elapsed_time(after) / 1000
        self._pairs.clear()
        return seconds
