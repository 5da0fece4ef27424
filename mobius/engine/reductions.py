"""Gradient reduction over the replicas, on its own stream, while the next stage's backward computes.

    compute       last backward of s -> record(done) | backward of the next stage ...    wait(reduced) of each -> norm
                                          |                                                ^
    reductions         wait(done) -> sum over the replicas -> norm -> cast of own shard -> record(reduced)
                                                                                           |
    D2H stream                                    streamed: wait(reduced) -> own shard to the host -> record(free)

Sums stay in their buffer until `reduced`, or until copied to the host if they leave in fp32; the next stage uses
another buffer (`gradient_sums.py`). A resident stage's update also runs on this stream and gathers its weights;
compute waits for it in the next step, when it needs them.

One thread per replica enqueues work here, in schedule order, the same on all replicas. On a CPU all of it runs at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mobius.distributed.shards import ReplicaGroup, Shards
from mobius.engine.ordered_tasks import OrderedTasks
from mobius.hardware.streams import Event, new_stream, record_current


class Reductions:
    """Reduction stream of one rank; `replicas` connects it to its counterparts."""

    def __init__(self, replicas: ReplicaGroup, *, device: torch.device) -> None:
        self.replicas, self._device = replicas, device
        self._stream = new_stream(device)
        self.gathers = OrderedTasks()
        """Order of weight gathers: that of their loads."""

    @contextmanager
    def after(self, *points: Event) -> Iterator[None]:
        """Within the block, work goes to the reduction stream, after `points` and all compute work enqueued so far."""
        done = record_current(self._device)
        with self._stream.run():
            for point in (done, *points):
                point.wait()
            yield

    def record(self) -> Event:
        """Return the event after all work on the stream so far."""
        return self._stream.record()


@dataclass(frozen=True)
class StageSharding:
    """How replicas share one stage."""

    shards: Shards
    reductions: Reductions
