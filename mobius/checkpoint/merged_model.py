"""Writes a saved model again, or an adapter merged into its base; at most one file is in memory at a time.

W' = W + scale * B A        in fp32, rounded once to the format that is written; with DoRA, rows have their magnitudes

The matrices of a layer's experts are one parameter, and each has its own product.

If the adapter was trained beside codes (--base_dtype), W are the values that they decode to, or the original weights.
"""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

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
from mobius.checkpoint.whole_model import TEXT_ALONE, SavedLayout
from mobius.config.config import AdapterConfig, BaseDtype, Config, FinetuningType
from mobius.config.earlier_results import MANIFEST_FILE
from mobius.errors import CheckpointError
from mobius.files.atomic_files import publish_folder, sync_tree
from mobius.models.adapters import LORA_A, LORA_B, MAGNITUDE, adapted_linear
from mobius.models.blocks import ModelParts
from mobius.models.experts import AdaptedMatrix, adapted_matrices, stacked
from mobius.models.family_support import text_config_of
from mobius.models.model_files import ModelFiles
from mobius.models.parameter_pieces import stored_shapes
from mobius.models.peft_folder import AdapterFiles, AdapterFolder
from mobius.models.weights import CheckpointWeights, WeightSource, decoded, folder_has_weights, text_weight_names

logger = logging.getLogger(__name__)

