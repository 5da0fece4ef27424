"""Writes an adapter as peft loads it, from files in which ranks or stages have left its parameters, and checks it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from mobius.errors import CheckpointError
from mobius.models.adapters.files import (
    BASE_FILE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    Base,
    base_fields,
    config_fields,
    file_name_of,
)
from mobius.models.blocks import ModelParts
from mobius.models.weights import read_header
from mobius.output.hf_folder import difference, told_as
from mobius.writing import follow_umask, sync_to_disk


def write_adapter(folder: Path, files: Sequence[Path], parts: ModelParts, base: Base) -> None:
    """Write the adapter that `files` have the parameters of, by our names, into `folder`. Raises CheckpointError."""
    path = folder / WEIGHTS_FILE
    stored = [tensor for file in files for tensor in read_header(file)]
    with told_as("write", path):
        save_file({file_name_of(each.name): each.read() for each in stored}, path, metadata={"format": "pt"})
        follow_umask(path)  # safetensors makes it readable for its owner alone
        sync_to_disk(path)
    for name, fields in ((CONFIG_FILE, config_fields(parts, base)), (BASE_FILE, base_fields(base))):
        with told_as("write", folder / name):
            (folder / name).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def verify_adapter(folder: Path, expected: Iterable[tuple[str, Callable[[], Tensor]]]) -> None:
    """Compare each parameter of `expected`, by our names, with what is stored, bit by bit. Raises CheckpointError."""
    stored = {tensor.name: tensor for tensor in read_header(folder / WEIGHTS_FILE)}
    for name, read in expected:
        found = stored.get(file_name_of(name))
        if found is None:
            raise CheckpointError(f"{folder / WEIGHTS_FILE} has no {name!r}.")
        if problem := difference(found.read(), read()):
            raise CheckpointError(f"{found.path}: {name!r} was not saved as it was trained: {problem}.")
