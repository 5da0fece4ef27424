"""Writes a saved model again, or an adapter merged into its base; at most one file is in memory at a time.

W' = W + scale * B A        in fp32, rounded once to the format that is written; with DoRA, rows have their magnitudes
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from mobius.checkpoint.folders import open_checkpoint
from mobius.checkpoint.model_folder import verify_folder, write_model_files
from mobius.checkpoint.restore import MasterWeights, SavedWeights
from mobius.checkpoint.saved_model import SavedModel
from mobius.checkpoint.tensor_files import (
    StageParameter,
    plan_files,
    translate_file_errors,
    weight_bytes,
    write_indexes,
    write_stage,
)
from mobius.config.config import Config
from mobius.config.earlier_results import MANIFEST_FILE
from mobius.errors import CheckpointError
from mobius.files.atomic_files import publish_folder, sync_tree
from mobius.models.adapters import LORA_A, LORA_B, MAGNITUDE, adapted_linear
from mobius.models.blocks import ModelParts
from mobius.models.model_files import ModelFiles
from mobius.models.parameter_pieces import stored_shapes
from mobius.models.peft_folder import AdapterFolder
from mobius.models.weights import CheckpointWeights, WeightSource, folder_has_weights

FILE_BYTES = 2_000_000_000


def merged_folder(config: Config) -> Path:
    """Folder of the merged model."""
    return Path(config.output.save_dir) / "merged"


def check_free(folder: Path) -> None:
    """Raise CheckpointError unless `folder` is new or empty, so that a model can be written to it."""
    if folder.is_symlink() or folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise CheckpointError(
            f"{folder} is in use, and nothing is written into it. Choose a folder that is new or empty."
        )


def write_model(
    saved: SavedModel,
    parts: ModelParts,
    folder: Path,
    *,
    dtype: torch.dtype,
    model_files: ModelFiles | None = None,
    max_file_bytes: int = FILE_BYTES,
    progress: Callable[[], None] = lambda: None,
    finish: Callable[[Path], object] = lambda partial: verify_folder(partial, {}),
) -> None:
    """Write the model to `folder`, which appears only when complete; `parts` are the base's, with or without adapters.

    If `model_files` are given, they replace the model's files. `progress` is called for each tensor, `finish` with the
    folder before it gets its final name. Raises CheckpointError.
    """
    check_free(folder)
    adapter, shapes = saved.adapter_to_merge, base_shapes(parts)
    added = {} if adapter is None else _factors(adapter, shapes)
    if adapter is None and (saved.folder / MANIFEST_FILE).is_file():
        kind = MasterWeights if dtype is torch.float32 else SavedWeights
        source: WeightSource = kind(open_checkpoint(saved.folder), parts)
    elif folder_has_weights(saved.folder):
        source = CheckpointWeights(saved.folder, parts.stored_names, parts.parameter_pieces)
    else:
        raise CheckpointError(f"{saved.folder} has no weights, so there is nothing to merge an adapter into.")
    owners = {
        piece.name: (name, piece)
        for name, parameter_pieces in parts.parameter_pieces.items()
        for piece in parameter_pieces
    }

    def read(name: str) -> Tensor:
        progress()
        whole, piece = owners.get(name, (name, None))
        value = merged(whole) if piece is None else piece.of(merged(whole)).contiguous()
        if value.numel() and not torch.stack(torch.aminmax(value)).isfinite().all():
            raise CheckpointError(f"{name!r} has values that are too large for {dtype}. Use --dtype bf16 or fp32.")
        return value

    @functools.lru_cache(maxsize=1)  # one suffices: all pieces of a parameter are read in a row
    def merged(name: str) -> Tensor:
        if adapter is not None and name in adapter.stored:
            return adapter.stored[name].read().to(parts.weight_dtype(name, dtype))
        weight = source.read(name, shapes[name])
        if adapter is None or name not in added:
            return weight.to(parts.weight_dtype(name, dtype))
        return _merge_weight(adapter, added[name], weight).to(dtype)

    parameters = [
        StageParameter(stored_name, own_shape, 0, weight_dtype=parts.weight_dtype(name, dtype))
        for name, shape in shapes.items()
        for stored_name, own_shape in stored_shapes(name, shape, parts.parameter_pieces)
    ]
    (files,) = plan_files(parameters, dtype=dtype, has_optimizer=False, max_file_bytes=max_file_bytes)
    partial = folder.with_name(f"{folder.name}.export.partial")
    with translate_file_errors("write", partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        write_stage(partial, files, read)
        num_parameters = sum(each.num_elements for each in parameters)
        write_indexes(partial, files, num_parameters=num_parameters, num_bytes=weight_bytes(parameters, dtype))
        write_model_files(partial, model_files or saved.model_files(parts.config), parts.config, dtype=dtype)
        finish(partial)
        with translate_file_errors("rename", partial):
            sync_tree(partial)
            publish_folder(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def merge_into(model: nn.Module, adapter: AdapterFolder) -> None:
    """Add an adapter to the weights of its base, a transformers model in memory; each weight is rounded once.

    Raises CheckpointError for an adapter of another model.
    """
    parameters = dict(model.named_parameters())
    added = _factors(adapter, {name: tuple(parameter.shape) for name, parameter in parameters.items()})
    with torch.no_grad():
        for weight, linear in added.items():
            parameters[weight].copy_(_merge_weight(adapter, linear, parameters[weight]))
        for name in filter(parameters.__contains__, adapter.stored):
            parameters[name].copy_(adapter.stored[name].read())


def _merge_weight(adapter: AdapterFolder, linear: str, weight: Tensor) -> Tensor:
    """Return `weight` of a linear layer with the adapter's product added, in fp32."""
    factors = (adapter.stored[f"{linear}.{kind}.weight"].read().float() for kind in (LORA_B, LORA_A))
    merged = weight.to(torch.float32, copy=True).add_(torch.mm(*factors), alpha=adapter.adapters.scale_of(linear))
    if adapter.adapters.use_dora:
        magnitude = adapter.stored[f"{linear}.{MAGNITUDE}"].read().float()
        norms = torch.linalg.vector_norm(merged, dim=1).clamp(min=1e-15)  # rows of zeros stay zeros
        merged.mul_((magnitude / norms).unsqueeze(1))
    return merged


