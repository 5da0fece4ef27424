"""An fp32 number as a bf16 number and a 16-bit remainder: the arithmetic, in torch; adamw.c has the same in C.

The bits of the master are (bits of the weight << 16) + remainder, where the weight is the master rounded to bf16, to
nearest and to even. Bits of one sign are in the order of the magnitudes they stand for, so the remainder is the signed
distance to the weight in steps of fp32, between -32768 and 32768. The one value that 16 bits cannot hold, 32768, is the
exact tie that rounds towards zero: it becomes 32767, which moves such a master by one step of fp32 towards zero (of all
numbers one in 131072). What is so moved rounds to the same weight and is kept exactly from then on.
"""

from __future__ import annotations

import torch
from torch import Tensor


def join_master(weights: Tensor, remainder: Tensor, *, out: Tensor) -> Tensor:
    """Put the master of `weights` (bf16) and `remainder` (int16) into `out` (fp32) and return it.

    All are contiguous, of one length and on one device. Takes no further memory.
    """
    bits = out.view(torch.int32)
    bits.copy_(weights.view(torch.int16))
    bits.bitwise_left_shift_(16).add_(remainder)
    return out


def split_master(master: Tensor, *, weights: Tensor, remainder: Tensor) -> None:
    """Put `master` (fp32) into `weights` (bf16) and `remainder` (int16); takes 4 bytes per element for a while.

    All are contiguous, of one length and on one device. An infinity is kept, and a NaN stays some NaN.
    """
    weights.copy_(master)
    rounded = weights.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    distance = torch.sub(master.view(torch.int32), rounded, out=rounded)
    remainder.copy_(distance.clamp_(-(2**15), 2**15 - 1))
