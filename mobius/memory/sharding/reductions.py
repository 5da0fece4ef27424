"""Sums of gradients over the replicas, on a stream of their own, so that the next stage's backward computes meanwhile.

    compute       last backward of s -> record(done) | backward of the next stage ...    wait(reduced) of each -> norm
                                          |                                                ^
    reductions         wait(done) -> sum over the replicas -> norm -> cast of the own share -> record(reduced)
                                                                                           |
    D2H stream                                        streamed: wait(reduced) -> own share home -> record(free)

Sums stay in their buffer until `reduced`, or until they have left where they leave in fp32; the next stage adds up in
another one (`gradient_accumulator.py`). A resident stage's update runs on this stream, too, and gives the weights to
the other replicas: compute waits for that where it needs them, in the next step.

All replicas enqueue the same here in the same order: it is that of the schedule, and one thread does it. On a CPU all
of it happens at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mobius.memory.gradient_accumulator import cast_gradients
from mobius.memory.layout import StageLayout
from mobius.memory.sharding.ordered_tasks import OrderedTasks
from mobius.memory.shards import ReplicaGroup, Shards
from mobius.memory.spans import NO_SPANS, Spans
from mobius.memory.streams import Event, new_stream, record_current
from mobius.schedule.lanes import Lane


class Reductions:
    """Owns the stream of one rank; `replicas` are its counterparts."""

    def __init__(self, replicas: ReplicaGroup, *, device: torch.device, spans: Spans = NO_SPANS) -> None:
        self.replicas = replicas
        self._device, self.spans = device, spans
        self._stream = new_stream(device)
        self.gathers = OrderedTasks()
        """The order in which weights are gathered: that of their loads."""

    @contextmanager
    def after(self, *points: Event) -> Iterator[None]:
        """Within it, work goes to the stream of reductions, behind `points` and what compute was given so far."""
        done = record_current(self._device)
        with self._stream.run():
            for point in (done, *points):
                point.wait()
            yield

    def record(self) -> Event:
        """The point behind all that the stream was given so far."""
        return self._stream.record()


@dataclass(frozen=True)
class StageSharding:
    """How one stage is shared by replicas."""

    shards: Shards
    reductions: Reductions

    @classmethod
    def by(cls, shards: Shards | None, reductions: Reductions | None) -> StageSharding | None:
        """Both, where there are replicas and the stage has something that is trained."""
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
        """Sum fp32 `sums` [num_trained] to their owners, and copy the own part into `target` [num_owned], if given.

        Behind `free` nobody reads `target`, which is of any dtype. Returns the squared norm of all replicas' sums
        without the parameters in `excluded`, as `finish_gradients` does, on the stream of reductions. Returns at once
        where there is a GPU.
        """
        own, replicas = self.shards, self.reductions.replicas
        span = self.reductions.spans.device_span(Lane.REDUCE, f"R{stage}")
        with self.reductions.after(*([] if free is None else [free])), span:
            replicas.reduce_scatter(sums, own.segments)
            square = own.square(sums, layout, excluded=excluded)
            if target is not None:
                square = cast_gradients(sums, target, square, own)
            # A sum of its own for each stage: without clipping all replicas' hosts decide by it alone.
            return replicas.sum_over_replicas(square)
