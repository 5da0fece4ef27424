"""The optimizer's thread: updates of streamed stages wait here for their turn, and loads wait for the updates.

An update consists of pieces, and before each piece the thread turns to the lowest stage that can go on: the next step's
forward needs that one first. Where none can, it waits for the one submitted first.

    main thread        submit(2)    submit(0)  load(0): run_after_update   weights(0): wait        load(1) ...
                           |            |           |                          |
    optimizer thread    2, piece 1    0, pieces 1 and 2 -> copy of 0 starts --> done    2, piece 2  ...

A load that comes before its update is done is started by the optimizer's thread behind the update, so the main thread
goes on enqueuing work and stops only where it needs the weights themselves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from mobius.activity import Activity


@dataclass
class _Update:
    pieces: deque[Callable[[], None]]
    can_begin: Callable[[], bool]
    followers: list[Callable[[], None]] = field(default_factory=list)
    is_done: bool = False
    future: Future[None] = field(default_factory=Future)


class UpdateQueue:
    """Owns the one thread that a rank has beside its main one; the thread starts with the first update."""

    def __init__(self, activity: Activity | None = None, *, prepare: Callable[[], None] = lambda: None) -> None:
        """`activity` is told which stage is updated; `prepare` is the first thing that the thread does."""
        self._activity = activity or Activity()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="optimizer", initializer=prepare)
        self._lock = threading.Lock()
        self._updates: dict[int, _Update] = {}
        self._pending: dict[int, _Update] = {}

    def submit(
        self, stage: int, pieces: Sequence[Callable[[], None]], *, can_begin: Callable[[], bool] = lambda: True
    ) -> None:
        """Add an update; returns at once. The stage's update before must have been waited for.

        While `can_begin` says no, others go first. Where none can begin, the one submitted first does, and waits by
        itself: its gradients come first. Without pieces (a stage without parameters) there is nothing to wait for.
        """
        if not pieces:
            return
        with self._lock:
            self._updates[stage] = self._pending[stage] = _Update(deque(pieces), can_begin)
        for _ in pieces:
            self._thread.submit(self._run_next)

    def run_after_update(self, stage: int, action: Callable[[], None]) -> None:
        """Run `action` as soon as `stage` has no update to wait for: now, or later in the optimizer's thread."""
        with self._lock:
            entry = self._updates.get(stage)
            if entry is not None and not entry.is_done:
                entry.followers.append(action)
                return
        action()

    def is_under_way(self, stage: int) -> bool:
        """Whether `wait` was not called since the stage's last update was submitted."""
        return stage in self._updates

    def wait(self, stage: int) -> None:
        """Return when `stage` is updated and what followed the update has run; raises what the update raised."""
        entry = self._updates.get(stage)
        if entry is None:
            return
        try:
            entry.future.result()
        except Exception as error:
            error.add_note(f"while stage {stage} was updated")
            raise
        del self._updates[stage]

    def _run_next(self) -> None:
        with self._lock:
            waiting = sorted(self._pending)
            if not waiting:
                return  # what is left of a failed update
            first = next(iter(self._pending))
            ready = (stage for stage in waiting if self._pending[stage].can_begin())
            stage = next(ready, first)
            entry = self._pending[stage]
            piece = entry.pieces.popleft()
            if not entry.pieces:
                del self._pending[stage]
        self._activity.start_task("optimizer", f"stage {stage}")
        try:
            piece()
            if entry.pieces:
                return
            with self._lock:
                entry.is_done = True
            # Before the future is set: a thread that waits for it finds these started.
            for follower in entry.followers:
                follower()
        except BaseException as error:
            with self._lock:
                self._pending.pop(stage, None)
            entry.future.set_exception(error)
        else:
            entry.future.set_result(None)
        finally:
            self._activity.end_task("optimizer")
