"""Loads of weights that are on disks: each reads a stage into a page-locked buffer and starts its copy to the slot.

    main thread          load(0)    load(2)    load(4)            views(0): waits until its copy has started ...
    one thread for       0: read .............. | copy, until it has ended | 4: read ......... | copy ...
    each buffer                     2: read .............. | copy, which waits for its slot .. |

A load waits for the stage's update first (engine/update_queue.py), then for the write of the updated weights.

No load waits for ever, even with one buffer. A buffer is held by a read, which ends, or by a copy, which waits for its
slot: that is, for compute which was enqueued before the load was asked for, and which `views` has let begin only after
the copy of its own weights had started. So a load never waits for one that compute needs later, in whatever order loads
get the buffers. That compute may wait for a message; its sender waits, likewise, for actions that come earlier in the
schedule alone. Updates have buffers, and threads that read, of their own.
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
        """Make the buffers of `pool` by `allocate`, as in `StateBuffers`; each of as many threads calls `prepare`."""
        self._files, self._buffers = files, SimpleQueue[Tensor]()
        for _ in range(pool.number):
            self._buffers.put(allocate(pool.num_bytes))
        self._threads = ThreadPoolExecutor(pool.number, thread_name_prefix="loads", initializer=prepare)

    def load(self, stage: int, fill: Callable[[Tensor], Event], started: Future[None]) -> None:
        """Read the weights of `stage`, and call `fill` with them, uint8, once a buffer is free; returns at once.

        `fill` starts the copy and returns its end. Then `started` is done, or has the error: StateFileError.
        """
        self._threads.submit(self._load, stage, fill, started)

    def close(self) -> None:
        """Wait for the loads that are under way. Safe to call twice."""
        self._threads.shutdown()

    def _load(self, stage: int, fill: Callable[[Tensor], Event], started: Future[None]) -> None:
        buffer = self._buffers.get()  # one is there: no more threads than buffers
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
