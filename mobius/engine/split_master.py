"""Splits an fp32 number into a bf16 number and a 16-bit remainder, in torch; adamw.c has the same arithmetic in C.

The bits of the master are (bits of the weight << 16) + remainder. The weight is the master rounded to bf16, to nearest,
ties to even. Numbers of one sign have the same order as their bits. So the remainder is the signed distance to the
weight in fp32 steps, between -32768 and 32768. Only 32768 does not fit into 16 bits; it is the exact tie that rounds
towards zero. It becomes 32767, which moves such a master (one number in 131072) by one fp32 step towards zero. The
moved master rounds to the same weight, and is stored exactly afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor


def join_master(weights: Tensor, remainder: Tensor, *, out: Tensor) -> Tensor:
    """Write the master of `weights` (bf16) and `remainder` (int16) to `out` (fp32) and return it.

    All tensors must be contiguous, of equal length and on one device. Allocates nothing.
    """
    bits = out.view(torch.int32)
    bits.copy_(weights.view(torch.int16))
    bits.bitwise_left_shift_(16).add_(remainder)
    return out


def split_master(master: Tensor, *, weights: Tensor, remainder: Tensor) -> None:
    """Split `master` (fp32) into `weights` (bf16) and `remainder` (int16); needs 4 temporary bytes per element.

    All tensors must be contiguous, of equal length and on one device. Infinities are kept; a NaN becomes some NaN.
    """
    weights.copy_(master)
    rounded = weights.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    distance = torch.sub(master.view(torch.int32), rounded, out=rounded)
    remainder.copy_(distance.clamp_(-(2**15), 2**15 - 1))
