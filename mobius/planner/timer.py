"""Timer of work that all ranks do at the same time; results are equal on all ranks. Collective."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from mobius.distributed.transport import Transport, all_gather_numbers

Work = Callable[[], object]
PART_SECONDS = 0.4
MIN_REPEATS, WARM_UP = 3, 2


class CollectiveTimer:
    """Repeats work and returns the mean seconds of one run; equal on all ranks."""

    def __init__(self, device: torch.device, transport: Transport, *, part_seconds: float | None = None) -> None:
        """Take the device and the ranks; work is repeated for `part_seconds`, at least `MIN_REPEATS` times."""
        self.device, self.transport, self.part_seconds = device, transport, part_seconds or PART_SECONDS

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Work) -> float:
        """Return the mean seconds of `work`, run on all ranks at once and without pauses, as in a step."""
        repeats = self.warm_up(work)
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        self.synchronize()
        return self.mean((time.perf_counter() - start) / repeats)

    def warm_up(self, work: Work) -> int:
        """Warm up, wait until the device is idle, and return the number of repeats for all ranks."""
        for _ in range(WARM_UP):
            work()
        # All ranks repeat equally often, so that they run concurrently until the end.
        repeats = max(MIN_REPEATS, int(self.part_seconds / self.mean(max(self._seconds_once(work), 1e-6))))
        self.transport.barrier()
        return repeats

    def launch_seconds(self, work: Work) -> float:
        """Return the host's seconds to enqueue `work` on an idle device, averaged over the ranks; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0.0
        times = []
        for _ in range(MIN_REPEATS):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(MIN_REPEATS):
                work()
            times.append((time.perf_counter() - start) / MIN_REPEATS)
        self.synchronize()
        return self.mean(min(times))

    def slowest_launch(self, work: Work) -> float:
        """Return the host's mean seconds to enqueue `work` on an idle device, on the slowest rank."""
        repeats, own = self.warm_up(work), 0.0
        for _ in range(repeats):
            self.synchronize()
            start = time.perf_counter()
            work()
            own += time.perf_counter() - start
        self.synchronize()
        return float(all_gather_numbers(self.transport.all_ranks, [own / repeats]).max())

    def seconds_alone(self, work: Work) -> float:
        """Return the seconds of `work` while the other ranks wait, averaged over the ranks."""
        own = 0.0
        for rank in range(self.transport.num_ranks):
            self.transport.barrier()
            if rank == self.transport.rank:
                own = min([self._seconds_once(work) for _ in range(WARM_UP + MIN_REPEATS)][WARM_UP:])
        self.transport.barrier()
        return self.mean(own)

    def _seconds_once(self, work: Work) -> float:
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    def mean(self, value: float) -> float:
        """Return the mean of all ranks' values, bit-identical on all ranks."""
        all_ranks = self.transport.all_ranks  # including other replicas, because all plans must be equal
        return float(all_ranks.sum_over_ranks(torch.tensor([value], dtype=torch.float64))) / all_ranks.num_ranks

    def forget(self) -> None:
        """Release torch's cached GPU memory and reset its peak, which a run reports."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
