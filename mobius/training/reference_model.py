"""Other models that score the data: the reference, loaded into the stages for a time, and the teacher of a student."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from mobius.config.config import Config, ModelConfig
from mobius.errors import CheckpointError, listed, quoted
from mobius.models.blocks import ModelParts
from mobius.models.families import load_model_config, locate_model
from mobius.models.tokenizer import load_tokenizer
from mobius.models.weights import (
    CheckpointWeights,
    InitialAdapterWeights,
    WeightSource,
    check_model_weights,
    folder_has_weights,
)
from mobius.training.run_setup import RunSetup

_SAME_MODEL: Final = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Fields of config.json in which equal models may differ; token ids of start, end and padding are others."""


def find_reference_model(
    config: Config, parts: ModelParts, model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> Path | None:
    """Return the folder of --reference_model, None without one.

    Raises CheckpointError if it has no weights, another structure than the trained model, or another vocabulary.
    """
    name = config.objective.reference_model
    if name is None:
        return None
    folder, place = locate_model(name, option="--reference_model"), f"--reference_model {name}"
    _check_weights(place, folder)
    own, other = (_fields(each) for each in (model_config, load_model_config(folder, config.model)))
    if differing := sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key)):
        values = (f"`{key}` ({quoted(other.get(key))} instead of {quoted(own.get(key))})" for key in differing)
        raise CheckpointError(
            f"{place}: its config.json differs from the trained model's in {listed(values)}. The reference runs in the "
            "memory of the trained model, so both must have one structure."
        )
    _check_tokenizer(place, folder, model_config.vocab_size, tokenizer)
    check_model_weights(folder, parts, config.model)
    return folder


def find_teacher(config: Config, tokenizer: PreTrainedTokenizerBase) -> Path | None:
    """Return the folder of --teacher_model, None without one. Raises CheckpointError for no weights or other tokens."""
    name = config.objective.teacher_model
    if name is None:
        return None
    folder, place = locate_model(name, option="--teacher_model"), f"--teacher_model {name}"
    _check_weights(place, folder)
    _check_tokenizer(place, folder, load_model_config(folder, ModelConfig()).vocab_size, tokenizer)
    return folder


def _check_weights(place: str, folder: Path) -> None:
    if not folder_has_weights(folder):
        raise CheckpointError(f"{place}: {folder} holds no weights. Give the folder of a model with *.safetensors.")


def _check_tokenizer(place: str, folder: Path, vocab_size: int, tokenizer: PreTrainedTokenizerBase) -> None:
    if load_tokenizer(folder, vocab_size).get_vocab() != tokenizer.get_vocab():
        raise CheckpointError(
            f"{place}: its tokenizer has other tokens than the tokenizer of --model_path, so it would score other "
            "texts. Give a model with the same vocabulary."
        )


def _fields(config: PretrainedConfig) -> dict[str, Any]:
    fields: dict[str, Any] = config.to_dict()
    return {key: value for key, value in fields.items() if key not in _SAME_MODEL and not key.endswith("_token_id")}


def reference_weights(run_setup: RunSetup, folder: Path) -> WeightSource:
    """Return the weights of the reference model; adapters have no effect."""
    parts = run_setup.parts
    base = CheckpointWeights(folder, parts.stored_names, parts.parameter_pieces, dtype=run_setup.dtype)
    if not parts.adapters.has_frozen_base:
        return base
    return InitialAdapterWeights.of(base, parts, seed=0, dtype=run_setup.dtype)
