"""Triton kernels of quantization.py; import this module only on machines with a GPU, where torch installs Triton.

Results have the same bits as on a CPU: maxima of integers, powers of two and int32 sums do not depend on the order in
which programs run. Codes of rows whose scale is NaN are unspecified.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mobius.models.quantization import FORMATS

BLOCK = 128
"""Number of rows and of columns in a tile of a weight; codes are read and written in segments of this many bytes."""
SCALES_BLOCK = 1024
GROUP = tl.constexpr(8)
"""Number of row tiles whose programs run together, so that they read the codes of a weight from the L2 cache."""
_HAS_TMA = 9
"""Major compute capability whose tensor memory accelerator loads tiles: 12 to 16 % faster; others are untested."""
_FORMATS = {own.codes: own for own in FORMATS.values()}


class Tile(NamedTuple):
    """Size of the tiles of an int8 product, and launch settings of the program that computes a tile."""

    rows_block: int
    out_block: int
    in_block: int
    num_warps: int
    num_stages: int


TILES: dict[int, tuple[Tile, ...]] = {
    9: (Tile(128, 256, 128, 8, 4), Tile(128, 128, 128, 4, 3), Tile(64, 128, 128, 4, 4)),
    8: (Tile(128, 128, 64, 4, 4), Tile(64, 128, 64, 4, 4), Tile(64, 64, 64, 4, 4)),
}
"""Major compute capability -> tiles, the preferred first, for 192 (9) or 64 KiB (8 and others) of shared memory."""


def quantize_matrix(
    weight: Tensor, by_rows: Tensor, row_scales: Tensor, by_columns: Tensor, column_scales: Tensor
) -> None:
    """Fill the codes and scales of a `quantization.QuantizedMatrix` from `weight`, bf16 [rows, columns].

    All tensors are contiguous. Reads the weight twice and allocates nothing; asynchronous.
    """
    shape, own = weight.shape, _FORMATS[by_rows.dtype]
    tiles = triton.cdiv(shape[1], BLOCK), triton.cdiv(shape[0], BLOCK)
    largest = row_scales.view(torch.int32), column_scales.view(torch.int32)
    torch._foreach_zero_(largest)
    _largest_bits[tiles](weight.view(torch.int16), *largest, *shape, block=BLOCK, num_warps=8)
    _bits_to_scales[(triton.cdiv(max(shape), SCALES_BLOCK),)](
        *largest, *shape, exponent=own.exponent, carry=own.carry, block=SCALES_BLOCK
    )
    _write_codes[tiles](weight, by_rows, largest[0], by_columns, largest[1], *shape, block=BLOCK, num_warps=8)


@triton.jit
def _largest_bits(weight, rows_largest, columns_largest, num_rows, num_columns, block: tl.constexpr):
    """Update the largest magnitudes of rows and columns, as bits of fp32, from one tile of `weight`, bits of bf16."""
    row = tl.program_id(1) * block + tl.arange(0, block)
    column = tl.program_id(0) * block + tl.arange(0, block)
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    index = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    bits = (tl.load(weight + index, mask=mask, other=0).to(tl.int32) & 0x7FFF) << 16
    tl.atomic_max(rows_largest + row, tl.max(bits, axis=1), mask=row < num_rows, sem="relaxed")
    tl.atomic_max(columns_largest + column, tl.max(bits, axis=0), mask=column < num_columns, sem="relaxed")


@triton.jit
def _bits_to_scales(
    rows, columns, num_rows, num_columns, exponent: tl.constexpr, carry: tl.constexpr, block: tl.constexpr
):
    """Replace the largest magnitudes with the scales that `EightBitFormat.scales` returns, all as bits of fp32."""
    index = tl.program_id(0) * block + tl.arange(0, block)
    bits = tl.load(rows + index, mask=index < num_rows, other=0)
    tl.store(rows + index, _scale_bits(bits, exponent, carry), mask=index < num_rows)
    bits = tl.load(columns + index, mask=index < num_columns, other=0)
    tl.store(columns + index, _scale_bits(bits, exponent, carry), mask=index < num_columns)


@triton.jit
def _scale_bits(bits, exponent: tl.constexpr, carry: tl.constexpr):
    scale = tl.minimum(tl.maximum(((bits + carry) >> 23) - exponent, 1), 253) << 23
    return tl.where(bits >= 0x7F800000, 0x7FC00000, scale)


@triton.jit
def _write_codes(weight, by_rows, row_scales, by_columns, column_scales, num_rows, num_columns, block: tl.constexpr):
    """Write the codes of a tile by rows and by columns; scales are given as bits of fp32."""
    row = tl.program_id(1) * block + tl.arange(0, block)
    column = tl.program_id(0) * block + tl.arange(0, block)
    is_row, is_column = row < num_rows, column < num_columns
    index = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    values = tl.load(weight + index, mask=is_row[:, None] & is_column[None, :], other=0.0).to(tl.float32)
    inverse = _inverse(tl.load(row_scales + row, mask=is_row, other=0))
    codes = _codes(values * inverse[:, None], by_rows.dtype.element_ty)
    tl.store(by_rows + index, codes, mask=is_row[:, None] & is_column[None, :])
    inverse = _inverse(tl.load(column_scales + column, mask=is_column, other=0))
    codes = tl.trans(_codes(values * inverse[None, :], by_columns.dtype.element_ty))
    index = column.to(tl.int64)[:, None] * num_rows + row[None, :]
    tl.store(by_columns + index, codes, mask=is_column[:, None] & is_row[None, :])


@triton.jit
def _inverse(scale_bits):
    return ((254 << 23) - scale_bits).to(tl.float32, bitcast=True)


@triton.jit
def _codes(scaled, dtype: tl.constexpr):
    """Round `scaled` to the nearest code, ties to even."""
    if dtype == tl.int8:
        return (scaled + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)  # + 1.5 * 2^23: an integer's bits come last
    else:  # noqa: RET505 (Triton compiles one of the two)
        return scaled.to(dtype)


def int8_product(rows: Tensor, row_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Multiply int8 `rows` [m, k] by int8 `codes` [n, k], both contiguous; return bf16 [m, n]. Asynchronous.

    `row_scales` [m, 1] and `scales` [n] are fp32. `k` and `n` are multiples of 16.
    """
    (num_rows, num_in), num_out = rows.shape, codes.shape[0]
    output = rows.new_empty(num_rows, num_out, dtype=torch.bfloat16)
    tile, num_tiles = _tile_of(num_rows, num_out, rows.device)
    left, right, has_tma = rows, codes, _processors(rows.device)[0] == _HAS_TMA
    if has_tma:
        left = TensorDescriptor.from_tensor(rows, [tile.rows_block, tile.in_block])
        right = TensorDescriptor.from_tensor(codes, [tile.out_block, tile.in_block])
    _int8_tiles[(num_tiles,)](
        *(left, row_scales, right, scales, output, num_rows, num_in, num_out),
        is_whole=num_in % tile.in_block == 0,
        has_tma=has_tma,
        **tile._asdict(),
    )
    return output


