"""Formats of a frozen weight in memory: codes and scales instead of values.

A codec stores a matrix, or the stacked matrices of a layer's experts, in one run of bytes:

    bf16, fp32    values
    fp8, int8     codes [..., out, in] | fp32 scales [..., out]
    nf4           codes of two values a byte | fp32 scales of blocks of 64 values
    mxfp4         codes of two values a byte | bf16 scales of blocks of 32 rows of a column [..., in / 32, out]

Each part begins at a multiple of `PART_ALIGNMENT` bytes. Codes and scales of nf4 are those of bitsandbytes.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor

from mobius.errors import CheckpointError
from mobius.models.quantization import FP8, INT8

INT8_LARGEST: Final = 127
_SMALLEST_SCALE: Final = 1e-38
"""Smallest divisor, for values that are all zero."""
PART_ALIGNMENT: Final = 256
"""Alignment of parts, in bytes; enough for vectorized kernels."""

Shape = tuple[int, ...]
PartShapes = Mapping[str, tuple[torch.dtype, Shape]]
"""Dtype and shape by part, in the order of the bytes."""


class WeightCodec(ABC):
    """A format of one tensor. Both directions run on the tensors' device, a few MiB at a time."""

    name: ClassVar[str]
    """Name of the format."""

    def takes(self, shape: Shape) -> bool:
        """Whether tensors of `shape` have codes; others stay plain."""
        return True

    @abstractmethod
    def part_shapes(self, shape: Shape) -> PartShapes:
        """Return the parts of a tensor of `shape`."""

    @abstractmethod
    def _encode(self, values: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Store `values` in `parts`."""

    @abstractmethod
    def _decode(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        """Store the values of `parts` in `out`."""

    def num_bytes(self, shape: Shape) -> int:
        """Return the bytes of all parts of a tensor of `shape`."""
        return sum(_aligned(_bytes_of(*each)) for each in self.part_shapes(shape).values())

    def parts(self, raw: Tensor, shape: Shape) -> dict[str, Tensor]:
        """Views of the parts by name. Raises CheckpointError if `raw`, uint8, is not `num_bytes` long."""
        if raw.dtype != torch.uint8 or raw.shape != (self.num_bytes(shape),):
            raise CheckpointError(
                f"a tensor of shape {shape} takes {self.num_bytes(shape)} bytes in {self.name}, but there are "
                f"{raw.nbytes}. Its codes do not fit its shape: they belong to another tensor or format."
            )
        views, start = dict[str, Tensor](), 0
        for name, (dtype, own) in self.part_shapes(shape).items():
            views[name] = raw[start : start + _bytes_of(dtype, own)].view(dtype).view(own)
            start += _aligned(_bytes_of(dtype, own))
        return views

    def encode(self, values: Tensor, raw: Tensor) -> None:
        """Store `values`, of any float dtype, in `raw`, uint8 [num_bytes]. Raises CheckpointError like `check`."""
        shape = tuple(values.shape)
        self._encode(values, self.parts(raw, shape))
        self.check(raw, shape)

    def encode_part(self, values: Tensor, raw: Tensor, shape: Shape, first: int) -> None:
        """Store `values`, elements of a tensor of `shape` from element `first` on, in the tensor's bytes `raw`.

        A part must begin and end between rows and blocks, as an expert of stacked matrices does. Raises
        CheckpointError, also like `check`.
        """
        total, count, found = math.prod(shape), values.numel(), dict[str, Tensor]()
        for name, part in self.parts(raw, shape).items():
            (start, before), (stop, behind) = (divmod(each * part.numel(), total) for each in (first, first + count))
            if count < total and (before or behind):
                raise CheckpointError(
                    f"a tensor of shape {shape} is stored in pieces that are not whole rows and blocks of {self.name}. "
                    "Use --base_dtype bf16."
                )
            found[name] = part if count == total else part.view(-1)[start:stop]
        width = shape[-1]
        self._encode(values.reshape(-1, width) if count < total else values.reshape(shape), found)
        self.check(raw, shape)

    def decode(self, raw: Tensor, shape: Shape, out: Tensor) -> Tensor:
        """Fill the contiguous `out` [shape], in bf16, fp16 or fp32, and return it."""
        assert tuple(out.shape) == shape, (out.shape, shape)
        self._decode(self.parts(raw, shape), out)
        return out

    def check(self, raw: Tensor, shape: Shape) -> None:
        """Raise CheckpointError if `raw` has a wrong size, or scales that are not finite. The host waits for it."""
        for name, part in self.parts(raw, shape).items():
            if part.dtype.itemsize == 1 or not part.numel():
                continue
            extremes = torch.stack(torch.aminmax(part))
            if not extremes.isfinite().all():  # sync: once per tensor that is encoded or read
                raise CheckpointError(
                    f"the {name} of a tensor of shape {shape} in {self.name} range from {extremes[0]:g} to "
                    f"{extremes[1]:g}; they must be finite. The weights or their codes are damaged: get them again."
                )


class PlainCodec(WeightCodec):
    """Values without codes."""

    name: ClassVar = "bf16"
    dtype: ClassVar = torch.bfloat16

    def part_shapes(self, shape: Shape) -> PartShapes:
        """Return one part."""
        return {"values": (self.dtype, shape)}

    def _encode(self, values: Tensor, parts: Mapping[str, Tensor]) -> None:
        parts["values"].copy_(values)

    def _decode(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        out.copy_(parts["values"])


class Fp32Codec(PlainCodec):
    """Values in fp32."""

    name: ClassVar = "fp32"
    dtype: ClassVar = torch.float32


class RowCodec(WeightCodec):
    """Codes of eight bits, and a scale for each row: one output of a linear."""

    codes: ClassVar[torch.dtype]

    @abstractmethod
    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of `rows` [rows, width], and their fp32 scales [rows, 1]."""

    def part_shapes(self, shape: Shape) -> PartShapes:
        """Return codes, and scales of the rows."""
        return {"codes": (self.codes, shape), "scales": (torch.float32, shape[:-1])}

    def _encode(self, values: Tensor, parts: Mapping[str, Tensor]) -> None:
        for rows, codes, scales in self._chunks(values, parts):
            found = self.quantize(rows)
            codes.copy_(found[0])
            scales.copy_(found[1])

    def _decode(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        if out.device.type == "cuda":
            from mobius.models.triton_decoding import decode_rows  # Triton is missing on machines without GPUs

            width = out.shape[-1]
            decode_rows(parts["codes"].view(-1, width), parts["scales"].view(-1), out.view(-1, width))
            return
        for rows, codes, scales in self._chunks(out, parts):
            rows.copy_(codes.float().mul_(scales))

    def _chunks(self, values: Tensor, parts: Mapping[str, Tensor]) -> zip[tuple[Tensor, ...]]:
        width = values.shape[-1]
        both = values.reshape(-1, width), parts["codes"].view(-1, width), parts["scales"].view(-1, 1)
        return zip(*(each.split(max(1, _chunk_elements(values) // width)) for each in both), strict=True)


class Fp8Codec(RowCodec):
    """fp8 (e4m3) by the rule of 8-bit products. Decoded normal values are 2.6 % (root mean square) from the originals.

    Scales are powers of two; others would make no code finer, because codes are floating-point numbers.
    """

    name: ClassVar = FP8.name
    codes: ClassVar = FP8.codes

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales."""
        return FP8.quantize(rows)


class Int8Codec(RowCodec):
    """int8 with the largest magnitude of a row at 127, as in bitsandbytes.

    Decoded normal values are 0.9 % (root mean square) from the originals in rows of 4,096.
    """

    name: ClassVar = INT8.name
    codes: ClassVar = INT8.codes

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales."""
        rows = rows.float()
        scales = rows.abs().amax(-1, keepdim=True) / INT8_LARGEST
        return (rows / scales.clamp(min=_SMALLEST_SCALE)).round().to(self.codes), scales


NF4_BLOCK: Final = 64
"""Number of consecutive values that share a scale, also across rows."""
NF4_VALUES: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Value by code: quantiles of the normal distribution (arXiv 2305.14314, appendix E)."""
_INTERVALS: Final = 64
"""Intervals of [0, 1]; each has at most one bound between nf4's codes, and no bound is near an interval's ends."""


class Nf4Codec(WeightCodec):
    """bitsandbytes' nf4: codes of 4 bits, and the largest magnitude of each block of 64 values.

    A byte's high bits hold the first of two values. Decoded normal values are 9.2 % (root mean square) from the
    originals.
    """

    name: ClassVar = "nf4"

    def part_shapes(self, shape: Shape) -> PartShapes:
        """Return codes, two a byte, and the scales of the blocks."""
        count = math.prod(shape)
        return {"codes": (torch.uint8, (-(-count // 2),)), "absmax": (torch.float32, (-(-count // NF4_BLOCK),))}

    def _encode(self, values: Tensor, parts: Mapping[str, Tensor]) -> None:
        self._encode_blocks(values, parts["codes"], parts["absmax"])

    def _decode(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        decode_nf4(parts["codes"], parts["absmax"], out)

    def _encode_blocks(self, values: Tensor, codes: Tensor, absmax: Tensor) -> None:
        size = _chunk_elements(values)
        chunks = (each.split(length) for each, length in ((codes, size // 2), (absmax, size // NF4_BLOCK)))
        for chunk, bytes_, scales in zip(values.reshape(-1).split(size), *chunks, strict=True):
            blocks = padded(chunk.float(), NF4_BLOCK).view(-1, NF4_BLOCK)
            torch.amax(blocks.abs(), -1, out=scales)
            scaled = blocks * scales.clamp(min=_SMALLEST_SCALE).reciprocal_()[:, None]
            if rest := chunk.numel() % NF4_BLOCK:  # bitsandbytes on a CPU divides in an incomplete block
                scales[-1].clamp_(min=_SMALLEST_SCALE)
                torch.div(blocks[-1, :rest], scales[-1], out=scaled[-1, :rest])
            pairs = _nearest_codes(scaled).view(-1, 2)[: len(bytes_)]
            bytes_.copy_(pairs[:, 0] << 4 | pairs[:, 1])


MX_BLOCK: Final = 32
"""Number of values that share a scale in mxfp4."""
MX_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value by code of fp4, e2m1 (OCP Microscaling Formats 1.0, section 5.3)."""
_MX_LARGEST_EXPONENT: Final = 3
"""Exponent of the largest value, 0.75 * 2^3."""
_MX_WITHOUT_SCALES: Final = 2**16
"""Number of values that share a scale of one in the first pass of decoding."""


class Mxfp4Codec(WeightCodec):
    """mxfp4 of stacked matrices [experts, in, out] whose values came in it: exact, other values are an error.

    Codes of 4 bits, and a power of two for each block of 32 inputs of an output. A byte's high bits hold the first of
    two values, which are neighbours in a row.
    """

    name: ClassVar = "mxfp4"

    def takes(self, shape: Shape) -> bool:
        """Return True for stacked matrices of whole blocks."""
        return len(shape) == 3 and shape[1] % MX_BLOCK == 0 and shape[2] % 2 == 0

    def part_shapes(self, shape: Shape) -> PartShapes:
        """Return codes, two a byte, and the scales of the blocks."""
        *stack, rows, columns = shape
        scales = torch.bfloat16, (*stack, rows // MX_BLOCK, columns)
        return {"codes": (torch.uint8, (math.prod(shape) // 2,)), "scales": scales}

    def _encode(self, values: Tensor, parts: Mapping[str, Tensor]) -> None:
        columns = values.shape[-1]
        all_blocks = values.reshape(-1, MX_BLOCK, columns), parts["codes"].view(-1, MX_BLOCK * columns // 2)
        step = max(1, _chunk_elements(values) // (MX_BLOCK * columns))
        chunks = (each.split(step) for each in (*all_blocks, parts["scales"].view(-1, columns)))
        magnitudes = _table(MX_VALUES, values.device)[:8]
        for chunk, bytes_, scales in zip(*chunks, strict=True):
            blocks = chunk.float()
            _, exponents = torch.frexp(blocks.abs().amax(1))
            scales.copy_(torch.ldexp(torch.ones(scales.shape, device=scales.device), exponents - _MX_LARGEST_EXPONENT))
            scaled = blocks.abs() / scales.float()[:, None]
            codes = torch.bucketize(scaled, magnitudes).clamp_(max=7)
            if not torch.equal(magnitudes[codes], scaled):  # sync: once per chunk that is encoded
                raise CheckpointError(
                    f"a tensor has values without exact codes of {self.name}: they did not come in it. Use another "
                    "--base_dtype, such as nf4 or bf16."
                )
            pairs = (codes | blocks.signbit().long() << 3).to(torch.uint8).view(len(bytes_), -1, 2)
            bytes_.copy_(pairs[..., 0] << 4 | pairs[..., 1])

    def _decode(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        ones = torch.ones(-(-out.numel() // _MX_WITHOUT_SCALES), device=out.device)
        decode_nf4(parts["codes"], ones, out, _MX_WITHOUT_SCALES, _table(MX_VALUES, out.device))
        scales = parts["scales"].view(-1, 1, out.shape[-1])
        out.view(len(scales), MX_BLOCK, -1).mul_(scales)


DOUBLE_BLOCK: Final = 256
"""Number of nf4's scales that share a scale, if they are quantized."""


class DoubleNf4Codec(Nf4Codec):
    """nf4 whose scales are quantized, too: codes of 8 bits in blocks of 256, around the mean; 0.516 bytes a value.

    Codes of scales are the nearest. bitsandbytes on a CPU finds them by a table, so 0.2 % of its codes are the second
    nearest.
    """

    name: ClassVar = "nf4 with quantized scales"

    def part_shapes(self, shape: Shape) -> PartShapes:
        """Return codes of values and of scales, and the scales and mean of the latter."""
        plain = super().part_shapes(shape)
        num_blocks = plain["absmax"][1][0]
        return {
            "codes": plain["codes"],
            "absmax": (torch.uint8, (num_blocks,)),
            "nested_absmax": (torch.float32, (-(-num_blocks // DOUBLE_BLOCK),)),
            "nested_offset": (torch.float32, (1,)),
        }

    def _encode(self, values: Tensor, parts: Mapping[str, Tensor]) -> None:
        scales = torch.empty(parts["absmax"].shape, device=values.device)
        self._encode_blocks(values, parts["codes"], scales)
        parts["nested_offset"].copy_(scales.mean())
        scales -= parts["nested_offset"]
        blocks = padded(scales, DOUBLE_BLOCK).view(-1, DOUBLE_BLOCK)
        torch.amax(blocks.abs(), -1, out=parts["nested_absmax"])
        table = dynamic_table(values.device)
        scaled = blocks * parts["nested_absmax"].clamp(min=_SMALLEST_SCALE).reciprocal()[:, None]
        codes = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2).view(-1)
        parts["absmax"].copy_(codes[: scales.numel()])

    def _decode(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        table = dynamic_table(out.device)
        scales = decode_scales(parts["absmax"], table, parts["nested_absmax"], parts["nested_offset"], DOUBLE_BLOCK)
        decode_nf4(parts["codes"], scales, out)


def decode_nf4(codes: Tensor, absmax: Tensor, out: Tensor, block: int = NF4_BLOCK, table: Tensor | None = None) -> None:
    """Store the values of nf4's `codes`, two a byte, with an fp32 scale for each `block` values, in `out`.

    A `table` of 16 values replaces those of nf4.
    """
    table = nf4_table(out.device) if table is None else table
    if out.device.type == "cuda":
        from mobius.models.triton_decoding import decode_nibbles  # Triton is missing on machines without GPUs

        decode_nibbles(codes.view(-1), absmax, table, out.view(-1), block)
        return
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], -1)  # a byte's two values
    size = _chunk_elements(out) // block * block
    own = codes.view(-1).split(size // 2), absmax.split(size // block)
    for chunk, bytes_, scales in zip(out.view(-1).split(size), *own, strict=True):
        values = padded(pairs.index_select(0, bytes_.int()).view(-1), block).view(-1, block)
        chunk.copy_(values.mul_(scales[:, None]).view(-1)[: chunk.numel()])


def decode_scales(codes: Tensor, table: Tensor, scales: Tensor, offset: Tensor, block: int) -> Tensor:
    """Return the fp32 values of the scales that `codes` index in `table`."""
    found = padded(table.index_select(0, codes.view(-1).int()), block).view(-1, block)
    return (found * scales[:, None]).view(-1)[: codes.numel()] + offset


def nf4_table(device: torch.device) -> Tensor:
    """Return `NF4_VALUES` on `device`."""
    return _table(NF4_VALUES, device)


@functools.cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


@functools.cache
def dynamic_table(device: torch.device) -> Tensor:
    """256 values in rising order: 0, 1, and for each power of ten from 1e-6 twice as many (arXiv 1511.04561)."""
    values = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1)
        means = (bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (exponent - 6)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), device=device)


def _nearest_codes(values: Tensor) -> Tensor:
    """Return nf4's int32 codes of fp32 `values` of magnitude 1 and less; of two equally near codes, the lower one.

    The interval of a value tells all bounds between codes but one, so this takes a fifth of a binary search's time.
    """
    below, bounds = _codes_by_interval(values.device)
    interval = ((values + 1) * _INTERVALS).int().clamp_(0, 2 * _INTERVALS).view(-1)  # also of nan
    return below.index_select(0, interval) + (values.view(-1) > bounds.index_select(0, interval))


@functools.cache
def _codes_by_interval(device: torch.device) -> tuple[Tensor, Tensor]:
    """Lowest code of each interval, and the bound above which the next code is nearer."""
    table = nf4_table(device)
    bounds = (table[:-1] + table[1:]) / 2
    starts = torch.arange(2 * _INTERVALS + 1, device=device) / _INTERVALS - 1
    below = torch.bucketize(starts, bounds, out_int32=True)
    return below, torch.cat([bounds, bounds.new_tensor([torch.inf])])[below]


def padded(flat: Tensor, multiple: int) -> Tensor:
    """Return `flat` with zeros up to a multiple of `multiple` elements; itself if its length is one."""
    missing = -flat.numel() % multiple
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def _chunk_elements(values: Tensor) -> int:
    """Number of elements that are converted at a time: 1 MiB in fp32 on a CPU, which a cache holds, else 16 MiB."""
    return 2**18 if values.device.type == "cpu" else 2**22


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // PART_ALIGNMENT) * PART_ALIGNMENT


def _bytes_of(dtype: torch.dtype, shape: Shape) -> int:
    return math.prod(shape) * dtype.itemsize


CODECS: Final[Mapping[str, WeightCodec]] = {
    codec.name: codec for codec in (PlainCodec(), Fp32Codec(), Fp8Codec(), Int8Codec(), Nf4Codec(), Mxfp4Codec())
}
"""Name -> codec."""
