"""Initial parameter values, tensor by tensor: from a safetensors checkpoint or the family's own initialization.

Whether a checkpoint is the model of its config.json, in plain floats, is checked by its headers before a value is read.
"""

from __future__ import annotations

import copy
import logging
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mobius.config.config import ModelConfig
from mobius.errors import CheckpointError
from mobius.log import SAID_ONCE
from mobius.models.base_files import read_json_object, shown
from mobius.models.blocks import ModelParts

logger = logging.getLogger(__name__)

PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
"""Dtypes that are trained, in the words of the format; others are quantized weights, or no weights."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the two matrices that may be tied; the same in all supported families."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"

_QUANTIZED = re.compile(
    r"(weight_scale|weight_scale_inv|weight_packed|weight_zero_point|weight_shape|qweight|qzeros|scales|g_idx|SCB"
    r"|absmax|nested_absmax|quant_map|nested_quant_map|quant_state\.\w+|weight_format|scale_weight)$"
)
"""Ends of names that quantizers give: GPTQ, AWQ, bitsandbytes, compressed-tensors, FP8."""

_HARMLESS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Tables that older versions stored and that are computed today."""

_COMPARED_ELEMENTS = 2**22
_CHECKED_ELEMENTS = 2**20


class WeightSource(Protocol):
    """Source of parameters, one at a time by its Hugging Face name, on the CPU; the caller owns the tensor."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Value of parameter `name`, which has `shape` in the model."""


