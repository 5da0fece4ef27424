"""A trained prompt's folder in peft's format, and the choice between it and an adapter's.

    adapter_config.json          kind, number of vectors, name of the base
    adapter_model.safetensors    the vectors

A file of P-tuning holds the vectors that the encoder made, not the encoder; only a checkpoint has that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mobius.config.config import AdapterConfig, Config, FinetuningType, options
from mobius.config.validation import LEAST_TEXT
from mobius.errors import CheckpointError
from mobius.models.blocks import ModelParts
from mobius.models.model_files import format_json_value, read_json_object
from mobius.models.peft_folder import CONFIG_FILE, WEIGHTS_FILE, AdapterBase, AdapterFolder, check_base
from mobius.models.prompts import PROMPT_EMBEDDINGS, PROMPT_WEIGHT
from mobius.models.weights import read_file

_KINDS = ("PROMPT_TUNING", "P_TUNING")


class PromptFolder:
    """A prompt on disk, written by Mobius or peft."""

    is_reward_model = False

    def __init__(self, folder: Path) -> None:
        """Read `folder`. Raises CheckpointError if it does not hold vectors of prompt tuning or P-tuning."""
        self.folder = folder
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder} has no {name}, so it is not the folder of a prompt.")
        self.fields = read_json_object(folder / CONFIG_FILE)
        if (kind := self.fields.get("peft_type")) not in _KINDS:
            raise CheckpointError(
                f"{folder / CONFIG_FILE} is of the kind {format_json_value(kind)}, not a prompt ({', '.join(_KINDS)}). "
                "To continue LoRA, use --finetuning_type lora."
            )
        stored = read_file(folder / WEIGHTS_FILE)
        found = stored.get(PROMPT_EMBEDDINGS)
        if found is None or len(found.shape) != 2 or len(stored) > 1:
            raise CheckpointError(
                f"{folder / WEIGHTS_FILE} must hold one matrix, {PROMPT_EMBEDDINGS!r}. Get the file again."
            )
        self.stored = {PROMPT_WEIGHT: found}

    def vectors(self) -> Tensor:
        """Return the vectors [virtual tokens, width]."""
        return self.stored[PROMPT_WEIGHT].read()

    def complete(self, config: AdapterConfig, given: Collection[str] | None) -> AdapterConfig:
        """Return `config` with the prompt's number of vectors, as `AdapterFolder.complete`.

        Raises CheckpointError if another number was given.
        """
        option, (number, _) = "num_virtual_tokens", self.stored[PROMPT_WEIGHT].shape
        own = config.num_virtual_tokens
        is_given = own != options()[option].default if given is None else option in given
        if is_given and own != number:
            raise CheckpointError(
                f"--adapter_path {self.folder} has {option} {number}, the run has {own}. Leave --{option} out: it is "
                "the prompt's then."
            )
        return replace(config, num_virtual_tokens=number)

    def check(self, parts: ModelParts, base: AdapterBase) -> None:
        """Raise CheckpointError if the prompt belongs to another base."""
        width = self.stored[PROMPT_WEIGHT].shape[1]
        if width != parts.config.hidden_size:
            raise CheckpointError(
                f"--adapter_path {self.folder} has vectors of width {width}, the model has {parts.config.hidden_size}: "
                "its base is another."
            )
        check_base(self.folder, base)


def open_adapter(folder: Path, config: AdapterConfig | None = None) -> AdapterFolder | PromptFolder:
    """Read the adapter or prompt in `folder`: of the kind that the run trains, or without `config` its own kind.

    Raises CheckpointError.
    """
    path = folder / CONFIG_FILE
    is_prompt = path.is_file() and read_json_object(path).get("peft_type") in _KINDS
    if is_prompt and config is not None and not config.is_prompt:
        raise CheckpointError(f"{folder} holds a prompt, not an adapter. Continue it with --finetuning_type prompt.")
    return PromptFolder(folder) if is_prompt or (config is not None and config.is_prompt) else AdapterFolder(folder)


def adopt_adapter(config: Config, given: Collection[str] | None) -> Config:
    """Return `config` with the options of the adapter or prompt in --adapter_path, if there is one.

    `given`: options that the user set. Raises CheckpointError, also for a prompt that leaves no room in a row.
    """
    path = config.adapters.adapter_path
    if path is None:
        return config
    adapters = open_adapter(Path(path).expanduser(), config.adapters).complete(config.adapters, given)
    if adapters.num_reserved_tokens + LEAST_TEXT > config.data.seq_length:
        raise CheckpointError(
            f"--adapter_path {path} has {adapters.num_virtual_tokens} vectors, which leave no room for a sample in a "
            f"row of --seq_length {config.data.seq_length}. Raise --seq_length."
        )
    return replace(config, adapters=adapters)


def prompt_fields(parts: ModelParts, base: AdapterBase) -> dict[str, Any]:
    """Contents of a prompt's adapter_config.json."""
    config, model = parts.adapters, parts.config
    fields = {
        "peft_type": "PROMPT_TUNING",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "revision": base.revision,
        "inference_mode": True,
        "num_virtual_tokens": config.num_virtual_tokens,
        "token_dim": model.hidden_size,
        "num_transformer_submodules": 1,
        "num_attention_heads": model.num_attention_heads,
        "num_layers": model.num_hidden_layers,
    }
    if config.finetuning_type is FinetuningType.PROMPT:
        if config.prompt_init_text is None:
            return {**fields, "prompt_tuning_init": "RANDOM"}
        text = {"prompt_tuning_init_text": config.prompt_init_text, "tokenizer_name_or_path": base.name}
        return {**fields, "prompt_tuning_init": "TEXT", **text}
    encoder = {"reparameterization_type": "MLP", "num_layers": 2, "dropout": 0.0}
    encoder["hidden_size"] = config.encoder_hidden_size or model.hidden_size
    return {**fields, "peft_type": "P_TUNING", **{f"encoder_{name}": value for name, value in encoder.items()}}
