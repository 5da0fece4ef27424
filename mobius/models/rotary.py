"""Rotary factors that depend on a document's length: which lengths have equal factors.

rope_type    factors of a document of n tokens
longrope     short factors up to original_max_position_embeddings, long factors beyond
dynamic      equal factors up to max_position_embeddings; beyond, each length has its own
others       equal factors at every length
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mobius.models.structure import with_replaced_children


@dataclass(frozen=True)
class RotaryLengths:
    """Lengths of documents at which the factors change."""

    bounds: tuple[int, ...]
    """Ascending: lengths above one bound, and up to the next bound, have equal factors."""
    has_own_beyond: bool = False
    """Whether each length beyond the last bound has its own factors; otherwise these lengths share factors."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> RotaryLengths | None:
        """The lengths of a model; None if its factors do not depend on a length."""
        longest, bounds, has_own = int(getattr(config, "max_position_embeddings", 0)), set[int](), False
        for own in rope_parameters(config):
            if own["rope_type"] == "longrope":
                bounds.add(int(own["original_max_position_embeddings"]))
            elif "dynamic" in own["rope_type"]:
                bounds.add(longest)
                has_own = True
        return cls(tuple(sorted(bounds)), has_own) if bounds else None

    def longest_alike(self, length: int, most: int) -> int:
        """Longest length up to `most` with the same factors as `length`, which is at most `most`."""
        longest = next((bound for bound in self.bounds if length <= bound), length if self.has_own_beyond else most)
        return min(longest, most)


def rope_parameters(config: PretrainedConfig) -> list[Mapping[str, Any]]:
    """Rotary parameters of a model, which are one object for all layers, or one per layer kind."""
    whole = getattr(config, "rope_parameters", None) or {}
    return [own for own in (whole, *whole.values()) if isinstance(own, dict) and "rope_type" in own]


def with_new_rotary(base: nn.Module, config: PretrainedConfig) -> nn.Module:
    """Copy of a base model that shares everything except modules that hold only constants.

    Factors of dynamic types are such constants: they stay those of the longest document that the module has seen.
    """
    constant = {
        name: copy.deepcopy(child, {id(config): config})
        for name, child in base.named_children()
        if any(True for _ in child.buffers()) and not any(True for _ in child.parameters())
    }
    return with_replaced_children(base, constant)
