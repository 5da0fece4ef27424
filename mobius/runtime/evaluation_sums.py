"""Sums of an evaluation, as the executor leaves them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EvaluationSums:
    """Sums of each microbatch of an evaluation, on the device; nothing is synchronized yet.

    They are made on the rank of the last stage, and zero elsewhere.
    """

    losses: Tensor
    """fp32 [microbatches]: the loss summed over the microbatch's targets."""
    num_correct: Tensor
    """int64 [microbatches]: targets that the model finds more probable than any other token."""

    @classmethod
    def zeros(cls, num_microbatches: int, device: torch.device) -> EvaluationSums:
        """The sums before the first microbatch."""
        losses = torch.zeros(num_microbatches, dtype=torch.float32, device=device)
        return cls(losses, torch.zeros(num_microbatches, dtype=torch.int64, device=device))
