"""Sums of one rank's part of a step or an evaluation, on its device; not synchronized yet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepSums:
    """Sums of a step."""

    loss: Tensor
    """fp32 scalar: mean loss over the step's targets on the rank of the last stage, 0 elsewhere."""
    squared_norms: dict[int, Tensor]
    """Stage of this rank -> squared norm of the (scaled) gradient of each of its trained tensors, fp32 [tensors]."""
    router_loss: Tensor | None = None
    """fp32 scalar: router loss averaged over microbatches, without the coefficient that `loss` applies; on the rank of
    the last stage, 0 elsewhere. None for models without a router loss."""


@dataclass(frozen=True)
class EvaluationSums:
    """Sums per microbatch of an evaluation, computed on the rank of the last stage; zero on other ranks."""

    losses: Tensor
    """fp32 [microbatches]: loss summed over the targets of the microbatch."""
    num_correct: Tensor
    """int64 [microbatches]: number of targets that are the most probable token."""
