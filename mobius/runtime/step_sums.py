"""Sums of a rank's part of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepSums:
    """Sums of one rank's part of a step, on its device; nothing is synchronized yet."""

    loss: Tensor
    """fp32 scalar: the mean loss over the step's targets on the rank of the last stage, 0 elsewhere."""
    squared_norms: dict[int, Tensor]
    """Own stage -> squared norm of its (scaled) gradients, fp32 scalar."""
    router_loss: Tensor | None = None
    """fp32 scalar: the mean over microbatches of the loss over routers, without its coefficient, which `loss` has it
    with; on the rank of the last stage, 0 elsewhere. None for models without."""
