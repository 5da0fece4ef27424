"""A trained prefix's folder in peft's format: `prompt_embeddings` [virtual tokens, layers * 2 * heads * head size].

A row has the keys and values of a virtual token, layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from mobius.errors import CheckpointError
from mobius.models.blocks import ModelParts
from mobius.models.peft_folder import AdapterBase, check_base
from mobius.models.prefixes import PREFIX, add_prefixes, key_shape, prefix_width
from mobius.models.prompt_folder import PromptFolder, common_fields
from mobius.models.prompts import PROMPT_WEIGHT
from mobius.models.structure import layers_of
from mobius.models.tensor_file import StoredTensor


class PrefixFolder(PromptFolder):
    """A prefix on disk, written by Mobius or peft."""

    noun, title, peft_types = "a prefix", "A prefix trained in front of", ("PREFIX_TUNING",)

    def put_before(self, model: PreTrainedModel) -> Tensor:
        """Add the prefix to the layers of `model`; what stands in its places of a text does not matter."""
        config = model.config.get_text_config()
        self._check_width(config, f"{self.folder}")
        add_prefixes(config, layers_of(model), self.stored[PROMPT_WEIGHT].read())
        return torch.zeros(len(self), config.hidden_size)

    def check(self, parts: ModelParts, base: AdapterBase) -> None:
        self._check_width(parts.config, f"--adapter_path {self.folder}")
        check_base(self.folder, base)

    def values(self, parts: ModelParts) -> Mapping[str, StoredTensor]:
        stored, number = self.stored[PROMPT_WEIGHT], parts.config.num_hidden_layers
        width = stored.shape[1] // number
        given = stored.name, stored.path, stored.word, (len(self), width), stored.start
        return {
            f"{parts.structure.layers}.{layer}.{PREFIX}": _Columns(*given, whole=stored, first=layer * width)
            for layer in range(number)
        }

    @classmethod
    def config_fields(cls, parts: ModelParts, base: AdapterBase) -> dict[str, Any]:
        heads, size = key_shape(parts.config)
        own = {"peft_type": "PREFIX_TUNING", "prefix_projection": False, "init_weights": None}
        width = {"num_attention_heads": heads, "token_dim": heads * size, "encoder_hidden_size": heads * size}
        return common_fields(parts, base) | own | width

    @classmethod
    def made_of(cls, values: Mapping[str, Tensor], written: StoredTensor | None = None) -> Tensor:
        parts = {int(name.split(".")[-2]): value for name, value in values.items()}
        if written is not None:
            width = next(iter(values.values())).shape[1]
            parts = dict(enumerate(written.read().split(width, 1))) | parts
        return torch.cat([part for _, part in sorted(parts.items())], 1)

    def __len__(self) -> int:
        return self.stored[PROMPT_WEIGHT].shape[0]

    def _check_width(self, config: PretrainedConfig, where: str) -> None:
        """Raise CheckpointError, which begins with `where`, if the prefix is for another model."""
        width, expected = self.stored[PROMPT_WEIGHT].shape[1], prefix_width(config)
        if width != expected:
            raise CheckpointError(
                f"{where} has {width} numbers for a virtual token, but the keys and values of the model's layers are "
                f"{expected}: its base is another."
            )


@dataclass(frozen=True)
class _Columns(StoredTensor):
    """Some columns of a stored matrix."""

    whole: StoredTensor
    first: int

    def read(self, rows: slice | None = None) -> Tensor:
        return self.whole.read(rows)[:, self.first : self.first + self.shape[1]].contiguous()