def _tile_of(num_rows: int, num_out: int, device: torch.device) -> tuple[Tile, int]:
    """Return the first tile size with enough tiles for all multiprocessors, else the last, and the number of tiles."""
    capability, num_processors = _processors(device)
    for tile in TILES.get(capability, TILES[8]):
        num_tiles = triton.cdiv(num_rows, tile.rows_block) * triton.cdiv(num_out, tile.out_block)
        if num_tiles >= num_processors:
            break
    return tile, num_tiles


@functools.cache
def _processors(device: torch.device) -> tuple[int, int]:
    """Major compute capability and number of multiprocessors of a GPU."""
    own = torch.cuda.get_device_properties(device)
    return own.major, own.multi_processor_count


@triton.jit(do_not_specialize=["num_rows"])
def _int8_tiles(
    rows,
    row_scales,
    codes,
    scales,
    output,
    num_rows,
    num_in,
    num_out,
    is_whole: tl.constexpr,
    has_tma: tl.constexpr,
    rows_block: tl.constexpr,
    out_block: tl.constexpr,
    in_block: tl.constexpr,
):
    """Compute one tile of the output; `is_whole` is set if `in_block` divides `num_in`.

    With `has_tma`, `rows` and `codes` are descriptors, which read zeros beyond the last row or column.
    """
    num_down, num_across = tl.cdiv(num_rows, rows_block), tl.cdiv(num_out, out_block)
    place = tl.program_id(0)
    first = place // (GROUP * num_across) * GROUP
    height = tl.minimum(num_down - first, GROUP)
    place %= GROUP * num_across
    first_row = (first + place % height) * rows_block
    first_column = place // height * out_block
    row, column = first_row + tl.arange(0, rows_block), first_column + tl.arange(0, out_block)
    total = tl.zeros((rows_block, out_block), dtype=tl.int32)
    if has_tma:
        for start in range(0, num_in, in_block):
            own, theirs = rows.load([first_row, start]), codes.load([first_column, start])
            total = tl.dot(own, theirs.T, total, out_dtype=tl.int32)
    else:
        inner = tl.arange(0, in_block)
        # Indices beyond the end read the last row or column again, so only the store needs a mask.
        left = rows + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * num_in + inner[None, :]
        right = codes + tl.minimum(column, num_out - 1).to(tl.int64)[:, None] * num_in + inner[None, :]
        for start in range(0, num_in, in_block):
            if is_whole:
                own, theirs = tl.load(left), tl.load(right)
            else:
                mask = (inner < num_in - start)[None, :]
                own, theirs = tl.load(left, mask=mask, other=0), tl.load(right, mask=mask, other=0)
            total = tl.dot(own, tl.trans(theirs), total, out_dtype=tl.int32)
            left += in_block
            right += in_block
    is_row, is_column = row < num_rows, column < num_out
    result = total.to(tl.float32) * tl.load(row_scales + row, mask=is_row, other=0.0)[:, None]
    result = result * tl.load(scales + column, mask=is_column, other=0.0)[None, :]
    target = output + row.to(tl.int64)[:, None] * num_out + column[None, :]
    tl.store(target, result.to(tl.bfloat16), mask=is_row[:, None] & is_column[None, :])
