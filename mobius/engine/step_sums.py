"""Sums of one rank's part of a step or an evaluation, on the rank's device; not synchronized."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepSums:
    """Sums of one rank's part of a step."""

    loss: Tensor
    """fp32 scalar: mean loss over the step's targets on the rank of the last stage, 0 on other ranks."""
    squared_norms: dict[int, Tensor]
    """Stage of this rank -> squared norm of each trained tensor's (scaled) gradient, fp32 [tensors]."""
    router_loss: Tensor | None = None
    """fp32 scalar: router loss averaged over microbatches, without its coefficient (`loss` includes that); 0 except on
    the rank of the last stage. None for models without a router loss."""


@dataclass(frozen=True)
class EvaluationSums:
    """Sums of each microbatch of an evaluation, computed on the rank of the last stage; zero on other ranks."""

    losses: Tensor
    """fp32 [microbatches]: loss summed over the targets of the microbatch."""
    num_correct: Tensor
    """int64 [microbatches]: number of targets that have the largest logit."""
