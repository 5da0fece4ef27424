"""The fp32 buffer in which gradients of one stage at a time add up over the microbatches.

A rank works on one stage's backward at a time, from its first microbatch to its last, so one buffer serves all its
stages, streamed and resident. Where streamed gradients leave in fp32 they leave from here, and there are two buffers.

It does not know in what form gradients leave, nor who reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mobius.memory.layout import StageLayout
from mobius.memory.streams import Event


@dataclass
class _Buffer:
    elements: Tensor
    free: Event | None = None
    """Behind the copy that read it last."""


class GradientSum:
    """Owns the buffers of one device; compute runs on its current stream."""

    def __init__(self, num_elements: int, *, device: torch.device, num_buffers: int = 1) -> None:
        """Take `num_buffers` buffers for stages of at most `num_elements`."""
        self._buffers = [
            _Buffer(torch.zeros(num_elements, dtype=torch.float32, device=device)) for _ in range(num_buffers)
        ]
        self._stage: int | None = None
        self._views: dict[str, Tensor] = {}

    def views(self, stage: int, layout: StageLayout) -> dict[str, Tensor]:
        """fp32 views by parameter; zero at the first call for `stage` since the sum before was ended."""
        if self._stage != stage:
            assert self._stage is None, f"stage {self._stage} was not sealed before stage {stage}"
            self._stage = stage
            buffer = self._buffers[0]
            if buffer.free is not None:
                buffer.free.wait()
            own = buffer.elements[: layout.num_trained]
            own.zero_()
            self._views = layout.trained_views(own)
        return self._views

    def end(self) -> None:
        """The sum is complete; it stays until another stage's begins."""
        self._stage = None

    def flat(self, layout: StageLayout) -> Tensor:
        """The elements of the sum that was ended last, [layout.num_trained]."""
        return self._buffers[0].elements[: layout.num_trained]

    def keep_until(self, event: Event) -> None:
        """Leave the sum where it is until `event`; the next one takes the other buffer."""
        self._buffers[0].free = event
        self._buffers.reverse()
