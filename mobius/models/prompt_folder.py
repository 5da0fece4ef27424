"""A trained prompt's folder in peft's format.

    adapter_config.json          kind, number of vectors, name of the base
    adapter_model.safetensors    the vectors

A file of P-tuning holds the vectors that the encoder made, not the encoder; only a checkpoint has that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mobius.config.config import AdapterConfig, FinetuningType, options
from mobius.errors import CheckpointError
from mobius.models.blocks import ModelParts
from mobius.models.model_files import format_json_value
from mobius.models.peft_folder import CONFIG_FILE, WEIGHTS_FILE, AdapterBase, AdapterFiles, check_base
from mobius.models.prompts import PROMPT_EMBEDDINGS, PROMPT_WEIGHT, InitialPrompt, exported_prompt
from mobius.models.tensor_file import StoredTensor
from mobius.models.tokenizer import load_tokenizer
from mobius.models.weights import WeightSource, read_file


class PromptFolder(AdapterFiles):
    """A prompt on disk, written by Mobius or peft."""

    noun, title = "a prompt", "A prompt trained in front of"
    peft_types: ClassVar[tuple[str, ...]] = ("PROMPT_TUNING", "P_TUNING")

    def __init__(self, folder: Path) -> None:
        """Read `folder`. Raises CheckpointError if it does not hold vectors of this kind."""
        super().__init__(folder)
        if (kind := self.fields.get("peft_type")) not in self.peft_types:
            raise CheckpointError(
                f"{folder / CONFIG_FILE} is of the kind {format_json_value(kind)}, not {self.noun} "
                f"({', '.join(self.peft_types)}). To continue LoRA, use --finetuning_type lora."
            )
        stored = read_file(folder / WEIGHTS_FILE)
        found = stored.get(PROMPT_EMBEDDINGS)
        if found is None or len(found.shape) != 2 or len(stored) > 1:
            raise CheckpointError(
                f"{folder / WEIGHTS_FILE} must hold one matrix, {PROMPT_EMBEDDINGS!r}. Get the file again."
            )
        self.stored = {PROMPT_WEIGHT: found}

    def put_before(self, model: PreTrainedModel) -> Tensor:
        """Let `model` answer with the prompt, given these vectors [N, H] before each text. Raises CheckpointError."""
        vectors, width = self.stored[PROMPT_WEIGHT].read(), int(model.config.get_text_config().hidden_size)
        if vectors.shape[1] != width:
            raise CheckpointError(
                f"{self.folder} has vectors of width {vectors.shape[1]}, the base has {width}: it is for another base."
            )
        return vectors

    def complete(self, config: AdapterConfig, given: Collection[str] | None) -> AdapterConfig:
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
        width = self.stored[PROMPT_WEIGHT].shape[1]
        if width != parts.config.hidden_size:
            raise CheckpointError(
                f"--adapter_path {self.folder} has vectors of width {width}, the model has {parts.config.hidden_size}: "
                "its base is another."
            )
        check_base(self.folder, base)

    def values(self, parts: ModelParts) -> Mapping[str, StoredTensor]:
        return self.stored

    @classmethod
    def initial(
        cls, base: WeightSource, parts: ModelParts, folder: Path, *, seed: int, dtype: torch.dtype
    ) -> WeightSource:
        words, text = list[int](), parts.adapters.prompt_init_text
        if text is not None:
            words = load_tokenizer(folder, parts.config.vocab_size)(text).input_ids
        return InitialPrompt(base, parts.embedding, seed=seed, words=words)

    @classmethod
    def config_fields(cls, parts: ModelParts, base: AdapterBase) -> dict[str, Any]:
        config, fields = parts.adapters, {**common_fields(parts, base), "peft_type": "PROMPT_TUNING"}
        if config.finetuning_type is FinetuningType.PROMPT:
            if config.prompt_init_text is None:
                return {**fields, "prompt_tuning_init": "RANDOM"}
            text = {"prompt_tuning_init_text": config.prompt_init_text, "tokenizer_name_or_path": base.name}
            return {**fields, "prompt_tuning_init": "TEXT", **text}
        encoder = {"reparameterization_type": config.encoder_type.upper(), "num_layers": 2, "dropout": 0.0}
        encoder["hidden_size"] = config.encoder_hidden_size or parts.config.hidden_size
        return {**fields, "peft_type": "P_TUNING", **{f"encoder_{name}": value for name, value in encoder.items()}}

    @classmethod
    def sources(cls, names: Iterable[str]) -> dict[str, list[str]]:
        return {PROMPT_EMBEDDINGS: own} if (own := [*names]) else {}

    @classmethod
    def made_of(cls, values: Mapping[str, Tensor], written: StoredTensor | None = None) -> Tensor:
        return exported_prompt(values)


def common_fields(parts: ModelParts, base: AdapterBase) -> dict[str, Any]:
    """Return the fields of adapter_config.json that all kinds of prompts have."""
    model = parts.config
    return {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "revision": base.revision,
        "inference_mode": True,
        "num_virtual_tokens": parts.adapters.num_virtual_tokens,
        "token_dim": model.hidden_size,
        "num_transformer_submodules": 1,
        "num_attention_heads": model.num_attention_heads,
        "num_layers": model.num_hidden_layers,
    }
