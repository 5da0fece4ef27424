"""Squared gradient norms, and gradients in another format, on the device and without synchronization."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def squared_norm(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of all `tensors`, fp32 scalar on `device`; 0 without tensors.

    Per tensor first, then over the tensors: the order of torch.nn.utils.get_total_norm.
    """
    listed = list(tensors)
    if not listed:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch._foreach_norm(listed, 2.0, dtype=torch.float32)
    return torch.stack(list(norms)).square().sum()


def cast_gradients(source: Tensor, target: Tensor, square: Tensor) -> Tensor:
    """Copy fp32 gradients into `target` of another format; returns `square`, their squared norm.

    It becomes NaN if a value became infinite on the way (fp16), so that this is seen with the other non-finite ones.
    """
    target.copy_(source)
    return square + target.abs().max().float() * 0 if target.dtype == torch.float16 else square