def base_shapes(parts: ModelParts) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the base's parameters that are stored; a tied head is not stored."""
    blocks = parts.blocks[:-1] if parts.is_tied else parts.blocks
    named = {name: shape for block in blocks for name, shape in block.parameter_shapes().items()}
    return {name: shape for name, shape in named.items() if adapted_linear(name) is None}


def _factors(adapter: AdapterFolder, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return adapted weight -> its linear layer. Raises CheckpointError for an adapter of another model."""
    added: dict[str, str] = {}
    for name, stored in adapter.stored.items():
        linear = adapted_linear(name)
        weight = name if linear is None else f"{linear}.weight"
        if weight not in shapes:
            raise CheckpointError(
                f"{adapter.folder} adapts {weight!r}, which the base does not have: it is for another base."
            )
        if linear is None:
            fits = stored.shape == shapes[weight]
        else:
            added[weight] = linear
            axis, has_two = int(LORA_A in name.split(".")), not name.endswith(MAGNITUDE)
            fits = len(stored.shape) == 1 + has_two and stored.shape[axis] == shapes[weight][axis]
        if not fits:
            raise CheckpointError(
                f"{adapter.folder}: {name!r} of shape {stored.shape} does not fit {weight!r} of shape "
                f"{shapes[weight]}: it is for another base."
            )
    for weight, linear in added.items():
        kinds = [f"{linear}.{kind}.weight" for kind in (LORA_A, LORA_B)]
        kinds += [f"{linear}.{MAGNITUDE}"] if adapter.adapters.use_dora else []
        if missing := [name for name in kinds if name not in adapter.stored]:
            raise CheckpointError(f"{adapter.folder} has no {missing[0]!r} for {weight!r}. Get the file again.")
    return added
