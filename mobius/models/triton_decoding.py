"""Triton kernels of weight_codecs.py; import this module only on machines with a GPU, where torch installs Triton.

A kernel reads codes and scales once and writes values once; products are those of the same fp32 numbers as on a CPU,
rounded once, so values have the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Number of values that a program decodes."""


def decode_nibbles(codes: Tensor, scales: Tensor, table: Tensor, out: Tensor, block: int) -> None:
    """Store table[code] * scale in the flat `out`, for two codes in each byte; `block` values share an fp32 scale."""
    count = out.numel()
    _decode_nibbles[(triton.cdiv(count, BLOCK),)](codes, scales, table, out, count, per_scale=block, block=BLOCK)


def decode_rows(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Store code * scale in `out` [rows, width], for `codes` of eight bits and an fp32 scale of each row."""
    rows, width = out.shape
    _decode_rows[(rows, triton.cdiv(width, BLOCK))](codes, scales, out, width, block=BLOCK)


@triton.jit
def _decode_nibbles(codes, scales, table, out, count, per_scale: tl.constexpr, block: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = index < count
    code = tl.load(codes + index // 2, mask=mask, other=0).to(tl.int32) >> tl.where(index % 2 == 0, 4, 0)
    scale = tl.load(scales + index // per_scale, mask=mask, other=0.0)
    tl.store(out + index, tl.load(table + (code & 15)) * scale, mask=mask)


@triton.jit
def _decode_rows(codes, scales, out, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < width
    code = tl.load(codes + row * width + column, mask=mask, other=0.0)
    tl.store(out + row * width + column, code.to(tl.float32) * tl.load(scales + row), mask=mask)
