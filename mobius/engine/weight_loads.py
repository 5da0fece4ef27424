"""Loads weights that are on disks: reads a stage into a page-locked buffer, then starts the copy to the stage's slot.

    main thread          load(0)    load(2)    load(4)            views(0): waits until its copy has started ...
    one thread for       0: read .............. | copy, until it has ended | 4: read ......... | copy ...
    each buffer                     2: read .............. | copy, which waits for its slot .. |

A load first waits for the stage's update (engine/update_queue.py), then for the write of the updated weights.

No load waits forever, even with one buffer. A buffer is used by a read, which ends, or by a copy, which waits for its
slot. The slot becomes free after compute that was enqueued before the load was requested. `views` let that compute
begin only after the copy of its weights had started. So a load never waits for a load that compute needs later, in any
order in which loads get the buffers. That compute may wait for a message; the sender of the message waits only for
actions that are earlier in the schedule. Updates have separate buffers and separate reading threads.
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
    """Buffers of one rank, and a thread for each buffer."""

    def __init__(
        self,
        files: StateFiles,
        pool: Pool,
        *,
        allocate: Callable[[int], Tensor],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Allocate the buffers of `pool` as `StateBuffers` does, and a thread for each, which calls `prepare` first."""
        self._files, self._buffers = files, SimpleQueue[Tensor]()
        for _ in range(pool.number):
            self._buffers.put(allocate(pool.num_bytes))
        self._threads = ThreadPoolExecutor(pool.number, thread_name_prefix="loads", initializer=prepare)

    def load(self, stage: int, fill: Callable[[Tensor], Event], started: Future[None]) -> None:
        """Read the weights of `stage` when a buffer is free, then call `fill` with the weights (uint8).

        Returns at once. `fill` starts the copy and returns the event at its end. Then `started` is done; if the read
        fails, `started` has the error: StateFileError.
        """
        self._threads.submit(self._load, stage, fill, started)

    def close(self) -> None:
        """Wait for the loads that have started. May be called twice."""
        self._threads.shutdown()

    def _load(self, stage: int, fill: Callable[[Tensor], Event], started: Future[None]) -> None:
        buffer = self._buffers.get()  # does not block: there are as many buffers as threads
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