_COMPARED_ELEMENTS = 2**24
"""Number of elements that are compared at a time."""


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
    into_original: bool = False,
    model_files: ModelFiles | None = None,
    layout: SavedLayout = TEXT_ALONE,
    progress: Callable[[], None] = lambda: None,
    finish: Callable[[Path], object] = lambda partial: verify_folder(partial, {}),
) -> None:
    """Write the model to `folder`, which appears only when complete; `parts` are the base's, with or without adapters.

    An adapter that was trained beside codes is merged into their values, or `into_original` weights. Without a run,
    `parts` are made with `adapters_to_merge`. If `model_files` are given, they replace the model's files. `progress` is
    called for each tensor, `finish` with the folder before it gets its final name. Raises CheckpointError.
    """
    check_free(folder)
    weights = _WrittenWeights(saved, parts, dtype=dtype, into_original=into_original)
    read_whole = functools.lru_cache(maxsize=1)(weights.read)  # one suffices: pieces of a parameter are read in a row
    owners = {
        piece.name: (name, piece)
        for name, parameter_pieces in parts.parameter_pieces.items()
        for piece in parameter_pieces
    }

    def read(name: str) -> Tensor:
        progress()
        whole, piece = owners.get(name, (name, None))
        value = read_whole(whole) if piece is None else piece.of(read_whole(whole)).contiguous()
        if value.numel() and not torch.stack(torch.aminmax(value)).isfinite().all():
            raise CheckpointError(f"{name!r} has values that are too large for {dtype}. Use --dtype bf16 or fp32.")
        return value

    with _new_folder(folder) as partial:
        if layout.whole is None:
            _write_text(partial, parts, read, dtype=dtype, max_file_bytes=layout.max_file_bytes)
        else:
            layout.whole.check_unchanged()
            layout.whole.create(partial, parts, dtype)
            layout.whole.fill(partial, read)
            layout.whole.check_copied(partial)
        files = model_files or saved.model_files(parts.config)
        write_model_files(partial, files, parts.config, dtype=dtype, layout=layout)
        finish(partial)
    weights.log_differences()


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Context with a folder that becomes `folder` if no error is raised, and is removed otherwise."""
    partial = folder.with_name(f"{folder.name}.export.partial")
    with translate_file_errors("write", partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        yield partial
        with translate_file_errors("rename", partial):
            sync_tree(partial)
            publish_folder(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class _WrittenWeights:
    """Values of the parameters that are written, with the adapter added, if any."""

    def __init__(self, saved: SavedModel, parts: ModelParts, *, dtype: torch.dtype, into_original: bool) -> None:
        """Take the arguments of `write_model`. Raises CheckpointError."""
        self._adapter, self.shapes = saved.adapter_to_merge, base_shapes(parts)
        self._parts, self._dtype, self._into_original = parts, dtype, into_original
        self._added = {} if self._adapter is None else _adapted_weights(self._adapter, self.shapes, parts.model)
        self._codecs = {} if self._adapter is None else parts.codecs_in(self._adapter.dtype)
        self._largest = [(0.0, ""), (0.0, "")]
        """Largest absolute difference between decoded and original weights, and between what they are merged to."""
        if self._adapter is None and (saved.folder / MANIFEST_FILE).is_file():
            kind = MasterWeights if dtype is torch.float32 else SavedWeights
            self._source: WeightSource = kind(open_checkpoint(saved.folder), parts)
        elif folder_has_weights(saved.folder):
            self._source = CheckpointWeights(
                *(saved.folder, parts.stored_names, parts.parameter_pieces), decodes_in_fp32=bool(self._codecs)
            )
        else:
            raise CheckpointError(f"{saved.folder} has no weights, so there is nothing to merge an adapter into.")

    def read(self, name: str) -> Tensor:
        """Return the value of a parameter in the format that is written."""
        adapter = self._adapter
        if adapter is not None and name in adapter.stored:
            return adapter.stored[name].read().to(self._parts.weight_dtype(name, self._dtype))
        weight = self._source.read(name, self.shapes[name])
        if adapter is None or name not in self._codecs:
            return self._with_adapter(name, weight)
        both = decoded(weight, self._codecs[name], adapter.dtype), weight
        merged = self._with_adapter(name, both[0]), self._with_adapter(name, both[1])
        for number, (one, other) in enumerate((both, merged)):
            parts = zip(*(each.reshape(-1).split(_COMPARED_ELEMENTS) for each in (one, other)), strict=True)
            found = max(float((ours.float() - theirs.float()).abs().max()) for ours, theirs in parts)
            self._largest[number] = max(self._largest[number], (found, name))
        return merged[self._into_original]

    def _with_adapter(self, name: str, weight: Tensor) -> Tensor:
        if self._adapter is None or name not in self._added:
            return weight.to(self._parts.weight_dtype(name, self._dtype))
        return self._added[name].merge(self._adapter, weight, self._dtype)

    def log_differences(self) -> None:
        """Say how far decoded and original weights are apart, if the base was codes; call this after all reads."""
        if not self._codecs:
            return
        bases = f"the decoded {self._parts.adapters.base_dtype} weights", "the original weights"
        (base, name), (merged, merged_name) = self._largest
        logger.info(
            "the adapter is merged into %s; %s differ from them by up to %.3g (%s), and merged with it by up to %.3g "
            "(%s)",
            *(bases[self._into_original], bases[not self._into_original], base, name, merged, merged_name),
        )


def _write_text(
    folder: Path, parts: ModelParts, read: Callable[[str], Tensor], *, dtype: torch.dtype, max_file_bytes: int
) -> None:
    """Write the weights as those of a text model, from `read` by stored name."""
    parameters = [
        StageParameter(stored_name, own_shape, 0, weight_dtype=parts.weight_dtype(name, dtype))
        for name, shape in base_shapes(parts).items()
        for stored_name, own_shape in stored_shapes(name, shape, parts.parameter_pieces)
    ]
    (files,) = plan_files(parameters, dtype=dtype, has_optimizer=False, max_file_bytes=max_file_bytes)
    write_stage(folder, files, read)
    num_parameters = sum(each.num_elements for each in parameters)
    write_indexes(folder, files, num_parameters=num_parameters, num_bytes=weight_bytes(parameters, dtype))


def merge_into(model: PreTrainedModel, adapter: AdapterFolder) -> None:
    """Add an adapter to the weights of its base, a transformers model in memory, after `decode_base`.

    Each weight is rounded once. Raises CheckpointError for an adapter of another model.
    """
    parameters, adapted = _text_parameters(model), cast(nn.Module, model)
    if adapter.adapters.lora_target_parameters is not None:
        adapted = ModelParts(text_config_of(model.config), torch.device("cpu"), adapters=adapter.adapters).model
    added = _adapted_weights(adapter, {name: tuple(each.shape) for name, each in parameters.items()}, adapted)
    with torch.no_grad():
        for weight, own in added.items():
            parameters[weight].copy_(own.merge(adapter, parameters[weight], parameters[weight].dtype))
        for name in filter(parameters.__contains__, adapter.stored):
            parameters[name].copy_(adapter.stored[name].read())


def decode_base(model: PreTrainedModel, files: AdapterFiles) -> None:
    """Give a base, a transformers model in memory, the values that it had where `files` were trained, if it was codes.

    Raises CheckpointError.
    """
    if files.base_dtype is BaseDtype.BF16:
        return
    frozen = AdapterConfig(FinetuningType.PROMPT, base_dtype=files.base_dtype)
    parts = ModelParts(text_config_of(model.config), torch.device("cpu"), adapters=frozen)
    parameters = _text_parameters(model)
    with torch.no_grad():
        for name, codec in parts.codecs_in(files.dtype).items():
            parameters[name].copy_(decoded(parameters[name], codec, files.dtype))


def _text_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Parameters by our names, which differ from the model's if it has more than text."""
    named: dict[str, nn.Parameter] = dict(model.named_parameters())
    names = text_weight_names(named)
    return {names.get(name, name): parameter for name, parameter in named.items()}


