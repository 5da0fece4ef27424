"""Measures copies and CPU optimizers while all ranks work at once, for a profile. Collective.

Both rates depend on the host's memory bandwidth. Similar machines, or the same machine an hour later, updated 1.5 to
2.4e9 parameters per second and rank (docs/decisions/0013-host-memory.md). So a run first measures for a second or two.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from mobius.distributed.transport import Transport
from mobius.engine.adamw import AdamWSettings, FlatAdamW
from mobius.engine.adamw_cpu import CPUAdamW
from mobius.engine.host_arena import HostArena, lock_pages, unlock_pages
from mobius.engine.stage_state import StageState
from mobius.hardware.devices import MIN_THREADS_TO_SPARE, NUM_RESERVED_THREADS
from mobius.hardware.streams import Event, new_stream
from mobius.models.layout import StageLayout
from mobius.planner.profile import CopyRates, Profile
from mobius.planner.timer import MIN_REPEATS, CollectiveTimer, Work

SETTINGS = AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01)
COPY_BYTES, CPU_PARAMETERS = 2**26, 2**25
"""Sizes of one copy and one update. Measuring takes 128 MiB of GPU memory and 0.6 GiB of host memory."""
PART_SECONDS = 0.15
ENOUGH, SHARES = 0.95, (0.375, 0.5, 0.75)
"""Fewer optimizer threads are tried: these shares of all threads, ascending. The first share that reaches 0.95 of the
rate of all threads is used. On H200s with 16 virtual CPUs, 14 threads update 4.9e9 parameters/s, 10 threads 4.3e9, and
8 or 6 threads 3.4e9. On a host of 64 cores and four H200s, 6 threads are as fast as 14."""
UPDATES_WITHIN_STEP = 0.87
"""Rate of updates within a step, while Python runs, / measured rate: 6.3 / 7.3e9 on one H200, 1.7 / 2.0e9 on each of
four H200s."""


@dataclass(frozen=True)
class HostRates:
    """Rates of one rank while all ranks do the same work; all except `copies_each_way` are fields of a profile."""

    copies_each_way: float
    """Bytes per second of copies in each direction, while copies in both directions run."""
    cpu_adamw_together: float
    cpu_adamw_beside_copies: float
    copies_beside_cpu_adamw: float
    cpu_adamw_bytes: int
    host_bandwidth: float
    optimizer_threads: int = 0

    def profile_fields(self) -> dict[str, Any]:
        """Return the fields of a profile by name."""
        return {name: value for name, value in asdict(self).items() if name != "copies_each_way"}


def measure_host_rates(
    dtype: torch.dtype,
    *,
    device: torch.device,
    transport: Transport,
    kernel: CPUAdamW | None,
    reduced_format: str = "",
) -> HostRates:
    """Measure copies in both directions, updates, and updates during such copies; releases all memory.

    `reduced_format` is the format of the layers' optimizer states; empty if it is the usual format.
    """
    timer = CollectiveTimer(device, transport, part_seconds=PART_SECONDS)
    with Copies(device) as copies:
        each_way = copies.num_bytes / timer.seconds(copies.both)
        _, rates = measure_cpu_optimizer(timer, dtype, kernel, copies, each_way=each_way, reduced_format=reduced_format)
    timer.forget()
    return rates


def with_fewest_threads(
    dtype: torch.dtype,
    *,
    device: torch.device,
    transport: Transport,
    kernel: CPUAdamW | None,
    reduced_format: str = "",
) -> CPUAdamW | None:
    """Return `kernel` with the fewest threads that update nearly as fast as all its threads; collective.

    Other cores are then free to launch the GPU's kernels and to start copies.
    """
    if kernel is None or kernel.num_threads < MIN_THREADS_TO_SPARE - NUM_RESERVED_THREADS:
        return kernel
    timer, state = CollectiveTimer(device, transport, part_seconds=PART_SECONDS), _make_state(dtype, reduced_format)

    def seconds(other: CPUAdamW) -> float:
        return timer.seconds(partial(update_once, FlatAdamW(SETTINGS, other), state))

    wanted = seconds(kernel) / ENOUGH
    fewer = (kernel.with_threads(math.ceil(share * kernel.num_threads)) for share in SHARES)
    return next((other for other in fewer if seconds(other) <= wanted), kernel)


def with_host_rates(profile: Profile, rates: HostRates) -> Profile:
    """Return `profile` with the measured rates of the host."""
    copies, each_way = profile.copies, rates.copies_each_way
    return replace(
        profile,
        basis=f"{profile.basis}, the host measured"
        + (f" with {rates.optimizer_threads} optimizer threads of each rank" if rates.optimizer_threads else ""),
        copies=replace(
            copies,
            host_to_device_duplex=each_way,
            device_to_host_duplex=each_way,
            host_to_device_all_gpus=max(copies.host_to_device_all_gpus, each_way),
            device_to_host_all_gpus=max(copies.device_to_host_all_gpus, each_way),
        ),
        cpu_adamw=max(profile.cpu_adamw, rates.cpu_adamw_together),
        **rates.profile_fields(),
    )


class Copies:
    """Page-locked and device memory with a stream for each direction, allocated by the `with` statement."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.num_bytes = device, COPY_BYTES
        self._streams = [new_stream(device) for _ in range(2)]

    def __enter__(self) -> Copies:
        self._host = [torch.zeros(self.num_bytes, dtype=torch.uint8) for _ in range(2)]
        self._on_device = [torch.zeros(self.num_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        if self._device.type == "cuda":
            for tensor in self._host:  # not pin_memory: torch would never release the memory
                lock_pages(tensor)
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for copies and release the memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            for tensor in self._host:
                unlock_pages(tensor)
        del self._host, self._on_device

    def host_to_device(self) -> None:
        """Start a copy to the device."""
        with self._streams[0].run():
            self._on_device[0].copy_(self._host[0], non_blocking=True)

    def device_to_host(self) -> None:
        """Start a copy to the host."""
        with self._streams[1].run():
            self._host[1].copy_(self._on_device[1], non_blocking=True)

    def both(self) -> None:
        """Start one copy in each direction."""
        self.host_to_device()
        self.device_to_host()

    def mark(self) -> list[Event]:
        """Record an event after the copies started so far, for each direction."""
        return [stream.record() for stream in self._streams]


def measure_copies(timer: CollectiveTimer, copies: Copies) -> CopyRates:
    """Return the bytes per second of `copies` on one GPU alone and on all GPUs at once."""
    both, ways = timer.seconds(copies.both), (copies.host_to_device, copies.device_to_host)
    seconds = (*map(timer.seconds_alone, ways), *map(timer.seconds, ways), both, both)
    return CopyRates(*(copies.num_bytes / each for each in seconds))


def measure_cpu_optimizer(
    timer: CollectiveTimer,
    dtype: torch.dtype,
    kernel: CPUAdamW | None,
    copies: Copies,
    *,
    each_way: float,
    reduced_format: str = "",
) -> tuple[float, HostRates]:
    """Return the parameters per second that one rank updates alone within a step, and the rates while all ranks update.

    `each_way` is the rate of `copies` in both directions without updates; on a CPU updates do not change it.
    """
    state = _make_state(dtype, reduced_format)
    update = partial(update_once, FlatAdamW(SETTINGS, kernel), state)
    alone, together = timer.seconds_alone(update), timer.seconds(update)
    during_copies, copy_rate = together, each_way
    if timer.device.type == "cuda":
        # Start enough copies that they last longer than the updates.
        long = 2 * max(timer.part_seconds, MIN_REPEATS * together)
        during_copies, copy_rate = measure_during_copies(
            timer, update, copies, int(long * each_way / copies.num_bytes) + 1
        )
    moved = round((2 * sum(tensor.nbytes for tensor in state.tensors) - state.gradients.nbytes) / CPU_PARAMETERS)
    rate_alone, rate_together, rate_beside_copies = (
        UPDATES_WITHIN_STEP * (CPU_PARAMETERS / seconds) for seconds in (alone, together, during_copies)
    )
    return rate_alone, HostRates(
        copies_each_way=each_way,
        cpu_adamw_together=rate_together,
        cpu_adamw_beside_copies=min(rate_together, rate_beside_copies),
        copies_beside_cpu_adamw=copy_rate,
        cpu_adamw_bytes=moved,
        # The larger traffic (copies or updates): with the smaller one, predicted copies would slow updates too little.
        host_bandwidth=timer.transport.num_ranks * max(2 * each_way, rate_together * moved),
        optimizer_threads=0 if kernel is None else kernel.num_threads,
    )


def measure_during_copies(timer: CollectiveTimer, update: Work, copies: Copies, num_copies: int) -> tuple[float, float]:
    """Return the seconds of `update` during copies in both directions, and the copies' bytes per second each way."""
    repeats = timer.warm_up(update)
    ends: list[Event] = []
    for _ in range(num_copies):
        copies.both()
        ends += copies.mark()
    num_before = sum(end.is_completed() for end in ends)  # do not count copies that ended before the updates began
    start = time.perf_counter()
    for _ in range(repeats):
        update()
    seconds = time.perf_counter() - start
    num_done = sum(end.is_completed() for end in ends) - num_before
    timer.synchronize()
    return timer.mean(seconds / repeats), timer.mean(copies.num_bytes * max(num_done, 1) / 2 / seconds)


@contextlib.contextmanager
def updates_meanwhile(dtype: torch.dtype, kernel: CPUAdamW | None, *, reduced_format: str = "") -> Iterator[None]:
    """Run updates in another thread until the `with` block ends, as a run's optimizer does."""
    update = partial(update_once, FlatAdamW(SETTINGS, kernel), _make_state(dtype, reduced_format))
    update()  # the first update touches its memory for the first time: too slow to measure
    ends = threading.Event()

    def repeat() -> None:
        while not ends.is_set():
            update()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="optimizer") as thread:
        repeated = thread.submit(repeat)
        try:
            yield
        finally:
            ends.set()
            repeated.result()


def _make_state(dtype: torch.dtype, reduced_format: str) -> StageState:
    """Return a stage's state on the host, with gradients."""
    reduced = {"weight"} if reduced_format else ()
    layout = StageLayout.of({"weight": (CPU_PARAMETERS, 1)}, reduced=reduced, reduced_format=reduced_format)
    state = HostArena({0: layout}, dtype=dtype, register=False).states[0]
    state.gradients.fill_(1e-3)
    return state


def update_once(adamw: FlatAdamW, state: StageState) -> None:
    """Update all of `state` once."""
    adamw.update(state, step=1, learning_rate=1e-5, gradient_factor=1.0)
