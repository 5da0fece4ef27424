"""Writes an adapter as peft loads it, from files in which ranks or stages have left its parameters, and checks it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from mobius.atomic_files import follow_umask, sync_to_disk
from mobius.checkpoint.model_folder import describe_difference, translate_file_errors
from mobius.errors import CheckpointError
from mobius.models.adapters.peft_folder import (
    BASE_MODEL_FILE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterBase,
    base_fields,
    config_fields,
    peft_name_of,
)
from mobius.models.blocks import ModelParts
from mobius.models.weights import read_header


def write_adapter(folder: Path, files: Sequence[Path], parts: ModelParts, base: AdapterBase) -> None:
    """Write the adapter that `files` have the parameters of, by our names, into `folder`. Raises CheckpointError."""
    path = folder / WEIGHTS_FILE
    stored = [tensor for file in files for tensor in read_header(file)]
    with translate_file_errors("write", path):
        save_file({peft_name_of(each.name): each.read() for each in stored}, path, metadata={"format": "pt"})
        follow_umask(path)  # safetensors makes it readable for its owner alone
        sync_to_disk(path)
    for name, fields in ((CONFIG_FILE, config_fields(parts, base)), (BASE_MODEL_FILE, base_fields(base))):
        with translate_file_errors("write", folder / name):
            (folder / name).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def verify_adapter(folder: Path, expected: Iterable[tuple[str, Callable[[], Tensor]]]) -> None:
    """Compare each parameter of `expected`, by our names, with what is stored, bit by bit. Raises CheckpointError."""
    stored = {tensor.name: tensor for tensor in read_header(folder / WEIGHTS_FILE)}
    for name, read in expected:
        found = stored.get(peft_name_of(name))
        if found is None:
            raise CheckpointError(f"{folder / WEIGHTS_FILE} has no {name!r}.")
        if problem := describe_difference(found.read(), read()):
            raise CheckpointError(f"{found.path}: {name!r} was not saved as it was trained: {problem}.")
