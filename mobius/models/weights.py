"""Sources of initial parameter values, tensor by tensor: a safetensors checkpoint or the family's initialization."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mobius.config.config import ModelConfig
from mobius.errors import CheckpointError
from mobius.models.blocks import ModelParts
from mobius.models.families import folder_has_weights
from mobius.models.stored_weights import check_shape, check_stored_weights, read_headers, tied_aliases

_CHECKED_ELEMENTS = 2**20


class WeightSource(Protocol):
    """Source of parameters, one at a time by its Hugging Face name, on the CPU; the caller owns the tensor."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Value of parameter `name`, which has `shape` in the model."""


def check_model_weights(folder: Path, parts: ModelParts, options: ModelConfig) -> None:
    """Check that the weights in `folder`, if there are any, are those of `parts`; by headers alone (stored_weights.py).

    Call it before data is prepared or memory is taken. Raises CheckpointError.
    """
    if folder_has_weights(folder):
        check_stored_weights(folder, parts, has_fewer_layers=options.num_layers is not None)


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
        # Opened anew for each tensor: an open file keeps every page that was touched in this process's memory.
        try:
            with safe_open(stored.path, framework="pt") as file:
                tensor = cast(Tensor, file.get_tensor(stored.name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{stored.path}: cannot read {stored.name!r}: {error}") from error
        if not _fits(tensor, self._dtype):
            raise CheckpointError(f"{stored.path}: {stored.name!r} {_describe_misfits(tensor, self._dtype)}")
        return tensor


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether every value is finite and stays so in `dtype`.

    The extremes tell it of all: a NaN makes both of them NaN, and rounding keeps the order. One pass without a copy, at
    some 20 GB/s on one core; `isfinite` on all of it would allocate, and do 0.4.
    """
    if tensor.numel() == 0:
        return True
    return bool(torch.stack(torch.aminmax(tensor)).to(dtype).isfinite().all())


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
