"""Work that runs in the order in which its turns were taken, whichever of it may begin first.

    main thread         take 0, take 2          take 4 and begin: 4 runs here
    optimizer thread            begin 2   begin 0: 0 and 2 run here

Replicas gather weights behind updates, which do not end in one order everywhere; gathers of one connection must.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future


class OrderedTask:
    """One place in the order."""

    def __init__(self, turns: OrderedTasks, work: Callable[[], None]) -> None:
        self._tasks, self._work = turns, work
        self.is_allowed = False
        self._future: Future[None] = Future()

    def allow_start(self) -> None:
        """Run the work, or let it run as soon as those before have; behind it, in this thread, what waits for it."""
        self._tasks.allow(self)

    def wait(self) -> None:
        """Return when the work has run; raises what it raised."""
        self._future.result()

    def run(self) -> None:
        """Do the work; `OrderedTasks` calls it."""
        try:
            self._work()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(None)


class OrderedTasks:
    """Owns the order; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[OrderedTask] = deque()
        self._is_running = False

    def add(self, work: Callable[[], None]) -> OrderedTask:
        """The turn behind all that were taken before; its work runs once it may `begin`."""
        task = OrderedTask(self, work)
        with self._lock:
            self._waiting.append(task)
        return task

    def allow(self, task: OrderedTask) -> None:
        """Let a turn begin, and run all that may begin now, unless another thread is doing that."""
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
