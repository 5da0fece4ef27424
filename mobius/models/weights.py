"""Initial parameter values, tensor by tensor: from a safetensors checkpoint or the family's own initialization.

Whether a checkpoint is the model of its config.json, in plain floats, is checked by its headers before a value is read.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mobius.config.config import ModelConfig
from mobius.errors import CheckpointError
from mobius.log import RANK_ZERO_ONLY
from mobius.models.blocks import ModelParts
from mobius.models.model_files import format_json_value, read_json_object
from mobius.models.multimodal.weight_names import text_weight_names
from mobius.models.weight_conversion.parameter_pieces import ParameterPiece
from mobius.regular_files import open_regular

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PLAIN_DTYPES = tuple(_DTYPES)
"""Dtypes that are trained, in the words of the format; others are quantized weights, or no weights."""

EMBEDDING_WEIGHT, LM_HEAD_WEIGHT = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the two matrices that may be tied; the same in all supported families."""

_QUANTIZED = re.compile(
    r"(weight_scale|weight_scale_inv|weight_packed|weight_zero_point|weight_shape|qweight|qzeros|scales|g_idx|SCB"
    r"|absmax|nested_absmax|quant_map|nested_quant_map|quant_state\.\w+|weight_format|scale_weight)$"
)
"""Ends of names that quantizers give: GPTQ, AWQ, bitsandbytes, compressed-tensors, FP8."""

_HARMLESS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Tables that older versions stored and that are computed today."""

MAX_PLAUSIBLE_WEIGHT: Final = torch.finfo(torch.float16).max
"""65504: a model that is released in fp16 can have no weight beyond it, and products with a larger one swamp everything
they are added to: gradients are then zero, or not finite."""
_MOST_WARNINGS: Final = 3
"""Tensors of a checkpoint that are named one by one; in a broken one it may be all of them."""

_PART_ELEMENTS = 2**22
"""Number of elements that are looked at together: no copy of a whole tensor is made."""


class WeightSource(Protocol):
    """Source of parameters, one at a time by its Hugging Face name, on the CPU; the caller owns the tensor."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Value of parameter `name`, which has `shape` in the model."""


def folder_has_weights(folder: Path) -> bool:
    """Whether the folder holds safetensors. Raises CheckpointError for weights in the pickled `.bin` format instead."""
    if any(folder.glob("*.safetensors")):
        return True
    if pickled := sorted(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} holds its weights as {pickled[0].name}; only safetensors are read. Convert once, where it fits "
            f'in memory: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\""
        )
    return False


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]

    def read(self, rows: slice | None = None) -> Tensor:
        """The tensor or some of its rows. Raises CheckpointError."""
        # Opened anew each time: an open file keeps every page that was touched in this process's memory.
        with _opened(self.path, f"cannot read {self.name!r}") as file:
            return cast(Tensor, file.get_tensor(self.name) if rows is None else file.get_slice(self.name)[rows])


@contextlib.contextmanager
def _opened(path: Path, complaint: str) -> Iterator[Any]:
    try:
        open_regular(path).close()  # the library would wait for a pipe
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {complaint}: {error}") from error


