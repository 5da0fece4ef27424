"""Sums of one rank's part of a step, on its device; not synchronized yet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepSums:
    """Sums of one rank's part of a step."""

    numbers: Tensor
    """fp32 [1 + numbers]: loss and further sums of the objective on the rank of the last stage, 0 elsewhere."""
    squared_norms: dict[int, Tensor]
    """Stage of this rank -> squared norm of each trained tensor's (scaled) gradient, fp32 [tensors]."""
    router_loss: Tensor | None = None
    """fp32 scalar: router loss averaged over microbatches, without its coefficient (`loss` includes that); 0 except on
    the rank of the last stage. None for models without a router loss."""

    @property
    def loss(self) -> Tensor:
        """fp32 scalar: the loss."""
        return self.numbers[0]
