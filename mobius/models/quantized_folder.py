"""Weights of models that come quantized, decoded tensor by tensor to the values that their format defines.

    quant_method         tensors of a linear layer, beside its bias            value of a code
    bitsandbytes         weight, .absmax, .quant_map, .quant_state, .nested_*  table[code] * absmax of its block
                         weight, SCB                                           code * SCB / 127
    fp8, fbgemm_fp8      weight, weight_scale_inv or weight_scale              code * scale
    compressed-tensors   weight, weight_scale, weight_zero_point               (code - zero) * scale
                         weight_packed, weight_shape, and the same             (code - zero) * scale
    gptq, awq            qweight, qzeros, scales, g_idx                        (code - zero) * scale, transposed
    mxfp4                *_blocks, *_scales of experts in one tensor           table[code] * 2^scale, transposed

A scale is of the whole tensor, a row, a group of a row's columns, or a block of rows and columns. Values are computed
in fp32 and rounded once. config.json names the format; names and dtypes of tensors tell which layers are quantized.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mobius.config.config import BaseDtype, Config
from mobius.errors import CheckpointError, ConfigError, excerpt
from mobius.files.regular_files import read_json
from mobius.models.tensor_file import DTYPES, PLAIN_DTYPES, StoredTensor
from mobius.models.weight_codecs import MX_BLOCK, MX_VALUES, decode_nf4, decode_scales
from mobius.process.log import RANK_ZERO_ONLY

logger = logging.getLogger(__name__)

_FIELD, _OLDER_FIELD = "quantization_config", "compression_config"
"""Field of config.json that describes the format, and its name in older files, which are not read."""
_FLOATS: Final = ("F32", "BF16", "F16")
_OF_COMPRESSED: Final = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_WORD_BITS: Final = 32
_AWQ_BITS, _AWQ_COLUMNS = 4, 8
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place, in a word, of the code of each of eight columns."""
_MX_BIAS, _MX_NO_NUMBER = 127, 255
"""Number that is added to the exponents of scales, and the code of a scale that is no number."""
_CHUNK_ELEMENTS: Final = 2**20
"""Number of values that are decoded at a time, so that no whole tensor is held in a wider format."""
_WITHOUT_CODES: Final = re.compile(r"[._]([qkv]|kv|input|output|activation|weight)_(scale|zero_point|global_scale)\w*$")
"""Names of scales of activations, which are computed without codes here, and of weights that have no codes."""


@dataclass(frozen=True)
class Quantization:
    """Format of a quantized model, as its config.json describes it."""

    method: str
    """The field quant_method."""
    text: str
    """Name of the format for users."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Rows and columns that may share a scale; -1 columns are all columns."""
    bits: tuple[int, ...] = ()
    """Numbers of bits that a packed code may have."""
    lowest_zero: int = 0
    """Number added to stored zeros."""
    refusal: str | None = None
    """Reason (a clause) why the weights are not read, or None."""
    field: str = _FIELD


def find_quantization(fields: Mapping[str, Any]) -> Quantization | None:
    """Format that the fields of a config.json describe; None for plain weights."""
    text = fields.get("text_config")
    own = fields.get(_FIELD, text.get(_FIELD) if isinstance(text, dict) else None)
    older = fields.get(_OLDER_FIELD)
    if own is None and older is None:
        return None
    found = older if own is None else own
    method = found.get("quant_method") if isinstance(found, dict) else found
    if own is None:
        return Quantization(str(method), str(method), refusal="the field is an older one", field=_OLDER_FIELD)
    if not isinstance(method, str) or method not in _FORMATS:
        return Quantization(str(method), str(method), refusal=f"methods that are read: {', '.join(_FORMATS)}")
    try:
        parsed = _FORMATS[method].parse(method, own)
        if any(rows < 1 or columns == 0 for rows, columns in parsed.blocks) or {*parsed.bits} - {*range(1, 9)}:
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return Quantization(method, method, refusal="its fields are not those of the method")
    return parsed


