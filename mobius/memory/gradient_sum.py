"""The fp32 buffer in which gradients of one stage at a time add up over the microbatches, and their norm.

A rank works on one stage's backward at a time, from its first microbatch to its last, so one buffer serves all its
stages, streamed and resident. Where streamed gradients leave in fp32 they leave from here, and there are two buffers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mobius.memory.layout import StageLayout
from mobius.memory.streams import Event


class GradientSum:
    """Owns the buffers of one device; compute runs on its current stream."""

    def __init__(self, num_elements: int, *, device: torch.device, num_buffers: int = 1) -> None:
        """Take `num_buffers` buffers for stages with at most `num_elements` trained elements."""
        self._device = device
        self._buffers = [torch.zeros(num_elements, dtype=torch.float32, device=device) for _ in range(num_buffers)]
        self._free = [Event()] * num_buffers
        """Behind the copy that read each buffer last."""
        self._stage: int | None = None
        self._views: dict[str, Tensor] = {}

    def views(self, stage: int, layout: StageLayout) -> dict[str, Tensor]:
        """fp32 views by trained parameter; zero at the first call for `stage` since the sum before was sealed."""
        if self._stage != stage:
            assert self._stage is None, f"stage {self._stage} was not sealed before stage {stage}"
            self._stage = stage
            self._free[0].wait()
            own = self._buffers[0][: layout.num_trained]
            own.zero_()
            self._views = layout.trained_views(own)
        return self._views

    def seal(self, stage: int, layout: StageLayout, *, excluded: frozenset[str]) -> Tensor:
        """End the sum, which stays until another stage's begins; returns its squared norm without `excluded`."""
        views = self.views(stage, layout)
        square = squared_norm((view for name, view in views.items() if name not in excluded), self._device)
        self._stage = None
        return square

    def flat(self, layout: StageLayout) -> Tensor:
        """Elements of the sum that was sealed last, [layout.num_trained]."""
        return self._buffers[0][: layout.num_trained]

    def keep_until(self, event: Event) -> None:
        """Leave the sum where it is until `event`; the next one takes the other buffer."""
        self._free[0] = event
        self._buffers.reverse()
        self._free.reverse()


def squared_norm(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of all `tensors`, fp32 scalar on `device`, not synchronized; 0 without tensors.

    Per tensor first, then over the tensors: the order of torch.nn.utils.get_total_norm.
    """
    listed = list(tensors)
    if not listed:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch._foreach_norm(listed, 2.0, dtype=torch.float32)
    return torch.stack(list(norms)).square().sum()


def cast_gradients(source: Tensor, target: Tensor, square: Tensor) -> Tensor:
    """Copy fp32 gradients into `target` of another format; returns `square`, their squared norm.

    The norm becomes NaN if a value became infinite on the way (fp16): this is seen with the other non-finite ones.
    """
    target.copy_(source)
    if target.dtype != torch.float16 or target.numel() == 0:
        return square
    return square + target.abs().max().float() * 0
