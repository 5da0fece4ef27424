"""Eight-bit formats for the matrix products of linears: codes, scales, and products of codes.

    codes = round(values * 2^-n)      values ~ codes * scale, scale = 2^n

Each row has the smallest scale with which its largest code does not overflow. Scales are powers of two, so division by
them is exact. They depend only on the current values, so a recomputed forward has the same codes, and no state is kept
between steps. If a value is not finite, the scale and all products of its row are NaN.

    forward    y  = x W^T     codes of x by token, of W by row (output)
    backward   dx = dy W      codes of dy by token, of W by column (input)

The fp8 format is e4m3 (arXiv 2209.05433). Sums of int8 products are exact; arXiv 2503.08040 shows the limits of int8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mobius.errors import GpuMemoryError, first_line

WIDTH_MULTIPLE = 16
"""Tensor cores need numbers of rows and columns that are multiples of this number."""
_INFINITY = 0x7F800000
_EXPONENT = 23
"""Bits of fp32's infinity, and the position of its exponent."""


@dataclass(frozen=True)
class EightBitFormat:
    """Format of codes, and the rule that converts values to codes."""

    name: str
    """Name, as in --matmul_dtype."""
    codes: torch.dtype
    exponent: int
    """Power of two of the largest code: the code is at least 2^exponent and below 2^(exponent + 1)."""
    carry: int
    """Number added to a value's bits: it raises the exponent if the mantissa exceeds the largest code's mantissa."""

    def scales(self, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Return fp32 scales of rows from their largest magnitudes, and inverse scales, by which values are multiplied.

        A magnitude that is not finite has the scale NaN.
        """
        bits = largest.view(torch.int32) & 0x7FFFFFFF
        exponent = ((bits + self.carry) >> _EXPONENT) - self.exponent
        exponent = exponent.clamp(1, 253)
        scales = (exponent << _EXPONENT).view(torch.float32)
        inverse = ((254 - exponent) << _EXPONENT).view(torch.float32)
        return torch.where(bits >= _INFINITY, torch.nan, scales), inverse

    def quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of `values` [rows, width], and their scales [rows, 1] in fp32."""
        values = values.float()
        scales, inverse = self.scales(values.abs().amax(-1, keepdim=True))
        scaled = values * inverse
        return (scaled.round() if self.codes == torch.int8 else scaled).to(self.codes), scales


FP8 = EightBitFormat("fp8", torch.float8_e4m3fn, exponent=8, carry=0x1FFFFF)
"""fp8 (e4m3): the largest code is 1.75 * 2^8 = 448."""
INT8 = EightBitFormat("int8", torch.int8, exponent=6, carry=0x1FFFF)
"""int8: the largest code is 127."""
FORMATS = {each.name: each for each in (FP8, INT8)}
"""Value of --matmul_dtype -> format."""
_BY_CODES = {each.codes: each for each in FORMATS.values()}


def check_products(matmul_dtype: str, device: torch.device) -> None:
    """Multiply small matrices on a GPU; raise GpuMemoryError if this fails or a product is not exact."""
    eight_bit = FORMATS.get(matmul_dtype)
    if eight_bit is None or device.type != "cuda":
        return
    generator = torch.Generator().manual_seed(1)
    rows, codes = (torch.randint(-7, 8, (size, 64), generator=generator).to(eight_bit.codes) for size in (48, 32))
    row_scales, scales = (torch.exp2(torch.arange(size) % 5 - 2.0) for size in (48, 32))
    given = rows, row_scales[:, None], codes, scales
    try:
        found = _on_gpu(torch.bfloat16, *(each.to(device) for each in given)).cpu()
        reason = None if torch.equal(found, _emulated(torch.bfloat16, *given)) else "its products are wrong"
    except Exception as error:  # errors of torch and of Triton have no common class
        reason = first_line(error)
    if reason is not None:
        name, other = torch.cuda.get_device_name(device), "int8 (compute capability 8.0 and newer) or "
        raise GpuMemoryError(
            f"--matmul_dtype {eight_bit.name}: {name} does not multiply in this format with torch {torch.__version__} "
            f"({reason}); use {other if eight_bit is FP8 else ''}bf16"
        )


class QuantizedMatrix(NamedTuple):
    """Codes of a weight [out, in], once by rows and once by columns, with a scale for each row and column."""

    by_rows: Tensor
    """[out, in], for the output."""
    row_scales: Tensor
    """fp32 [out]."""
    by_columns: Tensor
    """[in, out], for the gradient of the input."""
    column_scales: Tensor
    """fp32 [in]."""

    def fill(self, weight: Tensor) -> None:
        """Quantize `weight` [out, in], which must not share memory with the codes."""
        if weight.device.type == "cuda":
            from mobius.models.triton_products import quantize_matrix

            quantize_matrix(weight, *self)
            return
        own = _BY_CODES[self.by_rows.dtype]
        for values, codes, scales in ((weight, *self[:2]), (weight.t(), *self[2:])):
            made = own.quantize(values)
            codes.copy_(made[0])
            scales.copy_(made[1].flatten())


def product(inputs: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Quantize `inputs` [..., width] by row, and multiply by a matrix with `codes` [n, width] and fp32 `scales` [n].

    Returns [..., n] in the dtype of `inputs`, rounded once from fp32. Sums of int8 have the same bits everywhere.
    """
    rows = inputs.reshape(-1, inputs.shape[-1])
    own, row_scales = _BY_CODES[codes.dtype].quantize(rows)
    multiply = _on_gpu if inputs.device.type == "cuda" else _emulated
    return multiply(inputs.dtype, own, row_scales, codes, scales).reshape(*inputs.shape[:-1], codes.shape[0])


def _emulated(dtype: torch.dtype, rows: Tensor, row_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    if codes.dtype == torch.int8:
        sums = (rows.double() @ codes.t().double()).float()  # exact, as in int32
        return (sums * row_scales * scales).to(dtype)
    return ((rows.float() * row_scales) @ (codes.float() * scales[:, None]).t()).to(dtype)


def _on_gpu(dtype: torch.dtype, rows: Tensor, row_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    if codes.dtype == torch.int8:
        return _int8_product()(rows, row_scales, codes, scales)
    scaled = rows, codes.t(), row_scales, scales[None]
    return torch._scaled_mm(*scaled, out_dtype=dtype, use_fast_accum=True)


@functools.cache
def _int8_product() -> Callable[..., Tensor]:
    """Custom operation for int8 products, registered at first use."""

    @torch.library.custom_op("mobius::int8_product", mutates_args=())
    def multiply(rows: Tensor, row_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        from mobius.models.triton_products import int8_product

        return int8_product(rows, row_scales, codes, scales)

    multiply.register_fake(
        lambda rows, row_scales, codes, scales: rows.new_empty(len(rows), len(codes), dtype=torch.bfloat16)
    )
    return multiply
