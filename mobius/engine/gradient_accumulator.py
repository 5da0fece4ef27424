"""The fp32 buffers that accumulate one stage's gradients over the microbatches, and the gradients' norm.

A rank runs one stage's backward at a time, from its first microbatch to its last, so all its stages, streamed and
resident, share one buffer. A second buffer is needed in three cases: gradients leave the GPU in fp32, straight from the
buffer; sums of streamed stages move to the host and back between accumulation rounds; or replicas share stages, so that
one sum is reduced while the next stage accumulates.

    buffer   stage 4's backward | leaves to the host, stage 0's comes back | stage 0's backward
    buffer   stage 2's comes    | stage 2's backward                       | leaves
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mobius.distributed.shards import Shards
from mobius.hardware.streams import Event, Stream, record_current
from mobius.models.layout import StageLayout

ROUNDED_ELEMENTS = 2**24
"""Gradients rounded at a time: bounds the temporary memory to 32 MiB."""
_NO_SPAN = nullcontext()


@dataclass(eq=False)
class _Buffer:
    values: Tensor
    free: Event = field(default_factory=Event)
    """Recorded after the last read of the buffer."""
    ready: Event | None = None
    """Recorded after the copy that fills the buffer; None once compute waits for it."""
    views: dict[str, Tensor] = field(default_factory=dict)


class GradientAccumulator:
    """Accumulation buffers of one device; compute runs on its current stream."""

    def __init__(self, *num_elements: int, device: torch.device) -> None:
        """Allocate one buffer per number of elements (`limits.gradient_sum_elements`); stages use them in turn."""
        self._device = device
        zeros = [torch.zeros(each, dtype=torch.float32, device=device) for each in num_elements]
        self._free = deque(map(_Buffer, zeros))
        self._finished = self._free[0]
        self._of: dict[int, _Buffer] = {}

    def views(self, stage: int, layout: StageLayout) -> dict[str, Tensor]:
        """Return fp32 views by trained parameter.

        They are zero at the stage's first call after its previous sum was finished. After `load` they hold the loaded
        sum, and the compute stream waits for the copy.
        """
        if stage not in self._of:
            buffer = self._take(stage, layout)
            buffer.free.wait()
            buffer.values[: layout.num_trained].zero_()
        buffer = self._of[stage]
        if buffer.ready is not None:
            buffer.ready.wait()
            buffer.ready = None
        return buffer.views

    def finish_with_norm(self, stage: int, layout: StageLayout, *, excluded: frozenset[str]) -> Tensor:
        """Finish the sum and return its squared norm without the parameters in `excluded`.

        The sum stays valid until another stage starts accumulating.
        """
        views = self.finish(stage, layout)
        return squared_norm((view for name, view in views.items() if name not in excluded), self._device)

    def finish(self, stage: int, layout: StageLayout) -> dict[str, Tensor]:
        """Finish the sum and return its views; a later reader must call `keep_until` or `release`."""
        views = self.views(stage, layout)
        self._finished = self._give_back(stage)
        return views

    def finished_sum(self, layout: StageLayout) -> Tensor:
        """Return the elements of the sum finished last, [layout.num_trained]."""
        return self._finished.values[: layout.num_trained]

    def keep_until(self, event: Event) -> None:
        """Keep the sum finished last in its buffer until `event`; the next stage uses another buffer."""
        self._finished.free = event

    def release(self) -> None:
        """Let other streams overwrite the sum finished last, after all work enqueued on compute so far."""
        self._finished.free = record_current(self._device)

    def offload(
        self,
        stage: int,
        layout: StageLayout,
        target: Tensor,
        to_host: Stream,
        *,
        span: AbstractContextManager[object] = _NO_SPAN,
    ) -> Event:
        """Copy an unfinished sum to `target` on the host, [layout.num_trained]; `span` measures the copy.

        Returns the event after the copy.
        """
        done = record_current(self._device)
        buffer = self._give_back(stage)
        with to_host.run():
            done.wait()
            with span:
                target.copy_(buffer.values[: layout.num_trained], non_blocking=True)
            buffer.free = to_host.record()
        return buffer.free

    def load(
        self,
        stage: int,
        layout: StageLayout,
        source: Tensor,
        to_device: Stream,
        *,
        after: Event,
        span: AbstractContextManager[object] = _NO_SPAN,
    ) -> None:
        """Continue the sum in `source` on the host, [layout.num_trained], which is complete at the event `after`.

        Returns without waiting for a GPU.
        """
        buffer = self._take(stage, layout)
        with to_device.run():
            buffer.free.wait()
            after.wait()
            with span:
                buffer.values[: layout.num_trained].copy_(source, non_blocking=True)
            buffer.ready = to_device.record()

    def _take(self, stage: int, layout: StageLayout) -> _Buffer:
        buffer = next((each for each in self._free if each.values.numel() >= layout.num_trained), None)
        assert buffer is not None, (
            f"stages {sorted(self._of)} have unfinished sums, no buffer is free for stage {stage}"
        )
        self._free.remove(buffer)
        self._of[stage] = buffer
        buffer.views = layout.trained_views(buffer.values[: layout.num_trained])
        return buffer

    def _give_back(self, stage: int) -> _Buffer:
        buffer = self._of.pop(stage)
        buffer.views = {}
        self._free.append(buffer)
        return buffer


def squared_norm(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all `tensors`, fp32 scalar on `device`, not synchronized; 0 without tensors.

    Reduces each tensor first, then over the tensors: the order of torch.nn.utils.get_total_norm.
    """
    listed = list(tensors)
    if not listed:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch._foreach_norm(listed, 2.0, dtype=torch.float32)
    return torch.stack(list(norms)).square().sum()


def round_gradients(sums: Tensor, dtype: torch.dtype, square: Tensor) -> Tensor:
    """Round fp32 gradients in place to the values that `cast_gradients` would store in `dtype`; same result."""
    for part in sums.split(ROUNDED_ELEMENTS):
        part.copy_(part.to(dtype))
    return _seen_infinite(sums, square) if dtype == torch.float16 else square


def cast_gradients(source: Tensor, target: Tensor, square: Tensor, shards: Shards | None = None) -> Tensor:
    """Copy fp32 gradients, or only this replica's `shards`, into `target` of another dtype; return the norm `square`.

    The norm becomes NaN if the cast made a value infinite (fp16), so that the check for non-finite values finds it.
    """
    if shards is None:
        target.copy_(source)
    else:
        shards.copy_owned(source, target)
    return _seen_infinite(target, square) if target.dtype == torch.float16 else square


def _seen_infinite(gradients: Tensor, square: Tensor) -> Tensor:
    return square if gradients.numel() == 0 else square + gradients.abs().max().float() * 0
