"""Tasks that run in the order in which they were added, whichever is allowed to start first.

    main thread         add 0, add 2            add 4 and allow: 4 runs here
    optimizer thread            allow 2   allow 0: 0 and 2 run here

Replicas gather weights after updates. Updates may finish in a different order on each replica, but the gathers of one
connection must not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future


class OrderedTask:
    """One position in the order."""

    def __init__(self, turns: OrderedTasks, work: Callable[[], None]) -> None:
        self._tasks, self._work = turns, work
        self.is_allowed = False
        self._future: Future[None] = Future()

    def allow_start(self) -> None:
        """Let the work run after all earlier tasks; this thread then also runs later tasks waiting for it."""
        self._tasks.allow(self)

    def wait(self) -> None:
        """Return when the work has run; raises what it raised."""
        self._future.result()

    def run(self) -> None:
        """Do the work; only `OrderedTasks` calls this."""
        try:
            self._work()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(None)


class OrderedTasks:
    """Ordered tasks; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[OrderedTask] = deque()
        self._is_running = False

    def add(self, work: Callable[[], None]) -> OrderedTask:
        """Append a task; its work runs after `allow_start` and all earlier tasks."""
        task = OrderedTask(self, work)
        with self._lock:
            self._waiting.append(task)
        return task

    def allow(self, task: OrderedTask) -> None:
        """Allow a task and run all tasks that may now start, unless another thread is already doing so."""
        with self._lock:
            task.is_allowed = True
            if self._is_running:
                return
            self._is_running = True
        while (following := self._next()) is not None:
            following.run()

    def _next(self) -> OrderedTask | None:
        with self._lock:
            if self._waiting and self._waiting[0].is_allowed:
                return self._waiting.popleft()
            self._is_running = False
            return None
