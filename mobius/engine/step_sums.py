"""Sums over one rank's part of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepSums:
    """Sums over one rank's part of a step, on its device; not synchronized yet."""

    loss: Tensor
    """fp32 scalar: mean loss over the step's targets on the rank of the last stage, 0 elsewhere."""
    squared_norms: dict[int, Tensor]
    """Stage of this rank -> squared norm of its (scaled) gradients, fp32 scalar."""
    router_loss: Tensor | None = None
    """fp32 scalar: router loss averaged over microbatches, without the coefficient that `loss` applies; on the rank of
    the last stage, 0 elsewhere. None for models without a router loss."""
