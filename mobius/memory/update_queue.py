"""The optimizer's thread: updates of stages wait in it in order, and who needs a stage's new weights waits here for it.

It does not know what an update is.

    main thread        submit(0) submit(1) ...  load(0): when_updated     weights(0): wait          load(1) ...
                           |                         |                        |
    optimizer thread   update(0) -----------> copy of 0 starts --> done     update(1) --> copy of 1 starts --> done

A load that comes before its update is done is started by the optimizer's thread behind the update, so the main thread
goes on enqueuing work and stops only where it needs the weights themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field


@dataclass
class _Update:
    followers: list[Callable[[], None]] = field(default_factory=list)
    is_done: bool = False
    future: Future[None] | None = None


class UpdateQueue:
    """Owns the one thread that a rank has beside its main one; the thread starts with the first update."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="optimizer")
        self._lock = threading.Lock()
        self._updates: dict[int, _Update] = {}

    def submit(self, stage: int, update: Callable[[], None]) -> None:
        """Append `update`; returns at once. The stage's update before it must have been waited for."""
        entry = self._updates[stage] = _Update()
        entry.future = self._thread.submit(self._run, entry, update)

    def when_updated(self, stage: int, action: Callable[[], None]) -> None:
        """Run `action` as soon as `stage` has no update to wait for: now, or later in the optimizer's thread."""
        with self._lock:
            entry = self._updates.get(stage)
            if entry is not None and not entry.is_done:
                entry.followers.append(action)
                return
        action()

    def wait(self, stage: int) -> None:
        """Return when `stage` is updated and what followed the update has run; raises what the update raised."""
        entry = self._updates.get(stage)
        if entry is None or entry.future is None:
            return
        try:
            entry.future.result()
        except Exception as error:
            error.add_note(f"while stage {stage} was updated")
            raise
        del self._updates[stage]

    def drain(self) -> None:
        """Wait for all updates, before anything reads or saves the parameters."""
        for stage in list(self._updates):
            self.wait(stage)

    def _run(self, entry: _Update, update: Callable[[], None]) -> None:
        update()
        with self._lock:
            entry.is_done = True
        # Within the update's future: a thread that waits for it finds these started.
        for follower in entry.followers:
            follower()
