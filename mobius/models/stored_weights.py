"""The contents of a folder of safetensors by its headers alone: where each tensor is, its dtype and shape.

Whether that is the model of its config.json, in plain floats, is checked here before any value is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mobius.errors import CheckpointError
from mobius.log import SAID_ONCE
from mobius.models.blocks import ModelParts
from mobius.models.json_files import read_json_object, shown

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


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder`, by name; the files are those that transformers would take.

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


def check_stored_weights(folder: Path, parts: ModelParts, *, has_fewer_layers: bool = False) -> None:
    """Check that the checkpoint in `folder` is the model `parts`, by its headers; cheap, no value is read.

    `has_fewer_layers`: the user asked for the first layers only, so that others are no surprise. Tensors that the model
    does not have are listed in a warning. Raises CheckpointError for a tensor that is quantized, missing or mis-shaped.
    """
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
    first_layer = parts.layers[0].prefix.removesuffix("0.")
    is_cut = re.compile(rf"{re.escape(first_layer)}\d+\." if has_fewer_layers else r"(?!)")
    if unexpected := [name for name in unknown if not _HARMLESS.search(name) and not is_cut.match(name)]:
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
        return False  # refused by check_stored_weights, by name
    rows = max(1, _COMPARED_ELEMENTS // max(head.shape[1], 1))
    pairs = zip(_row_chunks(embedding, rows), _row_chunks(head, rows), strict=True)
    return not all(_are_equal(ours, theirs) for ours, theirs in pairs)


def _are_equal(ours: Tensor, theirs: Tensor) -> bool:
    wide = torch.promote_types(ours.dtype, theirs.dtype)
    return torch.equal(ours.to(wide), theirs.to(wide))


def _row_chunks(tensor: StoredTensor, num_rows: int) -> Iterator[Tensor]:
    """The matrix, some rows at a time, so that it is never whole in memory."""
    for start in range(0, tensor.shape[0], num_rows):
        # Opened anew for each part: an open file keeps every page that was touched in this process's memory.
        try:
            with safe_open(tensor.path, framework="pt") as file:
                yield file.get_slice(tensor.name)[start : start + num_rows]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{tensor.path}: cannot read {tensor.name!r}: {error}") from error
