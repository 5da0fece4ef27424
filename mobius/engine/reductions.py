"""Reduces gradients over the replicas, on a separate stream, while the next stage's backward computes.

    compute       last backward of s -> record(done) | backward of the next stage ...    wait(reduced) of each -> norm
                                          |                                                ^
    reductions         wait(done) -> sum over the replicas -> norm -> cast of own shard -> record(reduced)
                                                                                           |
    D2H stream                                    streamed: wait(reduced) -> own shard to the host -> record(free)

Sums stay in their buffer until `reduced` or, if gradients leave in fp32, until they are copied to the host. The next
stage uses another buffer (`gradient_sums.py`). A resident stage's update and the gather of its weights also run on this
stream; in the next step, compute waits for them when it needs the weights.

One thread per replica enqueues this work, in schedule order, the same on all replicas. On a CPU the work is not
enqueued but runs immediately.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mobius.distributed.replicas import ReplicaGroup
from mobius.distributed.shards import Shards
from mobius.hardware.streams import Event, new_stream, record_current


class Reductions:
    """Reduction stream of one rank; `replicas` connects the rank to the same rank of other replicas."""

    def __init__(self, replicas: ReplicaGroup, *, device: torch.device) -> None:
        self.replicas, self._device = replicas, device
        self._stream = new_stream(device)
        self.gathers = OrderedTasks()
        """Gathers of weights; they run in the order of the loads that need them."""

    @contextmanager
    def after(self, *points: Event) -> Iterator[None]:
        """Run the block's work on the reduction stream, after `points` and all compute work enqueued so far."""
        done = record_current(self._device)
        with self._stream.run():
            for point in (done, *points):
                point.wait()
            yield

    def record(self) -> Event:
        """Return an event after all work that is on the stream so far."""
        return self._stream.record()


@dataclass(frozen=True)
class StageSharding:
    """Shards of one stage, and the stream on which its replicas reduce them."""

    shards: Shards
    weights: Shards
    """Shards of the flat weights, whose numbers may be of several formats."""
    reductions: Reductions


class OrderedTask:
    """A task of `OrderedTasks`, with its position in the order."""

    def __init__(self, turns: OrderedTasks, work: Callable[[], None]) -> None:
        self._tasks, self._work = turns, work
        self.is_allowed = False
        self._future: Future[None] = Future()

    def allow_start(self) -> None:
        """Let the work run after all earlier tasks. This thread may run it, and then the later tasks that wait."""
        self._tasks.allow(self)

    def wait(self) -> None:
        """Wait until the work has run; raises the work's error."""
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
    """Tasks that run in the order in which they were added, even if a later task is allowed first. Thread-safe.

        main thread         add 0, add 2            add 4 and allow: 4 runs here
        optimizer thread            allow 2   allow 0: 0 and 2 run here

    Replicas gather weights after updates. The order in which updates end may differ between replicas, but all replicas
    must run the gathers of one connection in the same order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[OrderedTask] = deque()
        self._is_running = False

    def add(self, work: Callable[[], None]) -> OrderedTask:
        """Append a task; its work runs after `allow_start` and after all earlier tasks."""
        task = OrderedTask(self, work)
        with self._lock:
            self._waiting.append(task)
        return task

    def allow(self, task: OrderedTask) -> None:
        """Allow a task, and run all tasks that may start now, unless another thread is already running tasks."""
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
