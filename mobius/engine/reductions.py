"""Gradient reduction over the replicas, on its own stream, while the next stage's backward computes.

    compute       last backward of s -> record(done) | backward of the next stage ...    wait(reduced) of each -> norm
                                          |                                                ^
    reductions         wait(done) -> sum over the replicas -> norm -> cast of own shard -> record(reduced)
                                                                                           |
    D2H stream                                    streamed: wait(reduced) -> own shard to the host -> record(free)

Sums stay in their buffer until `reduced`, or until copied to the host if they leave in fp32; the next stage uses
another buffer (`gradient_accumulator.py`). A resident stage's update also runs on this stream and gathers its weights;
compute waits for it in the next step, when it needs them.

One thread per replica enqueues work here, in schedule order, the same on all replicas. On a CPU all of it runs at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mobius.distributed.shards import ReplicaGroup, Shards
from mobius.engine.gradient_accumulator import cast_gradients
from mobius.engine.ordered_tasks import OrderedTasks
from mobius.hardware.spans import NO_SPANS, Spans
from mobius.hardware.streams import Event, new_stream, record_current
from mobius.models.layout import StageLayout
from mobius.schedule.lanes import Lane


class Reductions:
    """Reduction stream of one rank; `replicas` connects it to its counterparts."""

    def __init__(self, replicas: ReplicaGroup, *, device: torch.device, spans: Spans = NO_SPANS) -> None:
        self.replicas = replicas
        self._device, self.spans = device, spans
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

    @classmethod
    def by(cls, shards: Shards | None, reductions: Reductions | None) -> StageSharding | None:
        """Return both if there are replicas and the stage has trained parameters, else None."""
        return None if shards is None or reductions is None else cls(shards, reductions)

    def reduce_scatter(
        self,
        stage: int,
        layout: StageLayout,
        sums: Tensor,
        target: Tensor | None,
        *,
        excluded: Collection[str],
        free: Event | None = None,
    ) -> Tensor:
        """Reduce fp32 `sums` [num_trained] to their owners; copy the own shard to `target` [num_owned], if given.

        `target` may have any dtype and be overwritten after `free`. Returns the squared norm of all replicas' sums
        without the parameters in `excluded`, as `finish_gradients` does, on the reduction stream. Returns without
        waiting for a GPU.
        """
        own, replicas = self.shards, self.reductions.replicas
        span = self.reductions.spans.device_span(Lane.REDUCE, f"R{stage}")
        with self.reductions.after(*([] if free is None else [free])), span:
            replicas.reduce_scatter(sums, own.segments)
            square = own.square(sums, layout, excluded=excluded)
            if target is not None:
                square = cast_gradients(sums, target, square, own)
            # Reduced per stage: without clipping, each replica's host decides from this stage's norm alone.
            return replicas.sum_over_replicas(square)
