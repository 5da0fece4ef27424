"""Thread of the optimizer: runs queued updates of streamed stages, and starts the loads that wait for the updates.

An update consists of pieces. Before each piece, the thread picks the lowest stage that can continue, because the next
step's forward needs that stage first. If no stage can, the thread waits for the update that was submitted first.

    main thread        submit(2)    submit(0)  load(0): run_after_update   weights(0): wait        load(1) ...
                           |            |           |                          |
    optimizer thread    2, piece 1    0, pieces 1 and 2 -> copy of 0 starts --> done    2, piece 2  ...

If a load is requested before the stage's update is done, the optimizer's thread starts the load after the update. The
main thread continues to enqueue work, and blocks only when it needs the weights.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from mobius.process.activity import Activity


@dataclass
class _Update:
    pieces: deque[Callable[[], None]]
    can_begin: Callable[[], bool]
    followers: list[Callable[[], object]] = field(default_factory=list)
    is_done: bool = False
    future: Future[None] = field(default_factory=Future)


class UpdateQueue:
    """Queue of a rank's optimizer thread, which the first update starts."""

    def __init__(
        self,
        activity: Activity | None = None,
        *,
        prepare: Callable[[], None] = lambda: None,
        has_thread: bool = True,
    ) -> None:
        """The thread first calls `prepare`, and reports updates to `activity`. Without a thread, `submit` updates."""
        self._activity, self.has_thread = activity or Activity(), has_thread
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="optimizer", initializer=prepare)
        self._lock = threading.Lock()
        self._updates: dict[int, _Update] = {}
        self._pending: dict[int, _Update] = {}

    def submit(
        self, stage: int, pieces: Sequence[Callable[[], None]], *, can_begin: Callable[[], bool] = lambda: True
    ) -> None:
        """Queue an update; returns at once. `wait` must have been called for the stage's previous update.

        Stages whose `can_begin` returns False are deferred. If no stage can begin, the update that was submitted first
        runs and waits for its gradients, which arrive first. An update without pieces (of a stage without parameters)
        is done at once.
        """
        if not self.has_thread:
            for piece in pieces:
                piece()
            return
        if not pieces:
            return
        with self._lock:
            self._updates[stage] = self._pending[stage] = _Update(deque(pieces), can_begin)
        for _ in pieces:
            self._thread.submit(self._run_next)

    def run_after_update(self, stage: int, action: Callable[[], object]) -> None:
        """Run `action` when `stage` has no pending update: now, or later in the optimizer's thread."""
        with self._lock:
            entry = self._updates.get(stage)
            if entry is not None and not entry.is_done:
                entry.followers.append(action)
                return
        action()

    def is_under_way(self, stage: int) -> bool:
        """Whether an update of `stage` was submitted after the last `wait` for it."""
        return stage in self._updates

    def wait(self, stage: int) -> None:
        """Wait until `stage` is updated and the actions after the update have run; raise the update's error."""
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
                return  # this call was for a piece of an update that has failed
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
            # Run the followers before the future is set, so that a thread that waits for it finds them started.
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
