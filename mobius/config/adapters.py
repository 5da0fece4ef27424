"""Owns what a run can be told about what it trains: all parameters, some of them, or adapters beside frozen ones."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from mobius.config.bounds import Count, NonNegative, Positive

# What is typed is a member's name in small letters.
FinetuningType = StrEnum("FinetuningType", ["FULL", "LORA"])
"""Kind of parameters that are trained."""

PARTS: Final = ("embedding", "head", "norms")
"""Words for parts of a model beside its layers."""
_LAYERS: Final = re.compile(r"layers\.(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


@dataclass(frozen=True)
class AdapterConfig:
    """Adapters and frozen parts"""

    finetuning_type: FinetuningType = FinetuningType.FULL
    """full: the model's own parameters. lora: small matrices beside its linear layers, whose own weights are frozen, so
    that they take 2 bytes of CPU memory each, and no gradient or optimizer state. use_lora is short for the latter."""
    lora_rank: Count = 8
    """Rank of the product that is trained beside a linear layer."""
    lora_alpha: Positive = 16.0
    """Strength of the adapters: their output is multiplied by lora_alpha / lora_rank."""
    lora_dropout: NonNegative = 0.0
    """Only 0: backward computes layers again, and dropout would draw other numbers then."""
    lora_target: str = "all"
    """Linear layers that get an adapter: all within the model's layers, names with commas such as q_proj,v_proj, or a
    regular expression of whole names such as .*self_attn[.](q|v)_proj."""
    use_rslora: bool = False
    """Multiply by lora_alpha / sqrt(lora_rank), which keeps large ranks from learning more slowly."""
    additional_target: str | None = None
    """Parts that are trained in full beside adapters, with commas: embedding, head, norms."""
    freeze: str | None = None
    """Parts that are not trained, though no adapters are, with commas: embedding, head, norms, layers.0-15, layers.3.
    Default: none."""
    adapter_path: str | None = None
    """Folder of an adapter, ours or peft's, to train on. lora_rank, lora_alpha, use_rslora, lora_target and
    additional_target must be given as it has them; a message says which are others. Default: fresh adapters."""
    merge: bool = False
    """Write the model with adapters added to its weights too, to save_dir/merged."""

    @property
    def is_lora(self) -> bool:
        """Whether adapters are trained."""
        return self.finetuning_type is FinetuningType.LORA

    @property
    def scale(self) -> float:
        """Factor of an adapter's product."""
        return self.lora_alpha / (self.lora_rank**0.5 if self.use_rslora else self.lora_rank)

    @property
    def additional_parts(self) -> tuple[str, ...]:
        """Words of `additional_target`."""
        return split_names(self.additional_target)

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        """Words of `freeze`."""
        return split_names(self.freeze)


def split_names(text: str | None) -> tuple[str, ...]:
    """Words between commas, each once."""
    return tuple(dict.fromkeys(filter(None, (word.strip() for word in (text or "").split(",")))))


def parse_layer_range(word: str) -> range | None:
    """The layers that a word such as layers.0-15 names; None where it is another word."""
    match = _LAYERS.fullmatch(word)
    return None if match is None else range(int(match[1]), int(match[2] or match[1]) + 1)