def without_quantization(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json for decoded weights."""
    return {name: value for name, value in fields.items() if name != _FIELD}


def read_quantization(folder: Path) -> Quantization | None:
    """Read the format of the model in `folder`; None for plain weights."""
    fields = read_json(path) if (path := folder / "config.json").is_file() else None
    return find_quantization(fields) if isinstance(fields, dict) else None


def log_decoded(folder: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Say how many of the tensors in `folder` are decoded, if any."""
    number = sum(isinstance(tensor, DecodedTensor) for tensor in stored.values())
    if number and (quantization := read_quantization(folder)) is not None:
        text = "%s comes quantized (%s): %d of its %d tensors are decoded to plain weights"
        logger.info(text, folder, quantization.text, number, len(stored), extra=RANK_ZERO_ONLY)


def check_dequantized(folder: Path, config: Config) -> None:
    """Raise ConfigError if all parameters of a quantized model are trained without --dequantize_base.

    Also raises it for this option with plain weights, and for --base_dtype mxfp4 with weights that come in no mxfp4.
    """
    has_weights, is_asked = any(folder.glob("*.safetensors*")), config.model.dequantize_base
    base_dtype, own = config.adapters.base_dtype, read_quantization(folder)
    if base_dtype is BaseDtype.MXFP4 and (own is None or own.method != base_dtype):
        raise ConfigError(
            f"--base_dtype mxfp4: {folder} does not come in mxfp4, and other weights have no exact codes of it. Use "
            "nf4, int8 or fp8."
        )
    quantization = read_quantization(folder) if has_weights else None
    if quantization is None and is_asked:
        raise ConfigError(f"--dequantize_base: the weights in {folder} are not quantized. Leave it out.")
    trains_all = config.evaluation.do_train and not config.adapters.has_frozen_base
    if quantization is not None and trains_all and not is_asked:
        raise ConfigError(
            f"{folder} comes quantized ({quantization.text}), and all parameters are to be trained. Train adapters "
            "(--use_lora), whose base keeps the decoded values, or add --dequantize_base: it trains the decoded "
            "weights, and saves plain ones."
        )


def _parse_bitsandbytes(method: str, fields: Mapping[str, Any]) -> Quantization:
    has_4bit = fields.get("load_in_4bit") or fields.get("_load_in_4bit")
    return Quantization(method, f"{method} {fields.get('bnb_4bit_quant_type', 'fp4') if has_4bit else 'int8'}")


def _parse_fp8(method: str, fields: Mapping[str, Any]) -> Quantization:
    size = fields.get("weight_block_size")
    return Quantization(method, method, ((int(size[0]), int(size[1])),) if size else ())


def _parse_compressed(method: str, fields: Mapping[str, Any]) -> Quantization:
    groups = [group for group in fields["config_groups"].values() if group.get("weights")]
    formats = {fields.get("format"), *(group.get("format") for group in groups)} - {None, "mixed-precision", "dense"}
    refusal = None
    if others := sorted(map(str, formats - {*_OF_COMPRESSED})):
        refusal = f"format {excerpt(others[0])}; formats that are read: {', '.join(_OF_COMPRESSED)}"
    elif fields.get("transform_config") or (fields.get("sparsity_config") or {}).get("format", "dense") != "dense":
        refusal = "its weights are also rotated or sparse"
    weights = [group["weights"] for group in groups]
    blocks = [each.get("block_structure") or (1, each.get("group_size") or -1) for each in weights]
    return Quantization(
        method,
        " ".join([method, *sorted(map(str, formats))]),
        tuple((int(rows), int(columns)) for rows, columns in blocks),
        tuple(sorted({int(each["num_bits"]) for each in weights})),
        refusal=refusal,
    )


def _parse_mxfp4(method: str, fields: Mapping[str, Any]) -> Quantization:
    return Quantization(method, method)


def _parse_packed(method: str, fields: Mapping[str, Any]) -> Quantization:
    bits, is_gptq = int(fields.get("bits", 4)), method == "gptq"
    refusal = None
    if bits not in ((2, 3, 4, 8) if is_gptq else (_AWQ_BITS,)):
        refusal = f"{bits} bits"
    elif (version := fields.get("version", "gemm")) != "gemm" and not is_gptq:
        refusal = f"version {version!r}; only 'gemm' is read"
    elif is_gptq and (order := fields.get("checkpoint_format") or "gptq") not in ("gptq", "gptq_v2"):
        refusal = f"checkpoint_format {order!r}; 'gptq' and 'gptq_v2' are read"
    has_one_less = is_gptq and fields.get("checkpoint_format") != "gptq_v2"
    blocks = ((1, int(fields.get("group_size", 128))),)
    return Quantization(method, f"{method} with {bits} bits", blocks, (bits,), int(has_one_less), refusal)


@dataclass(frozen=True, slots=True)
class DecodedTensor(StoredTensor):
    """A weight whose codes are stored; `path` is their file, and dtype and shape are those of its values."""

    decode: Callable[[], Tensor]
    """Read and decode the weight."""

    def read(self, rows: slice | None = None) -> Tensor:
        """Return the values, or some rows of them. Raises CheckpointError."""
        values = self.decode()
        return values if rows is None else values[rows]


def decoded_tensors(
    folder: Path, stored: Mapping[str, StoredTensor], *, in_fp32: bool = False
) -> dict[str, StoredTensor]:
    """Tensors of a checkpoint by name, with decoded weights in place of codes and their scales.

    Decoded values have the dtype that the format's library gives them, or fp32 if `in_fp32`: from these, nf4 makes the
    same codes again. A checkpoint with plain weights is returned unchanged. Raises CheckpointError if a part of a
    weight is missing, or has another shape or dtype than its format needs.
    """
    quantization = read_quantization(folder)
    if quantization is None or quantization.refusal is not None:
        return dict(stored)
    readers, used, decoded = _FORMATS[quantization.method].readers, set[str](), dict[str, StoredTensor]()
    for name, codes in stored.items():
        prefix, _, local = name.rpartition(".")
        reader = readers.get(local)
        is_plain = codes.word in PLAIN_DTYPES and not any(f"{name}.{state}" in stored for state in _STATES)
        if reader is None or is_plain:
            continue
        weight = _StoredWeight(f"{prefix}.", codes, stored, quantization, in_fp32)
        values = reader(weight)
        decoded[values.name] = values
        used |= weight.used
    others = {name: each for name, each in stored.items() if name not in used and not _WITHOUT_CODES.search(name)}
    return others | decoded


@dataclass(frozen=True)
class _StoredWeight:
    """The stored parts of a weight."""

    prefix: str
    codes: StoredTensor
    stored: Mapping[str, StoredTensor]
    quantization: Quantization
    in_fp32: bool
    """Whether the values are fp32, not of the dtype that the format says."""
    used: set[str] = field(default_factory=set)
    """Names of the parts."""

    def __post_init__(self) -> None:
        self.used.add(self.codes.name)

    def find(self, *locals_: str) -> StoredTensor | None:
        """Return the first part that is stored; None without one."""
        names = [f"{self.prefix}{local}" for local in locals_]
        self.used.update(names)
        return next((self.stored[name] for name in names if name in self.stored), None)

    def need(
        self, *locals_: str, words: tuple[str, ...] = _FLOATS, shape: tuple[int, ...] | None = None
    ) -> StoredTensor:
        """Return the first part that is stored. Raises CheckpointError if there is none, or as `check` does."""
        if (part := self.find(*locals_)) is None:
            names = " or ".join(repr(f"{self.prefix}{local}") for local in locals_)
            raise CheckpointError(
                f"{self.codes.path}: {self.codes.name!r} is stored as {self.codes.word}, in codes of "
                f"{self.quantization.text}, and the checkpoint has no {names}, without which they have no value. Get "
                "it again, or use the checkpoint from before quantization."
            )
        self.check(part, words, shape)
        return part

    def check(self, part: StoredTensor, words: tuple[str, ...], shape: tuple[int, ...] | None = None) -> None:
        """Raise CheckpointError if `part` has another dtype or shape."""
        if part.word not in words or shape not in (None, part.shape):
            needed = f"{' or '.join(words)}{'' if shape is None else f' of shape {shape}'}"
            self.refuse(part, f"needs {needed} there")

    def refuse(self, part: StoredTensor, reason: str) -> None:
        """Raise CheckpointError; `reason` follows the name of the format."""
        raise CheckpointError(
            f"{part.path}: {part.name!r} is {part.word} of shape {part.shape}, but {self.quantization.text} {reason}. "
            "The checkpoint belongs to another config.json, or is damaged: get it again."
        )

    def numbers(self, part: StoredTensor, convert: Callable[[Tensor], Tensor] = Tensor.float) -> Tensor:
        """Read scales, which `convert` makes fp32. Raises CheckpointError if one is not finite."""
        found = convert(part.read())
        if not found.isfinite().all():
            where = (~found.isfinite()).nonzero()
            raise CheckpointError(
                f"{part.path}: {part.name!r} has {len(where)} scales that are not finite, the first at "
                f"{where[0].tolist()}; scales of {self.quantization.text} must be finite. The checkpoint is damaged: "
                "get it again."
            )
        return found

    def grid(self, scales: StoredTensor, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns that share a scale. Raises CheckpointError if `scales` do not fit `shape`."""
        if math.prod(scales.shape) == 1:
            return shape
        counts = (*scales.shape, 1) if len(scales.shape) == 1 else scales.shape
        if len(counts) == 2 and min(counts) > 0:
            blocks = [(rows, columns if columns > 0 else shape[1]) for rows, columns in self.quantization.blocks]
            if all(size % count == 0 for size, count in zip(shape, counts, strict=True)):
                blocks.append((shape[0] // counts[0], shape[1] // counts[1]))
            for block in blocks:
                if counts == tuple(-(-size // own) for size, own in zip(shape, block, strict=True)):
                    return block
        self.refuse(scales, f"needs a scale for each tensor, row, group or block of the weight, whose shape is {shape}")
        raise AssertionError

    def decoded(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        decode: Callable[[Tensor], Tensor],
        name: str = "weight",
    ) -> DecodedTensor:
        """Return the weight, a parameter `name` of its layer; `decode` fills and returns a tensor of `shape`."""
        dtype = torch.float32 if self.in_fp32 else dtype
        return DecodedTensor(
            *(f"{self.prefix}{name}", self.codes.path, _WORDS[dtype], shape, 0),
            lambda: decode(torch.empty(shape, dtype=dtype)),
        )

    def by_rows(self, shape: tuple[int, int], dtype: torch.dtype, open_: Callable[[], _Rows]) -> DecodedTensor:
        """Return the weight, whose values are read by calls of the function that `open_` returns, a few rows a time."""

        def decode(out: Tensor) -> Tensor:
            rows_of = open_()
            step = max(1, _CHUNK_ELEMENTS // max(shape[1], 1) // _WORD_BITS) * _WORD_BITS
            for start in range(0, shape[0], step):
                rows = slice(start, min(start + step, shape[0]))
                out[rows] = rows_of(rows)
            return out

        return self.decoded(shape, dtype, decode)


_Rows = Callable[[slice], Tensor]
_WORDS: Final = {dtype: word for word, dtype in DTYPES.items()}


def _matrix(weight: _StoredWeight, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2:
        weight.refuse(weight.codes, "has codes of matrices")
    rows, columns = shape
    return rows, columns


def _spread(numbers: Tensor, block: tuple[int, int], rows: slice, columns: int | Tensor) -> Tensor:
    """Return the numbers of `rows` from those of blocks; `columns`: their number, or the block of each column."""
    wide = numbers.view(numbers.shape[0] if numbers.dim() else 1, -1)[torch.arange(rows.start, rows.stop) // block[0]]
    if isinstance(columns, Tensor):
        return wide[:, columns]
    return wide if wide.shape[1] == 1 else wide.repeat_interleave(block[1], 1)[:, :columns]


def _unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Return [n, count] codes from int32 `words` [n, words], which hold them one after the other, low bits first."""
    if _WORD_BITS % bits == 0:
        shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
        return (words.contiguous()[..., None] >> shifts).bitwise_and_(2**bits - 1).flatten(1)[:, :count]
    start = torch.arange(count) * bits
    wide = torch.nn.functional.pad(words.long() & (2**_WORD_BITS - 1), (0, 1))
    words_of = start // _WORD_BITS
    both = wide[:, words_of] | wide[:, words_of + 1] << _WORD_BITS
    codes: Tensor = (both >> start % _WORD_BITS) & (2**bits - 1)
    return codes


def _read_scaled(weight: _StoredWeight) -> DecodedTensor:
    """Codes of eight bits."""
    weight.check(weight.codes, ("F8_E4M3", "I8"))
    shape = _matrix(weight, weight.codes.shape)
    scales = weight.need("weight_scale_inv", "weight_scale", words=(*_FLOATS, "F8_E8M0"))
    block = weight.grid(scales, shape)
    zeros = weight.find("weight_zero_point")
    if zeros is not None:
        weight.check(zeros, ("I8", "F8_E4M3"), scales.shape)
    dtype = scales.dtype if scales.word in _FLOATS and scales.name.endswith("_scale") else torch.float32

    def open_() -> _Rows:
        codes, factors = weight.codes.read(), weight.numbers(scales)
        offsets = torch.zeros(()) if zeros is None else weight.numbers(zeros)

        def rows_of(rows: slice) -> Tensor:
            values = codes[rows].float()
            if zeros is not None:
                values -= _spread(offsets, block, rows, shape[1])
            return values.mul_(_spread(factors, block, rows, shape[1]))

        return rows_of

    return weight.by_rows(shape, dtype or torch.float32, open_)


def _read_packed(weight: _StoredWeight) -> DecodedTensor:
    """Codes of one to eight bits in words of compressed-tensors, whose zeros are packed along their columns."""
    stored_shape = weight.need("weight_shape", words=("I64", "I32"), shape=(2,))
    weight.check(weight.codes, ("I32",))
    rows, columns = stored_shape.read().tolist()
    shape, scales = (rows, columns), weight.need("weight_scale")
    fitting = [bits for bits in weight.quantization.bits if weight.codes.shape == (rows, _num_words(columns, bits))]
    if len(fitting) != 1:
        weight.refuse(weight.codes, f"packs a weight of shape {shape} with {weight.quantization.bits} bits")
    bits, block = fitting[0], weight.grid(scales, shape)
    zeros, order = weight.find("weight_zero_point"), weight.find("weight_g_idx")
    if zeros is not None and zeros.word == "I32":
        weight.check(zeros, ("I32",), (_num_words(rows, bits), *scales.shape[1:]))
    elif zeros is not None:
        weight.check(zeros, ("I8",), scales.shape)
    if order is not None:
        weight.check(order, ("I32", "I64"), (columns,))

    def open_() -> _Rows:
        codes, factors, lowest = weight.codes.read(), weight.numbers(scales), 2 ** (bits - 1)
        groups = columns if order is None else _groups(weight, order, factors.shape[-1])
        offsets = torch.full((1, 1), float(lowest))
        if zeros is not None and zeros.word == "I32":
            offsets = _unpack(zeros.read().t(), bits, rows).t().float().contiguous()
        elif zeros is not None:
            offsets = weight.numbers(zeros) + lowest

        def rows_of(chunk: slice) -> Tensor:
            values = _unpack(codes[chunk], bits, columns).float()
            zero = offsets if zeros is None else _spread(offsets, block, chunk, groups)
            return values.sub_(zero).mul_(_spread(factors, block, chunk, groups))

        return rows_of

    return weight.by_rows(shape, scales.dtype or torch.float32, open_)


def _read_gptq(weight: _StoredWeight) -> DecodedTensor:
    """Codes of gptq, packed along the inputs."""
    weight.check(weight.codes, ("I32",))
    (bits,), (words, outputs) = weight.quantization.bits, _matrix(weight, weight.codes.shape)
    inputs, order = words * _WORD_BITS // bits, weight.find("g_idx")
    if order is not None:
        weight.check(order, ("I32", "I64"), (inputs,))
    return _read_grouped(
        weight, inputs, outputs, order, lambda codes, rows: _unpack(codes[:, rows].t(), bits, inputs), _unpack
    )


def _read_awq(weight: _StoredWeight) -> DecodedTensor:
    """Codes of awq, packed along the outputs."""
    weight.check(weight.codes, ("I32",))
    inputs, words = _matrix(weight, weight.codes.shape)

    def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
        shifts = torch.tensor(_AWQ_ORDER, dtype=torch.int32) * bits
        return (packed[..., None] >> shifts).bitwise_and_(2**bits - 1).flatten(1)[:, :count]

    def codes_of(codes: Tensor, rows: slice) -> Tensor:
        chunk = codes[:, rows.start // _AWQ_COLUMNS : rows.stop // _AWQ_COLUMNS]
        return unpack(chunk, _AWQ_BITS, rows.stop - rows.start).t()

    return _read_grouped(weight, inputs, words * _AWQ_COLUMNS, None, codes_of, unpack)


def _read_grouped(
    weight: _StoredWeight,
    inputs: int,
    outputs: int,
    order: StoredTensor | None,
    codes_of: Callable[[Tensor, slice], Tensor],
    unpack: Callable[[Tensor, int, int], Tensor],
) -> DecodedTensor:
    """Weight of gptq or awq, whose tensors are transposed: groups of inputs share a scale and a zero."""
    ((_, size),), (bits,) = weight.quantization.blocks, weight.quantization.bits
    size = size if size > 0 else inputs
    shape = -(-inputs // size), outputs
    scales = weight.need("scales", shape=shape)
    zeros = weight.need("qzeros", words=("I32",), shape=(shape[0], _num_words(outputs, bits)))

    def open_() -> _Rows:
        codes, factors = weight.codes.read(), weight.numbers(scales).t()
        offsets = unpack(zeros.read(), bits, outputs).t().float() + weight.quantization.lowest_zero
        groups = torch.arange(inputs) // size if order is None else _groups(weight, order, shape[0])

        def rows_of(rows: slice) -> Tensor:
            return (codes_of(codes, rows).float() - offsets[rows][:, groups]).mul_(factors[rows][:, groups])

        return rows_of

    return weight.by_rows((outputs, inputs), scales.dtype or torch.float32, open_)


def _groups(weight: _StoredWeight, order: StoredTensor, num_groups: int) -> Tensor:
    """Return the group of each column. Raises CheckpointError if there is no such group."""
    found = order.read().long()
    if int(found.min()) < 0 or int(found.max()) >= num_groups:
        weight.refuse(order, f"needs numbers of {num_groups} groups there, and found {int(found.max())}")
    return found


def _num_words(count: int, bits: int) -> int:
    return -(-count * bits // _WORD_BITS)


_STATES: Final = tuple(f"quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))


def _read_int8(weight: _StoredWeight) -> DecodedTensor:
    """Codes of bitsandbytes' int8."""
    shape = _matrix(weight, weight.codes.shape)
    scales = weight.need("SCB", words=("F32",), shape=shape[:1])
    order = weight.find("weight_format")
    if order is not None and int(order.read().max()):
        weight.refuse(order, "is read in order of rows alone (weight_format 0)")

    def open_() -> _Rows:
        codes, factors = weight.codes.read(), weight.numbers(scales)[:, None]
        return lambda rows: codes[rows].float().mul_(factors[rows]).mul_(1 / 127)

    return weight.by_rows(shape, torch.float32, open_)


def _read_bitsandbytes(weight: _StoredWeight) -> DecodedTensor:
    """Codes of four bits, or of eight (`SCB`)."""
    if weight.codes.word == "I8":
        return _read_int8(weight)
    state = weight.need(*(f"weight.{state}" for state in _STATES), words=("U8",))
    try:
        fields = json.loads(bytes(state.read().tolist()))
        shape, block = tuple(map(int, fields["shape"])), int(fields["blocksize"])
        dtype, is_nested = _DTYPES[fields["dtype"]], "nested_blocksize" in fields
        nested_block, offset = int(fields.get("nested_blocksize", 256)), float(fields.get("nested_offset", 0))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{state.path}: {state.name!r} is no state of bitsandbytes: {error!r}.") from error
    count, codes = math.prod(shape), weight.codes
    if block not in _BLOCKS or nested_block not in _BLOCKS or not math.isfinite(offset):
        given = f"{block} and {nested_block} values, and {offset}"
        weight.refuse(state, f"has blocks of 32 to 4096 values, a power of two, and a finite offset, not {given}")
    if math.prod(codes.shape) * (codes.dtype or torch.uint8).itemsize != -(-count // 2):
        weight.refuse(codes, f"needs {-(-count // 2)} bytes of codes for a weight of shape {shape}")
    num_blocks = -(-count // block)
    absmax = weight.need("weight.absmax", words=("U8",) if is_nested else ("F32",), shape=(num_blocks,))
    table = weight.need("weight.quant_map", words=("F32",), shape=(16,))
    outer, outer_table = absmax, table
    if is_nested:
        outer = weight.need("weight.nested_absmax", words=("F32",), shape=(-(-num_blocks // nested_block),))
        outer_table = weight.need("weight.nested_quant_map", words=("F32",), shape=(256,))

    def decode(out: Tensor) -> Tensor:
        scales = weight.numbers(outer)
        if is_nested:
            given = weight.numbers(outer_table), scales, torch.tensor(offset), nested_block
            scales = decode_scales(absmax.read(), *given)
        decode_nf4(codes.read().view(-1).view(torch.uint8), scales, out, block, weight.numbers(table))
        return out

    return weight.decoded(shape, dtype, decode)


def _read_mxfp4(weight: _StoredWeight) -> DecodedTensor:
    """Codes of the matrices of experts, which are stored as [experts, out, in]."""
    codes, name = weight.codes, weight.codes.name.removeprefix(weight.prefix).removesuffix("_blocks")
    weight.check(codes, ("U8",))
    if len(codes.shape) != 4 or codes.shape[-1] != MX_BLOCK // 2:
        weight.refuse(codes, f"needs blocks of {MX_BLOCK // 2} bytes, of experts, outputs and groups of inputs")
    experts, outputs, groups, _ = codes.shape
    scales = weight.need(f"{name}_scales", words=("U8",), shape=codes.shape[:-1])

    def decode(out: Tensor) -> Tensor:
        factors, bytes_ = weight.numbers(scales, _powers_of_two), codes.read()
        table = torch.tensor(MX_VALUES)
        for expert in range(experts):
            own = out.new_empty(outputs, groups * MX_BLOCK)
            swapped = bytes_[expert] << 4 | bytes_[expert] >> 4  # a byte's low bits hold the first of two values
            decode_nf4(swapped, factors[expert].view(-1), own, MX_BLOCK, table)
            out[expert] = own.t()
        return out

    return weight.decoded((experts, groups * MX_BLOCK, outputs), torch.bfloat16, decode, name)


def _powers_of_two(codes: Tensor) -> Tensor:
    powers = torch.ldexp(torch.ones(codes.shape), codes.int() - _MX_BIAS)
    return powers.masked_fill_(codes == _MX_NO_NUMBER, torch.nan)


_BLOCKS: Final = tuple(2**power for power in range(5, 13))
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _Format(NamedTuple):
    parse: Callable[[str, Mapping[str, Any]], Quantization]
    readers: Mapping[str, Callable[[_StoredWeight], DecodedTensor]]
    """Name of the codes within a layer -> function that finds their parts."""


_FORMATS: Final[Mapping[str, _Format]] = {
    "bitsandbytes": _Format(_parse_bitsandbytes, {"weight": _read_bitsandbytes}),
    "fp8": _Format(_parse_fp8, {"weight": _read_scaled}),
    "fbgemm_fp8": _Format(_parse_fp8, {"weight": _read_scaled}),
    "compressed-tensors": _Format(_parse_compressed, {"weight": _read_scaled, "weight_packed": _read_packed}),
    "gptq": _Format(_parse_packed, {"qweight": _read_gptq}),
    "awq": _Format(_parse_packed, {"qweight": _read_awq}),
    "mxfp4": _Format(_parse_mxfp4, {f"{matrix}_blocks": _read_mxfp4 for matrix in ("gate_up_proj", "down_proj")}),
}
"""Value of quant_method -> format."""
