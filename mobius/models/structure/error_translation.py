"""Reports errors of a family's own code as errors of the model's config.json."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig

from mobius.errors import CheckpointError
from mobius.models.model_files import describe_error
from mobius.models.structure.model_structure import UnsupportedStructureError


@contextlib.contextmanager
def translate_config_errors(config: PretrainedConfig) -> Iterator[None]:
    """Convert any error of the family's own code, caused by unexpected values, to CheckpointError."""
    try:
        yield
    except (CheckpointError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # GPU errors say nothing about the configuration
    except UnsupportedStructureError as error:
        raise CheckpointError(
            f"{file_of(config)}: the family {config.model_type!r} {error}, so it cannot be cut into stages."
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{file_of(config)} describes no model that can be built: {describe_error(error)}"
        ) from error


def file_of(config: PretrainedConfig) -> str:
    """Path of the configuration's file if there is one, for messages."""
    folder = getattr(config, "name_or_path", None)
    return str(Path(folder) / "config.json") if isinstance(folder, str) and folder else "the configuration"