def folder_has_weights(folder: Path) -> bool:
    """Whether the folder holds safetensors weights; a bare configuration does not.

    Raises CheckpointError for weights in the pickled `.bin` format, which is not read.
    """
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


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of the checkpoint in `folder`, by name; the files are those that transformers would take.

    Raises CheckpointError for an index or a file that is broken, missing, or not what the index says.
    """
    if not (folder / _SINGLE).is_file() and (folder / _INDEX).is_file():
        return _read_indexed(folder, folder / _INDEX)
    single = folder / _SINGLE
    tensors: dict[str, StoredTensor] = {}
    for path in [single] if single.is_file() else sorted(folder.glob("*.safetensors")):
        for tensor in _read_header(path):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{folder} stores {tensor.name!r} twice, in {tensors[tensor.name].path.name} and {path.name}, and "
                    f"has no {_INDEX} that says which counts. Remove the files that are not the model's."
                )
            tensors[tensor.name] = tensor
    return tensors


def _read_indexed(folder: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' of tensor names to files. Get the file anew.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or not _is_inside(file):
            raise CheckpointError(
                f"{index}: 'weight_map' says that {name!r} is in {shown(file)}; it must name a safetensors file in the "
                "same folder. Get the index anew."
            )
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise CheckpointError(
            f"{folder} is incomplete: {index.name} names {missing[0]} ({len(missing)} file(s) missing)."
        )
    found = {file: {tensor.name: tensor for tensor in _read_header(folder / file)} for file in files}
    for name, file in weight_map.items():
        if name not in found[file]:
            raise CheckpointError(f"{index} says that {name!r} is in {file}, which has no such tensor. Get both anew.")
    return {name: found[file][name] for name, file in weight_map.items()}


def _is_inside(file: str) -> bool:
    """Whether the name leads into the folder; the files of a download are links to elsewhere."""
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in file


def _read_header(path: Path) -> Iterator[StoredTensor]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                yield StoredTensor(name, path, part.get_dtype(), tuple(part.get_shape()))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: is damaged or no safetensors file: {error}") from error


def check_model_weights(folder: Path, parts: ModelParts, options: ModelConfig) -> None:
    """Check by their headers that the weights in `folder`, if there are any, are those of `parts`.

    Call it before data is prepared or memory is taken. Tensors that the model does not have are listed in a warning,
    but for layers that the user left out. Raises CheckpointError for a tensor that is quantized, missing or mis-shaped.
    """
    if not folder_has_weights(folder):
        return
    stored = read_headers(folder)
    blocks = (parts.embedding, *parts.layers, parts.norm, parts.head)
    shapes = {name: shape for block in blocks for name, shape in block.full_shapes().items()}
    other_name = tied_aliases(parts.stored_names)
    source = {name: stored.get(name) or stored.get(other_name.get(name, name)) for name in shapes}
    unknown = [name for name in stored if name not in shapes]
    _refuse_quantized(folder, (tensor for tensor in source.values() if tensor is not None), unknown)
    for name, shape in shapes.items():
        check_shape(source[name], name, shape, folder, stored)
    _warn_of_other_files(folder, {tensor.path for tensor in stored.values()})
    left_out = parts.layers[0].prefix.removesuffix("0.") if options.num_layers is not None else "\0"
    if unexpected := [name for name in unknown if not _HARMLESS.search(name) and not name.startswith(left_out)]:
        text = (
            "%s: %d of the checkpoint's %d tensors do not belong to the model of its config.json and are neither "
            "trained nor saved: %s"
        )
        logger.warning(text, folder, len(unexpected), len(stored), _first_three(unexpected), extra=SAID_ONCE)


def _warn_of_other_files(folder: Path, read: Collection[Path]) -> None:
    """Tell of weights that are not taken, an adapter's for example; Mistral's own copy of the model is known."""
    others = [path.name for path in sorted(folder.glob("*.safetensors")) if path not in read]
    if unread := [name for name in others if not name.startswith("consolidated")]:
        text = "%s: %d safetensors file(s) are not part of the model and not read: %s"
        logger.warning(text, folder, len(unread), _first_three(unread), extra=SAID_ONCE)


def _first_three(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def tied_aliases(stored_names: Mapping[str, str]) -> dict[str, str]:
    """Name -> other name, both ways: a tied matrix may be stored under either."""
    return {**stored_names, **{stored: name for name, stored in stored_names.items()}}


def check_shape(
    tensor: StoredTensor | None, name: str, shape: tuple[int, ...], folder: Path, stored: Mapping[str, StoredTensor]
) -> StoredTensor:
    """The tensor, if it is there with this shape. Raises CheckpointError if not."""
    if tensor is None:
        raise CheckpointError(
            f"{folder} has no tensor {name!r} (it has {len(stored)} tensors, for example "
            f"{next(iter(stored), None)!r}). The checkpoint belongs to another model than its config.json, or is "
            "incomplete."
        )
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name!r} has shape {tensor.shape}, the configuration asks for {shape}."
        )
    return tensor


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


def has_own_head(folder: Path) -> bool:
    """Whether the checkpoint stores an embedding and another matrix as its head, which transformers then leaves untied.

    Reads both if both are stored, up to the first difference.
    """
    stored = read_headers(folder)
    if EMBEDDING not in stored or HEAD not in stored:
        return False
    embedding, head = stored[EMBEDDING], stored[HEAD]
    if embedding.shape != head.shape or len(head.shape) != 2 or not {embedding.dtype, head.dtype} <= {*PLAIN_DTYPES}:
        return False  # refused by check_model_weights, by name
    rows = max(1, _COMPARED_ELEMENTS // max(head.shape[1], 1))
    for start in range(0, head.shape[0], rows):  # never whole in memory
        ours, theirs = (_read_values(stored_matrix, slice(start, start + rows)) for stored_matrix in (embedding, head))
        wide = torch.promote_types(ours.dtype, theirs.dtype)
        if not torch.equal(ours.to(wide), theirs.to(wide)):
            return True
    return False


def _read_values(tensor: StoredTensor, rows: slice | None = None) -> Tensor:
    """The tensor or some of its rows. Raises CheckpointError.

    Its file is opened anew each time: an open one keeps every page that was touched in this process's memory.
    """
    try:
        with safe_open(tensor.path, framework="pt") as file:
            return cast(Tensor, file.get_tensor(tensor.name) if rows is None else file.get_slice(tensor.name)[rows])
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{tensor.path}: cannot read {tensor.name!r}: {error}") from error


class CheckpointWeights:
    """Parameters from a folder of safetensors, one file or sharded; only what is asked for is read."""

    def __init__(self, folder: Path, aliases: Mapping[str, str], *, dtype: torch.dtype = torch.float32) -> None:
        """Index `folder`; `aliases` maps a name to the one it is stored under (tied weights).

        `dtype` is what values will be cast to, and must hold them.
        """
        self._folder, self._dtype = folder, dtype
        self._aliases, self._stored = tied_aliases(aliases), read_headers(folder)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read one tensor.

        Raises CheckpointError if it is missing, has another shape than `shape`, or a value that is not finite or that
        the working dtype cannot hold.
        """
        found = self._stored.get(name) or self._stored.get(self._aliases.get(name, name))
        stored = check_shape(found, name, shape, self._folder, self._stored)
        tensor = _read_values(stored)
        if not _fits(tensor, self._dtype):
            raise CheckpointError(f"{stored.path}: {stored.name!r} {_describe_misfits(tensor, self._dtype)}")
        return tensor


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether every value is finite and stays so in `dtype`.

    The extremes tell it of all: a NaN makes both of them NaN, and rounding keeps the order. One pass without a copy, at
    some 20 GB/s on one core; `isfinite` on all of it would allocate, and do 0.4.
    """
    return tensor.numel() == 0 or bool(torch.stack(torch.aminmax(tensor)).to(dtype).isfinite().all())


def _describe_misfits(tensor: Tensor, dtype: torch.dtype) -> str:
    """Words for how many values do not fit, and the first of them; in parts, so that no copy of the whole is made."""
    flat, count, first, num_nonfinite = tensor.reshape(-1), 0, 0, 0
    for start in range(0, flat.numel(), _CHECKED_ELEMENTS):
        part = flat[start : start + _CHECKED_ELEMENTS]
        misfits = (~part.to(dtype).isfinite()).nonzero()
        if len(misfits) and count == 0:
            first = start + int(misfits[0])
        count += len(misfits)
        num_nonfinite += int((~part.isfinite()).sum())
    place = [int(index) for index in torch.unravel_index(torch.tensor(first), tensor.shape)]
    where = f"the first at {place} is {float(flat[first]):g}"
    if num_nonfinite:
        return (
            f"has {num_nonfinite} values that are not finite (NaN or infinite), {where}. The checkpoint is damaged, or "
            "its training diverged: get it anew, or take an earlier one."
        )
    name = str(dtype).removeprefix("torch.")
    return (
        f"has {count} values that are too large for {name}, {where}. Use --dtype bf16 or --dtype fp32, which hold "
        f"what this checkpoint does."
    )


class InitialWeights:
    """Parameters drawn by transformers' own initialization of the family, for a model without weights.

    Each leaf module is seeded by its name, so values do not depend on how the model is cut or on how many ranks there
    are.
    """

    def __init__(self, parts: ModelParts, *, seed: int) -> None:
        self._model, self._aliases, self._seed = parts.model, parts.stored_names, seed

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Initialize the leaf module that owns `name` on the CPU in fp32 and return that parameter."""
        path, _, local = self._aliases.get(name, name).rpartition(".")
        leaf = copy.deepcopy(self._model.get_submodule(path)).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            # One hash of both: the CPU generator looks at the low 32 bits of a seed only.
            torch.manual_seed(zlib.crc32(f"{self._seed} {path}".encode()))
            self._model._init_weights(leaf)
        tensor = cast(nn.Parameter, getattr(leaf, local)).detach()
        assert tuple(tensor.shape) == shape, (name, tensor.shape, shape)
        return tensor
