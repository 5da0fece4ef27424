"""Sums of an evaluation, as computed by the executor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EvaluationSums:
    """Sums per microbatch of an evaluation, on the device; not synchronized yet.

    Computed on the rank of the last stage; zero on other ranks.
    """

    losses: Tensor
    """fp32 [microbatches]: loss summed over the targets of the microbatch."""
    num_correct: Tensor
    """int64 [microbatches]: number of targets that are the most probable token."""

    @classmethod
    def zeros(cls, num_microbatches: int, device: torch.device) -> EvaluationSums:
        """Return the sums before the first microbatch."""
        losses = torch.zeros(num_microbatches, dtype=torch.float32, device=device)
        return cls(losses, torch.zeros(num_microbatches, dtype=torch.int64, device=device))
