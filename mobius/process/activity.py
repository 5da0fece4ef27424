"""Current activity of a rank: cheap enough to record for every action, and read only when the rank stalls.

main thread      start_step(12)  start_action(F4.1)  waiting("neighbours", rank=0) ...      one assignment each
other threads                start_task("optimizer", "stage 3")  end_task("optimizer")      one assignment each
watchdog                                                         last_progress, describe    all of the formatting
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Wait:
    cause: object
    rank: int | None
    stage: int | None
    since: float


class Activity:
    """Current activity of one rank. Any thread may call it.

    Before `describe`, no method takes a lock, blocks or formats text.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._step: int | None = None
        self._doing: tuple[object, float] = ("the start", clock())
        self._waiting: _Wait | None = None
        self._last_tick = clock()
        self._workers: dict[str, tuple[object, float]] = {}
        self.device_position: Callable[[], object] | None = None
        """Returns the device's position, which the host does not know because it runs ahead. Called only while the host
        stalls, in a thread that may hang. A result that differs from the previous one counts as progress."""
        self.is_warming_up = False
        """Whether code may be compiling now, which reports no progress."""

    def start_step(self, step: int) -> None:
        """Record that the rank starts `step`, counted from 1."""
        self._step = step
        self.start_action("the start of the step")

    def start_action(self, action: object) -> None:
        """Record that the main thread starts `action`: an action of the schedule, or a text that completes "at ..."."""
        self._doing = action, self._clock()

    def progress(self) -> None:
        """Record progress in a long task; loops over tensors, files or microbatches call it."""
        self._last_tick = self._clock()

    @contextmanager
    def waiting(self, cause: object, *, rank: int | None = None, stage: int | None = None) -> Iterator[None]:
        """Mark a block in which the main thread waits for `cause`, from `rank` or from `stage` if given."""
        before, self._waiting = self._waiting, _Wait(cause, rank, stage, self._clock())
        try:
            yield
        finally:
            self._waiting = before
            self._last_tick = self._clock()

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Mark a block in which code may be compiled, so that the watchdog waits longer."""
        self.progress()
        self.is_warming_up = True
        try:
            yield
        finally:
            self.progress()  # first, so that the watchdog sees progress before the limit shrinks
            self.is_warming_up = False

    def start_task(self, worker: str, what: object) -> None:
        """Record that `worker`, a thread other than the main thread, such as the optimizer's, starts `what`."""
        self._workers[worker] = what, self._clock()

    def end_task(self, worker: str) -> None:
        """Record that `worker` has finished its task."""
        self._workers.pop(worker, None)
        self._last_tick = self._clock()

    @property
    def last_progress(self) -> float:
        """Latest time of the clock at which a thread of the rank began or ended something."""
        wait = self._waiting
        times = [self._doing[1], self._last_tick, *(since for _, since in list(self._workers.values()))]
        return max(times if wait is None else [*times, wait.since])

    def describe(self) -> list[str]:
        """Lines for a reader: step, action with stage and microbatch, wait and workers, with their times."""
        now, (action, since), wait = self._clock(), self._doing, self._waiting
        step = "before the first step" if self._step is None else f"in step {self._step}"
        lines = [f"{step}, at {_action_text(action)} for {format_duration(now - since)}"]
        if wait is not None:
            stage = "" if wait.stage is None else f" (output of stage {wait.stage})"
            rank = "" if wait.rank is None else f", from rank {wait.rank}"
            lines.append(f"waits for {wait.cause}{stage}{rank} for {format_duration(now - wait.since)}")
        for worker, (what, begun) in sorted(self._workers.items()):
            lines.append(f"{worker}: at {what} for {format_duration(now - begun)}")
        return lines


def _action_text(action: object) -> str:
    """`F4.1 (stage 4, microbatch 1)`; a text, which has no stage or microbatch, stays unchanged."""
    places = [
        f"{name} {value}" for name in ("stage", "microbatch") if (value := getattr(action, name, None)) is not None
    ]
    return f"{action} ({', '.join(places)})" if places else str(action)


def format_duration(seconds: float) -> str:
    """`12.3 s`, `30 min 5 s` or `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
