"""The fp32 buffers in which gradients of one stage at a time add up over the microbatches, and their norm.

A rank works on one stage's backward at a time, from its first microbatch to its last, so one buffer serves all its
stages, streamed and resident. There are two where sums travel: where gradients leave in fp32 they leave from here, and
between the rounds of a step what streamed stages have added up goes to the host and comes back. And there are two where
replicas share stages: one is reduced while the next stage adds up in the other.

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

from mobius.memory.layout import StageLayout
from mobius.memory.shards import Shards
from mobius.memory.streams import Event, Stream, record_current

ROUNDED_ELEMENTS = 2**24
"""Gradients rounded at a time: bounds what it takes beside them to 32 MiB."""
_NO_SPAN = nullcontext()


@dataclass(eq=False)
class _Buffer:
    values: Tensor
    free: Event = field(default_factory=Event)
    """Behind what read it last."""
    ready: Event | None = None
    """Behind the copy that fills it, until compute waits for that."""
    views: dict[str, Tensor] = field(default_factory=dict)


class GradientAccumulator:
    """Owns the buffers of one device; compute runs on its current stream."""

    def __init__(self, *num_elements: int, device: torch.device) -> None:
        """Take a buffer of each number of elements (`limits.gradient_sum_elements`); stages take them in turns."""
        self._device = device
        zeros = [torch.zeros(each, dtype=torch.float32, device=device) for each in num_elements]
        self._free = deque(map(_Buffer, zeros))
        self._finished = self._free[0]
        self._of: dict[int, _Buffer] = {}

    def views(self, stage: int, layout: StageLayout) -> dict[str, Tensor]:
        """fp32 views by trained parameter.

        Zero at the first call for `stage` since its sum before was sealed; after `load` what was loaded, for which the
        compute stream waits.
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
        """End the sum, which stays until another stage's begins; returns its squared norm without `excluded`."""
        views = self.finish(stage, layout)
        return squared_norm((view for name, view in views.items() if name not in excluded), self._device)

    def finish(self, stage: int, layout: StageLayout) -> dict[str, Tensor]:
        """End the sum as `seal` does, and return its views; whoever reads them later says until when it stays."""
        views = self.views(stage, layout)
        self._finished = self._give_back(stage)
        return views

    def finished_sum(self, layout: StageLayout) -> Tensor:
        """Elements of the sum that was sealed last, [layout.num_trained]."""
        return self._finished.values[: layout.num_trained]

    def keep_until(self, event: Event) -> None:
        """Leave the sum that was sealed last where it is until `event`; the next one takes another buffer."""
        self._finished.free = event

    def release(self) -> None:
        """Let another stream write where the sum was that was sealed last, behind what compute was given so far."""
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
        """Copy the sum, which goes on later, to `target` on the host, [layout.num_trained]; `span` tells the time.

        Returns the point behind the copy.
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
        """Go on with the sum in `source` on the host, [layout.num_trained], which is there `behind` a point.

        Returns at once where there is a GPU.
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
        assert buffer is not None, f"the stages {sorted(self._of)} are not sealed before stage {stage}"
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
    """Sum of squares of all `tensors`, fp32 scalar on `device`, not synchronized; 0 without tensors.

    Per tensor first, then over the tensors: the order of torch.nn.utils.get_total_norm.
    """
    listed = list(tensors)
    if not listed:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch._foreach_norm(listed, 2.0, dtype=torch.float32)
    return torch.stack(list(norms)).square().sum()


def round_gradients(sums: Tensor, dtype: torch.dtype, square: Tensor) -> Tensor:
    """Round fp32 gradients where they are, to what `cast_gradients` leaves in `dtype`; returns what that returns."""
    for part in sums.split(ROUNDED_ELEMENTS):
        part.copy_(part.to(dtype))
    return _seen_infinite(sums, square) if dtype == torch.float16 else square


def cast_gradients(source: Tensor, target: Tensor, square: Tensor, shards: Shards | None = None) -> Tensor:
    """Copy fp32 gradients, or the own `shards` of them, into `target` of another format; returns `square`, their norm.

    The norm becomes NaN if a value became infinite on the way (fp16): this is seen with the other non-finite ones.
    """
    if shards is None:
        target.copy_(source)
    else:
        shards.copy_owned(source, target)
    return _seen_infinite(target, square) if target.dtype == torch.float16 else square


def _seen_infinite(gradients: Tensor, square: Tensor) -> Tensor:
    return square if gradients.numel() == 0 else square + gradients.abs().max().float() * 0
