"""Where initial parameter values come from: a safetensors checkpoint or the family's own initialization.

They come tensor by tensor; where they go is the caller's business.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mobius.errors import CheckpointError
from mobius.models.blocks import ModelParts


class WeightSource(Protocol):
    """Gives one parameter at a time by its Hugging Face name, on the CPU; the caller owns the tensor."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The value of parameter `name`, which has `shape` in the model."""


class CheckpointWeights:
    """Parameters from a folder of safetensors, one file or sharded; only what is asked for is read."""

    def __init__(self, folder: Path, aliases: Mapping[str, str]) -> None:
        """Index `folder`; `aliases` maps a name to the one it is stored under (tied weights)."""
        self._folder = folder
        self._aliases = dict(aliases)
        self._file_of = _index(folder)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read one tensor. Raises CheckpointError if it is missing or has another shape than `shape`."""
        stored = name if name in self._file_of else self._aliases.get(name, name)
        file_name = self._file_of.get(stored)
        if file_name is None:
            raise CheckpointError(
                f"{self._folder} has no tensor {name!r} (it has {len(self._file_of)} tensors, for example "
                f"{next(iter(self._file_of), None)!r}). The checkpoint belongs to another model than its config.json, "
                "or is incomplete."
            )
        # Opened anew for each tensor: an open file keeps every page that was touched in this process's memory.
        try:
            with safe_open(self._folder / file_name, framework="pt") as file:
                tensor = cast(Tensor, file.get_tensor(stored))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._folder / file_name}: cannot read {stored!r}: {error}") from error
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._folder / file_name}: {stored!r} has shape {tuple(tensor.shape)}, "
                f"the configuration asks for {shape}."
            )
        return tensor


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index of a sharded checkpoint or the headers of single files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = cast(dict[str, str], json.loads(index.read_text())["weight_map"])
        if missing := sorted({file for file in weight_map.values() if not (folder / file).is_file()}):
            raise CheckpointError(
                f"{folder} is incomplete: {index.name} names {missing[0]} ({len(missing)} file(s) missing)."
            )
        return weight_map
    names: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                found = file.keys()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: is damaged or no safetensors file: {error}") from error
        names.update(dict.fromkeys(found, path.name))
    return names


class InitialWeights:
    """Parameters drawn by transformers' own initialization of the family, for a model without weights.

    Each leaf module is seeded by its name, so values do not depend on how the model is cut or on how many ranks there
    are.
    """

    def __init__(self, parts: ModelParts, *, seed: int) -> None:
        self._model = parts.model
        self._aliases = parts.stored_names
        self._seed = seed

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
