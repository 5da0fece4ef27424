"""Adds up a stage's gradients over the microbatches in fp32, and finishes the sums.

A rank runs the backward of one stage at a time, from the first microbatch to the last. So all stages of the rank,
streamed and resident, share one buffer. A second buffer is needed in three cases: gradients are copied to the host in
fp32, directly from the buffer; sums of streamed stages move to the host and back between accumulation rounds; or
replicas share stages, so that one sum is reduced while the next stage accumulates.

    buffer   backward of stage 4     | copy sum 4 to the host, load sum 0 | backward of stage 0
    buffer   load the sum of stage 2 | backward of stage 2                | copy sum 2 to the host

Finishing a sum squares each tensor for the norm. Then it casts the sum into a buffer that the kind of stage chooses, or
leaves the sum where it is. If replicas share the stage, sums are finished after the reduction, on the stream of
reductions (`reductions.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from mobius.distributed.shards import Shards
from mobius.engine.reductions import StageSharding
from mobius.hardware.spans import NO_SPANS, Spans
from mobius.hardware.streams import DeviceBuffer, Event, Stream, record_current
from mobius.models.layout import StageLayout
from mobius.schedule.lanes import Lane

ROUNDED_ELEMENTS = 2**24
"""Number of gradients that are rounded at a time; limits the temporary memory to 32 MiB."""


class GradientAccumulator:
    """Buffers for fp32 sums on one device; compute runs on the device's current stream."""

    def __init__(self, *num_elements: int, device: torch.device) -> None:
        """Allocate a buffer for each of `num_elements` (`limits.gradient_sum_elements`); stages use them in turn."""
        self.device = device
        zeros = [torch.zeros(each, dtype=torch.float32, device=device) for each in num_elements]
        self._free = deque(map(DeviceBuffer, zeros))
        self._stages: list[int] = []

    def find(self, stage: int, num_elements: int) -> DeviceBuffer:
        """Return the buffer of at least `num_elements` that `stage` would take now."""
        buffer = next((each for each in self._free if each.values.numel() >= num_elements), None)
        assert buffer is not None, (
            f"stages {sorted(self._stages)} have unfinished sums, no buffer is free for stage {stage}"
        )
        return buffer

    def take(self, stage: int, num_elements: int) -> DeviceBuffer:
        """Assign a buffer to `stage`; fill it after its `free` event."""
        buffer = self.find(stage, num_elements)
        self._free.remove(buffer)
        self._stages.append(stage)
        return buffer

    def give_back(self, stage: int, buffer: DeviceBuffer) -> None:
        """Let another stage take the buffer of `stage`; the values stay until another stage takes it."""
        self._stages.remove(stage)
        self._free.append(buffer)