def adapters_to_merge(adapter: AdapterFolder | None) -> AdapterConfig:
    """Options of an adapter that its base's parts must have for merging: formats of codes, and matrices of experts."""
    options = AdapterConfig() if adapter is None else adapter.adapters
    needs_parts = options.base_dtype is not BaseDtype.BF16 or options.lora_target_parameters is not None
    return options if needs_parts else AdapterConfig()


class _AdaptedWeight(NamedTuple):
    """A weight with an adapter."""

    holder: str
    """Name of the module that has the factors: the linear layer, or as peft nests them in experts."""
    experts: AdaptedMatrix | None

    def merge(self, adapter: AdapterFolder, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `weight` with the adapter's product added in fp32, rounded to `dtype`."""
        first, second = (adapter.stored[f"{self.holder}.{kind}.weight"].read().float() for kind in (LORA_A, LORA_B))
        options = adapter.adapters
        if self.experts is not None:
            number, scale = self.experts.num_experts, options.scale_of(self.experts.name)
            factors = stacked(second, number, is_second=True), stacked(first, number, is_second=False)
            result = torch.empty_like(weight, dtype=dtype)
            for target, matrix, *both in zip(result, weight, *factors, strict=True):
                own = matrix.to(torch.float32, copy=True)
                (own.t() if self.experts.is_transposed else own).addmm_(*both, alpha=scale)
                target.copy_(own)
            return result
        merged = weight.to(torch.float32, copy=True).add_(second @ first, alpha=options.scale_of(self.holder))
        if options.use_dora:
            magnitude = adapter.stored[f"{self.holder}.{MAGNITUDE}"].read().float()
            norms = torch.linalg.vector_norm(merged, dim=1).clamp(min=1e-15)  # rows of zeros stay zeros
            merged.mul_((magnitude / norms).unsqueeze(1))
        return merged.to(dtype)

    def fits(self, name: str, stored: tuple[int, ...], weight: tuple[int, ...]) -> bool:
        """Whether the adapter's parameter `name` of shape `stored` fits the weight's shape."""
        axis, has_two = int(LORA_A in name.split(".")), not name.endswith(MAGNITUDE)
        if len(stored) != 1 + has_two:
            return False
        if self.experts is None:
            return stored[axis] == weight[axis]
        sizes = weight[:0:-1] if self.experts.is_transposed else weight[1:]
        return stored[axis] == sizes[axis] and stored[1 - axis] % self.experts.num_experts == 0


def base_shapes(parts: ModelParts) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the base's parameters that are stored; a tied head is not stored."""
    blocks = parts.blocks[:-1] if parts.is_tied else parts.blocks
    named = {name: shape for block in blocks for name, shape in block.parameter_shapes().items()}
    return {name: shape for name, shape in named.items() if adapted_linear(name) is None}


def _adapted_weights(
    adapter: AdapterFolder, shapes: Mapping[str, tuple[int, ...]], model: nn.Module
) -> dict[str, _AdaptedWeight]:
    """Return the weights in `shapes` that the adapter changes. Raises CheckpointError for an adapter of another model.

    `model` has adapters where `adapters_to_merge` has any.
    """
    added, matrices = dict[str, _AdaptedWeight](), adapted_matrices(model)
    for name, stored in adapter.stored.items():
        holder = adapted_linear(name)
        experts = None if holder is None else matrices.get(holder)
        weight = name if holder is None else f"{holder}.weight" if experts is None else experts.name
        if weight not in shapes:
            raise CheckpointError(
                f"{adapter.folder} adapts {weight!r}, which the base does not have: it is for another base."
            )
        if holder is None:
            fits = stored.shape == shapes[weight]
        else:
            own = added.setdefault(weight, _AdaptedWeight(holder, experts))
            fits = own.fits(name, stored.shape, shapes[weight])
        if not fits:
            raise CheckpointError(
                f"{adapter.folder}: {name!r} of shape {stored.shape} does not fit {weight!r} of shape "
                f"{shapes[weight]}: it is for another base."
            )
    for weight, (holder, _) in added.items():
        kinds = [f"{holder}.{kind}.weight" for kind in (LORA_A, LORA_B)]
        kinds += [f"{holder}.{MAGNITUDE}"] if adapter.adapters.use_dora else []
        if missing := [name for name in kinds if name not in adapter.stored]:
            raise CheckpointError(f"{adapter.folder} has no {missing[0]!r} for {weight!r}. Get the file again.")
    return added
