"""Attention sinks: each head has one more logit in the softmax, a trained number, and no value to it.

With output o and log-sum-exp l of attention without sinks, l' = log(exp(l) + exp(sink)) and o' = o exp(l - l'). So a
sink is one more piece of the keys (`slice_attention.py`) with the value 0: a kernel's backward, called with o' and l',
returns the gradients of queries, keys and values, whatever kernel ran forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

SINKS = "s_aux"
"""Name of the argument by which transformers passes sinks to attention."""


def add_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return output [B, T, H, D] and log-sum-exp fp32 [B, H, T] with sinks [H], from those without; differentiable."""
    merged = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))
    factor = (lse - merged).exp().transpose(1, 2).unsqueeze(-1)
    return (output * factor).to(output.dtype), merged


def sinks_gradient(d_output: Tensor, output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient [H] of sinks, in fp32 at least, from `d_output` and what `add_sinks` returned."""
    delta = (d_output.to(lse.dtype) * output).sum(-1).transpose(1, 2)
    return -((sinks.to(lse.dtype).unsqueeze(1) - lse).exp() * delta).sum((0, 2))