def read_header(path: Path) -> list[StoredTensor]:
    """Tensors of a safetensors file. Raises CheckpointError."""
    with _opened(path, "is damaged or no safetensors file") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return [StoredTensor(name, path, part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()]


def _read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of the checkpoint in `folder`, those of a text part by the names that it has alone."""
    tensors = _read_stored(folder)
    renamed = text_weight_names(tensors)
    return {renamed.get(name, name): tensor for name, tensor in tensors.items()}


def _read_stored(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of the checkpoint in `folder`, by name; the files are those that transformers would take."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not single.is_file() and index.is_file():
        return _read_indexed(folder, index)
    tensors: dict[str, StoredTensor] = {}
    for path in [single] if single.is_file() else sorted(folder.glob("*.safetensors")):
        for tensor in read_header(path):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{folder} stores {tensor.name!r} twice, in {tensors[tensor.name].path.name} and {path.name}, and "
                    f"has no {index.name} that says which counts. Remove the files that are not the model's."
                )
            tensors[tensor.name] = tensor
    return tensors


def _read_indexed(folder: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' of tensor names to files. Get the file anew.")
    for name, file in weight_map.items():
        is_name = isinstance(file, str) and file.endswith(".safetensors") and "\0" not in file
        if not is_name or file.startswith("/") or ".." in file.split("/"):  # links are well: a download is made of them
            raise CheckpointError(
                f"{index}: 'weight_map' says that {name!r} is in {format_json_value(file)}; it must name a "
                "safetensors file in the "
                "same folder. Get the index anew."
            )
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise CheckpointError(
            f"{folder} is incomplete: {index.name} names {missing[0]} ({len(missing)} file(s) missing)."
        )
    found = {(file, tensor.name): tensor for file in files for tensor in read_header(folder / file)}
    for name, file in weight_map.items():
        if (file, name) not in found:
            raise CheckpointError(f"{index} says that {name!r} is in {file}, which has no such tensor. Get both anew.")
    return {name: found[file, name] for name, file in weight_map.items()}


def check_model_weights(folder: Path, parts: ModelParts, options: ModelConfig) -> None:
    """Check by their headers that the weights in `folder`, if there are any, are those of `parts`.

    Call it before data is prepared or memory is taken. Tensors that the model does not have are listed in a warning,
    but for layers that the user left out. Raises CheckpointError for a tensor that is quantized, missing or mis-shaped.
    """
    if not folder_has_weights(folder):
        return
    checkpoint = CheckpointWeights(folder, parts.stored_names, parts.parameter_pieces)
    stored = checkpoint.stored
    shapes = parts.base_shapes()
    known = {
        piece.name for parameter_pieces in parts.parameter_pieces.values() for piece in parameter_pieces
    } | shapes.keys()
    unknown = [name for name in stored if name not in known]
    _refuse_quantized(folder, filter(None, map(checkpoint.find, sorted(known))), unknown)
    for name, shape in shapes.items():
        checkpoint.find_pieces(name, shape)
    # An adapter's, for example; Mistral's own copy of the model is known.
    others = {*folder.glob("*.safetensors")} - {tensor.path for tensor in stored.values()}
    unread = sorted(path.name for path in others if not path.name.startswith(("consolidated", "optimizer")))
    _warn(folder, "%d safetensors file(s) are not part of the model and not read", unread)
    left_out = parts.layers[0].prefix.removesuffix("0.") if options.num_layers is not None else "\0"
    _warn(
        folder,
        f"%d of the checkpoint's {len(stored)} tensors do not belong to the model of its config.json and are neither "
        "trained nor saved",
        [name for name in unknown if not _HARMLESS.search(name) and not name.startswith(left_out)],
    )


def _warn(folder: Path, text: str, names: Sequence[str]) -> None:
    """Warn of the first of `names`, if there are any; `text` gets their number."""
    if names:
        shown_names = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        logger.warning(f"%s: {text}: %s", folder, len(names), shown_names, extra=RANK_ZERO_ONLY)


def _refuse_quantized(folder: Path, own: Iterable[StoredTensor], unknown: Iterable[str]) -> None:
    way_out = (
        "Give the unquantized checkpoint it was made from, or dequantize it with transformers "
        "(`model.dequantize()`, then `save_pretrained`)."
    )
    for tensor in own:
        if tensor.dtype not in PLAIN_DTYPES:
            raise CheckpointError(
                f"{tensor.path}: {tensor.name!r} is stored as {tensor.dtype}; only {', '.join(PLAIN_DTYPES)} are "
                f"trained. The checkpoint is quantized. {way_out}"
            )
    if scales := [name for name in unknown if _QUANTIZED.search(name)]:
        raise CheckpointError(
            f"{folder} holds {len(scales)} tensors of a quantized model ({scales[0]!r}, for example), without which "
            f"its weights mean nothing. {way_out}"
        )


def has_untied_head(folder: Path) -> bool:
    """Whether the checkpoint stores an embedding and another matrix as its head: transformers leaves these untied."""
    stored = _read_headers(folder)
    if EMBEDDING_WEIGHT not in stored or LM_HEAD_WEIGHT not in stored:
        return False
    embedding, head = stored[EMBEDDING_WEIGHT], stored[LM_HEAD_WEIGHT]
    if embedding.shape != head.shape or len(head.shape) != 2 or not {embedding.dtype, head.dtype} <= {*PLAIN_DTYPES}:
        return False  # refused by check_model_weights, by name
    step = max(1, _PART_ELEMENTS // max(head.shape[1], 1))
    for start in range(0, head.shape[0], step):
        rows = slice(start, start + step)
        ours, theirs = embedding.read(rows), head.read(rows)
        wide = torch.promote_types(ours.dtype, theirs.dtype)
        if not torch.equal(ours.to(wide), theirs.to(wide)):
            return True
    return False


class CheckpointWeights:
    """Parameters from a folder of safetensors, one file or sharded; only what is asked for is read."""

    def __init__(
        self,
        folder: Path,
        aliases: Mapping[str, str],
        pieces: Mapping[str, tuple[ParameterPiece, ...]] = MappingProxyType({}),
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Index `folder`; `aliases` tells tied names, `pieces` parameters that are stored in several tensors.

        Values must fit into `dtype`. Raises CheckpointError.
        """
        self._folder, self._pieces = folder, pieces
        self._aliases = {**aliases, **{other: name for name, other in aliases.items()}}
        self._check = ValueCheck(dtype)
        self.stored = _read_headers(folder)

    def find(self, name: str) -> StoredTensor | None:
        """The tensor of this name, or the one that it is tied to."""
        return self.stored.get(name) or self.stored.get(self._aliases.get(name, name))

    def find_shaped(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor of this name. Raises CheckpointError if it is missing or has another shape."""
        tensor = self.find(name)
        if tensor is None:
            raise CheckpointError(
                f"{self._folder} has no tensor {name!r} (it has {len(self.stored)} tensors, for example "
                f"{next(iter(self.stored), None)!r}). The checkpoint belongs to another model than its config.json, or "
                "is incomplete."
            )
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.path}: {tensor.name!r} has shape {tensor.shape}, the configuration asks for {shape}."
            )
        return tensor

    def find_pieces(self, name: str, shape: tuple[int, ...]) -> list[tuple[ParameterPiece | None, StoredTensor]]:
        """The tensors that make up a parameter, each with its place in it; None: it is all of it.

        A checkpoint may have it whole although the family stores pieces. Raises CheckpointError as `find_shaped`.
        """
        if self.find(name) is not None or name not in self._pieces:
            return [(None, self.find_shaped(name, shape))]
        return [(piece, self.find_shaped(piece.name, piece.shape)) for piece in self._pieces[name]]

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The parameter. Raises CheckpointError as `find_shaped`, and for a value that is not finite or does not fit.

        Pieces are read one at a time, each into its place.
        """
        found = self.find_pieces(name, shape)
        if found[0][0] is None:
            return self._check.read(found[0][1])
        dtypes = {_DTYPES.get(stored.dtype, torch.float32) for _, stored in found}
        whole = torch.empty(shape, dtype=functools.reduce(torch.promote_types, dtypes))
        for piece, stored in found:
            assert piece is not None, name
            piece.of(whole).copy_(self._check.read(stored))
        return whole

    def read_pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
        """The parameter in parts, each with the element that it begins at; raises CheckpointError as `read`.

        These are the pieces that it is stored as, where their elements follow each other in the parameter.
        """
        found = self.find_pieces(name, shape)
        if not all(piece is None or piece.is_contiguous for piece, _ in found):
            yield 0, self.read(name, shape)
            return
        for piece, stored in found:
            yield 0 if piece is None else piece.offset, self._check.read(stored)


class ValueCheck:
    """Owns what is refused and warned of in the values of stored tensors; a tensor that is read again is told once."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Values must fit into `dtype`."""
        self._dtype = dtype
        self._told: set[str] = set()

    def read(self, stored: StoredTensor) -> Tensor:
        """The tensor. Raises CheckpointError for a value that is not finite or does not fit, warns of an absurd one."""
        tensor = stored.read()
        if not tensor.numel():
            return tensor
        # The extremes tell it of all: a NaN makes both of them NaN, and rounding keeps the order. One pass without a
        # copy, at some 20 GB/s on one core; `isfinite` on all of it would allocate, and do 0.4.
        extremes = torch.stack(torch.aminmax(tensor))
        if not extremes.to(self._dtype).isfinite().all():
            raise CheckpointError(f"{stored.path}: {stored.name!r} {_describe_misfits(tensor, self._dtype)}")
        largest = max(map(float, extremes), key=abs)
        if abs(largest) > MAX_PLAUSIBLE_WEIGHT and stored.name not in self._told:
            self._told.add(stored.name)
            self._warn(stored, largest)
        return tensor

    def _warn(self, stored: StoredTensor, largest: float) -> None:
        if len(self._told) > _MOST_WARNINGS:
            return
        more = "; others like it are not listed" if len(self._told) == _MOST_WARNINGS else ""
        logger.warning(
            "%s: %r holds the value %g; weights beyond %g, the largest number of fp16, leave gradients that are zero "
            "or not finite. The checkpoint is likely damaged: get it anew%s",
            stored.path,
            stored.name,
            largest,
            MAX_PLAUSIBLE_WEIGHT,
            more,
        )


MAX_AHEAD_ELEMENTS = 2**28
"""Elements of a value next to which no other is read: 1 GiB in fp32."""


def read_ahead(values: Iterator[T], *, size: Callable[[T], int]) -> Iterator[T]:
    """Yield `values`, the next of which is read on another thread while one is used, unless that has a large `size`."""
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as reader:
        coming = reader.submit(next, values, None)
        while (value := coming.result()) is not None:
            is_small = size(value) <= MAX_AHEAD_ELEMENTS
            if is_small:
                coming = reader.submit(next, values, None)
            yield value
            if not is_small:
                del value
                coming = reader.submit(next, values, None)


def read_in_pieces(source: WeightSource, name: str, shape: tuple[int, ...]) -> Iterable[tuple[int, Tensor]]:
    """The parameter in parts that follow each other in it, each with the element that it begins at.

    From a checkpoint a layer's experts come one by one, so that no copy of all of them is made.
    """
    if isinstance(source, CheckpointWeights):
        return source.read_pieces(name, shape)
    return [(0, source.read(name, shape))]


def _describe_misfits(tensor: Tensor, dtype: torch.dtype) -> str:
    """Words for how many values do not fit, and the first of them."""
    flat = tensor.reshape(-1)
    count, num_nonfinite, first = 0, 0, flat.numel()
    for number, part in enumerate(flat.split(_PART_ELEMENTS)):
        misfits = (~part.to(dtype).isfinite()).nonzero()
        if len(misfits) and count == 0:
            first = number * _PART_ELEMENTS + int(misfits[0])
        count += len(misfits)
        num_nonfinite += int((~part.isfinite()).sum())
    place = [int(index) for index in torch.unravel_index(torch.tensor(first), tensor.shape)]
    where = f"the first at {place} is {float(flat[first]):g}"
    if num_nonfinite:
        return (
            f"has {num_nonfinite} values that are not finite (NaN or infinite), {where}. The checkpoint is damaged, or "
            "its training diverged: get it anew, or take an earlier one."
        )
    return (
        f"has {count} values that are too large for {str(dtype).removeprefix('torch.')}, {where}. Use --dtype bf16 or "
        "--dtype fp32, which hold what this checkpoint does."
    )


class InitialWeights:
    """Parameters drawn by transformers' own initialization of the family, for a model without weights.

    Each leaf module is seeded by its name: values do not depend on how the model is cut, or on the number of ranks.
    """

    def __init__(self, parts: ModelParts, *, seed: int) -> None:
        self._model, self._aliases, self._seed = parts.model, parts.stored_names, seed
        self._drawn: dict[str, Tensor] = {}
        """Parameters of the last module that were drawn with one that was asked for; all experts are one module."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Initialize the leaf module that owns `name` on the CPU in fp32 and return that parameter.

        Raises CheckpointError for one that the family leaves as its constructor made it, which is not here.
        """
        name = self._aliases.get(name, name)
        if name not in self._drawn:
            self._drawn.clear()  # before there is another one
            self._drawn.update(self._draw(name.rpartition(".")[0]))
        tensor = self._drawn.pop(name)
        assert tuple(tensor.shape) == shape, (name, tensor.shape, shape)
        if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            raise CheckpointError(
                f"transformers draws no initial values for {name!r} in this family, so it cannot be trained from fresh "
                "weights. Give a model with weights."
            )
        return tensor

    def _draw(self, path: str) -> dict[str, Tensor]:
        leaf = copy.deepcopy(self._model.get_submodule(path)).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for parameter in leaf.parameters(recurse=False):
                parameter.fill_(torch.nan)
            # One hash of both: the CPU generator looks at the low 32 bits of a seed only.
            torch.manual_seed(zlib.crc32(f"{self._seed} {path}".encode()))
            self._model._init_weights(leaf)
        return {f"{path}.{local}": parameter.detach() for local, parameter in leaf.named_parameters(recurse=False)}
