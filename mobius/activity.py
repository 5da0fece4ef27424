"""Where a rank is in its work, told so cheaply that every action can tell it, and read only when the rank stands still.

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
    """State of what one rank does now. Any thread may call.

    Nothing here takes a lock, blocks or formats before `describe`.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds that never jump, as the clock on the wall may."""
        self._clock = clock
        self._step: int | None = None
        self._doing: tuple[object, float] = ("the start", clock())
        self._waiting: _Wait | None = None
        self._last_tick = clock()
        self._workers: dict[str, tuple[object, float]] = {}
        self.device_position: Callable[[], object] | None = None
        """Tells what the device does, which a host that is ahead of it does not know; it is asked only when the host
        stands still, in a thread that may hang, and an answer that differs from the one before is progress."""
        self.is_warming_up = False
        """Whether code may be compiled now, of which nobody tells how far it is."""

    def start_step(self, step: int) -> None:
        """From now on the rank works at `step`, counted from 1."""
        self._step = step
        self.start_action("the start of the step")

    def start_action(self, action: object) -> None:
        """From now on the main thread does `action`: one of the schedule, or a text that ends "at ..."."""
        self._doing = action, self._clock()

    def progress(self) -> None:
        """One more part of a long piece of work is done: a loop over tensors, files or microbatches calls it."""
        self._last_tick = self._clock()

    @contextmanager
    def waiting(self, cause: object, *, rank: int | None = None, stage: int | None = None) -> Iterator[None]:
        """The main thread waits within for `cause`, for what `rank` sends or `stage` makes if there is one."""
        before, self._waiting = self._waiting, _Wait(cause, rank, stage, self._clock())
        try:
            yield
        finally:
            self._waiting = before
            self._last_tick = self._clock()

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Within, code may be compiled: whoever watches has more patience."""
        self.progress()
        self.is_warming_up = True
        try:
            yield
        finally:
            self.progress()  # before: who looks in between sees that something was done
            self.is_warming_up = False

    def start_task(self, worker: str, what: object) -> None:
        """From now on a thread beside the main one, such as the optimizer's, is at `what`."""
        self._workers[worker] = what, self._clock()

    def end_task(self, worker: str) -> None:
        """That thread has done what it was at."""
        self._workers.pop(worker, None)
        self._last_tick = self._clock()

    @property
    def last_progress(self) -> float:
        """Time of the clock at which any thread of the rank began or ended anything."""
        wait = self._waiting
        times = [self._doing[1], self._last_tick, *(since for _, since in list(self._workers.values()))]
        return max(times if wait is None else [*times, wait.since])

    def describe(self) -> list[str]:
        """Lines that say it to a reader: step, action with stage and microbatch, wait and workers, with their times."""
        now, (action, since), wait = self._clock(), self._doing, self._waiting
        step = "before the first step" if self._step is None else f"in step {self._step}"
        lines = [f"{step}, at {_action_text(action)} for {format_duration(now - since)}"]
        if wait is not None:
            stage = "" if wait.stage is None else f", what stage {wait.stage} makes"
            rank = "" if wait.rank is None else f", from rank {wait.rank}"
            lines.append(f"waits for {wait.cause}{stage}{rank} for {format_duration(now - wait.since)}")
        for worker, (what, begun) in sorted(self._workers.items()):
            lines.append(f"{worker}: at {what} for {format_duration(now - begun)}")
        return lines


def _action_text(action: object) -> str:
    """`F4.1 (stage 4, microbatch 1)`; a text, which has neither, as it is."""
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