class GradientSums:
    """fp32 gradient sums of one stage."""

    def __init__(
        self,
        stage: int,
        layout: StageLayout,
        accumulator: GradientAccumulator,
        *,
        sharding: StageSharding | None = None,
        host: Tensor | None = None,
        to_host: Stream | None = None,
        to_device: Stream | None = None,
        tied: Collection[str] = (),
        spans: Spans = NO_SPANS,
    ) -> None:
        """Add up gradients in a buffer of `accumulator`, which needs two buffers if there is `sharding` or `host`.

        Parameters in `tied` have a copy in another stage; `tied_weights.py` computes the norm of the sum of both.
        `host` [layout.num_trained] keeps the sums between accumulation rounds; the streams `to_host` and `to_device`
        copy them. Without `host`, the sums stay on the device.
        """
        self._stage, self._layout, self._accumulator, self._sharding = stage, layout, accumulator, sharding
        self._host, self._to_host, self._to_device = host, to_host or Stream(), to_device or Stream()
        self._spans, self.tied = spans, frozenset(tied)
        self._buffer: DeviceBuffer | None = None
        self._views: dict[str, Tensor] = {}
        self._arrival = Event()
        """Recorded after the sums were copied to the host."""
        self.finished = accumulator.find(stage, layout.num_trained)
        """Buffer of the last finished sum; valid until another stage takes it and has waited for its `free` event."""
        self.reduction: Event | None = None
        """Event after which compute may read the results of `finish`; None if stream order suffices."""

    def views(self) -> dict[str, Tensor]:
        """Return fp32 views of the sums, by trained parameter.

        The sums are zero at the first call after the previous sum was finished. After `load`, the compute stream waits
        for the copy, and the views have the loaded sum.
        """
        buffer = self._buffer
        if buffer is None:
            buffer = self._take()
            buffer.free.wait()
            buffer.values[: self._layout.num_trained].zero_()
        if buffer.ready is not None:
            buffer.ready.wait()
            buffer.ready = None
        return self._views

    def finish(self, target: DeviceBuffer | None) -> Tensor:
        """Finish the sum, and cast it, or this replica's shard, to the start of `target` once `target` is free.

        Without a target, the sum stays in the `finished` buffer. Returns the squared norms of the trained tensors (0
        for tensors in `tied`): fp32 [tensors] on the device, not synchronized, valid after `reduction`. The norms are
        computed in fp32 before any cast. If the cast makes a value infinite (fp16), all norms become NaN.
        """
        views = self.views()
        buffer = self.finished = self._give_back()
        sums = buffer.values[: self._layout.num_trained]
        if self._sharding is not None:
            return self._reduce(self._sharding, buffer, sums, target)
        squares = self._squares(views)
        if target is not None:
            target.free.wait()
            squares = cast_gradients(sums, target.values[: len(sums)], squares)
            if self._host is not None:  # another stream may load the next stage's sums into this buffer
                buffer.free = record_current(self._accumulator.device)
        return squares

    def _reduce(
        self,
        sharding: StageSharding,
        buffer: DeviceBuffer,
        sums: Tensor,
        target: DeviceBuffer | None,
    ) -> Tensor:
        """Enqueue the reduction to the owners, the norms, and the cast of this replica's shard; compute continues.

        The norms are over the sums of all replicas: without clipping, each replica's host decides from the norms alone.
        """
        shards, reductions = sharding.shards, sharding.reductions
        span = self._spans.device_span(Lane.REDUCE, f"R{self._stage}")
        with reductions.after(*([] if target is None else [target.free])), span:
            reductions.replicas.reduce_scatter(sums, shards.segments)
            squares = self._squares(shards.owned_views(sums, self._layout))
            if target is not None:
                squares = cast_gradients(sums, target.values[: shards.num_elements], squares, shards)
            squares = reductions.replicas.sum_over_replicas(squares)
        self.reduction = buffer.free = reductions.record()
        return squares

    def _squares(self, parts: Mapping[str, Tensor]) -> Tensor:
        counted = {name: part for name, part in parts.items() if name not in self.tied}
        return squared_norms(self._layout.trained_names, counted, self._accumulator.device)

    def offload(self) -> None:
        """Start copying the unfinished sum to the host; returns at once. Does nothing if sums stay on the device."""
        if self._host is None:
            return
        done = record_current(self._accumulator.device)
        buffer = self._give_back()
        with self._to_host.run():
            done.wait()
            with self._spans.device_span(Lane.OFFLOAD, f"OS{self._stage}"):
                self._host.copy_(buffer.values[: self._layout.num_trained], non_blocking=True)
            self._arrival = buffer.free = self._to_host.record()

    def load(self) -> None:
        """Start copying the offloaded sum back to the device, to add more gradients; returns at once."""
        if self._host is None:
            return
        buffer = self._take()
        with self._to_device.run():
            buffer.free.wait()
            self._arrival.wait()
            with self._spans.device_span(Lane.LOAD, f"LS{self._stage}"):
                buffer.values[: self._layout.num_trained].copy_(self._host, non_blocking=True)
            buffer.ready = self._to_device.record()

    def _take(self) -> DeviceBuffer:
        self._buffer = buffer = self._accumulator.take(self._stage, self._layout.num_trained)
        self._views = self._layout.trained_views(buffer.values)
        return buffer

    def _give_back(self) -> DeviceBuffer:
        buffer, self._buffer, self._views = self._buffer, None, {}
        assert buffer is not None, f"stage {self._stage} has no gradient sums on the device"
        self._accumulator.give_back(self._stage, buffer)
        return buffer


def squared_norms(names: Iterable[str], tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of each tensor in `names`, 0 for a name that `tensors` lacks.

    The result is fp32 [names] on `device`, not synchronized. The host adds the squares of all tensors exactly: with an
    fp32 sum here, the last digits of the norm would depend on the division into stages.
    """
    norms = torch._foreach_norm([*tensors.values()], 2.0, dtype=torch.float32) if tensors else ()
    found, zero = dict(zip(tensors, norms, strict=True)), torch.zeros((), dtype=torch.float32, device=device)
    listed = [found.get(name, zero) for name in names]
    return torch.stack(listed).square() if listed else zero.new_zeros(0)


def round_gradients(sums: Tensor, dtype: torch.dtype, squares: Tensor) -> Tensor:
    """Round fp32 gradients in place to the values that `cast_gradients` would store in `dtype`; return its squares."""
    for part in sums.split(ROUNDED_ELEMENTS):
        part.copy_(part.to(dtype))
    return _seen_infinite(sums, squares) if dtype == torch.float16 else squares


def cast_gradients(source: Tensor, target: Tensor, squares: Tensor, shards: Shards | None = None) -> Tensor:
    """Copy fp32 gradients, or only this replica's `shards`, into `target` of another dtype; return the `squares`.

    If the cast makes a value infinite (fp16), the squares become NaN, so that the check for non-finite values finds it.
    """
    if shards is None:
        target.copy_(source)
    else:
        shards.copy_owned(source, target)
    return _seen_infinite(target, squares) if target.dtype == torch.float16 else squares


def _seen_infinite(gradients: Tensor, squares: Tensor) -> Tensor:
    return squares if gradients.numel() == 0 else squares + gradients.abs().max().float() * 0
