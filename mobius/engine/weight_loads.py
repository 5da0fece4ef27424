"""Loads of weights that are on disks: each reads a stage into a page-locked buffer, then starts the copy to its slot.

    main thread          load(0)    load(2)    load(4)            views(0): waits until its copy has started ...
    one thread for       0: read .............. | copy, until it has ended | 4: read ......... | copy ...
    each buffer                     2: read .............. | copy, which waits for its slot .. |

A load waits for the stage's update first (engine/update_queue.py), then for the write of the updated weights.

No load waits forever, even with one buffer. A buffer is held by a read, which ends, or by a copy, which waits for its
slot. The slot becomes free after compute that was enqueued before the load was requested. `views` has let that compute
begin only after the copy of its weights had started. So a load never waits for a load that compute needs later, in
whatever order loads get the buffers. That compute may wait for a message; the sender of the message waits only for
actions that come earlier in the schedule. Updates have separate buffers and separate reading threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from torch import Tensor

from mobius.engine.state_files import StateFiles, wait, weights_key
from mobius.hardware.streams import Event
from mobius.schedule.memory_layout import Pool


class WeightLoads:
    """Buffers of one rank, and their threads."""

    def __init__(
        self,
        files: StateFiles,
        pool: Pool,
        *,
        allocate: Callable[[int], Tensor],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Allocate the buffers of `pool` as `StateBuffers` does, and a thread for each, which first calls `prepare`."""
        self._files, self._buffers = files, SimpleQueue[Tensor]()
        for _ in range(pool.number):
            self._buffers.put(allocate(pool.num_bytes))
        self._threads = ThreadPoolExecutor(pool.number, thread_name_prefix="loads", initializer=prepare)

    def load(self, stage: int, fill: Callable[[Tensor], Event], started: Future[None]) -> None:
        """Start reading the weights of `stage` once a buffer is free, then call `fill` with them (uint8).

        Returns at once. `fill` starts the copy and returns the event at its end. Then `started` is done; after a failed
        read, it has the error: StateFileError.
        """
        self._threads.submit(self._load, stage, fill, started)

    def close(self) -> None:
        """Wait for the loads that are under way. Safe to call twice."""
        self._threads.shutdown()

    def _load(self, stage: int, fill: Callable[[Tensor], Event], started: Future[None]) -> None:
        buffer = self._buffers.get()  # does not block: there are no more threads than buffers
        try:
            wait(self._files.read(weights_key(stage), buffer, is_load=True))
            copied = fill(buffer)
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)
            copied.synchronize()  # sync: once per load, off the compute path
        finally:
            self._buffers.put(buffer)
