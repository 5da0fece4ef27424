"""Rotary factors that depend on a document's length: which lengths have the same factors.

rope_type    factors of a document of n tokens
longrope     short factors up to original_max_position_embeddings, long factors beyond
dynamic      the same factors up to max_position_embeddings, different factors for each length beyond
others       the same factors at every length
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
    """Document lengths at which the factors change."""

    bounds: tuple[int, ...]
    """Ascending; lengths above one bound, up to and including the next bound, have the same factors."""
    has_own_beyond: bool = False
    """Whether each length beyond the last bound has different factors; else these lengths have the same factors."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> RotaryLengths | None:
        """Return the lengths for a model; None if its factors do not depend on a document's length."""
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
    """Rotary parameters of a model: one object for all layers, or one object per layer kind."""
    whole = getattr(config, "rope_parameters", None) or {}
    return [own for own in (whole, *whole.values()) if isinstance(own, dict) and "rope_type" in own]


def with_new_rotary(base: nn.Module, config: PretrainedConfig) -> nn.Module:
    """Copy `base`: modules that hold only constants are copied, and all other modules are shared.

    Rotary factors are such constants. A module of a dynamic type keeps the factors of the longest document so far.
    """
    constant = {
        name: copy.deepcopy(child, {id(config): config})
        for name, child in base.named_children()
        if any(True for _ in child.buffers()) and not any(True for _ in child.parameters())
    }
    return with_replaced_children(base, constant)
