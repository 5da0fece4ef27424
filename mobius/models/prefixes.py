"""Prefix tuning (arXiv 2101.00190): each layer has trained keys and values before those of every document.

The data reserve places for virtual tokens, as for prompts (`prompts.py`); a token's position in its document says
whether it is virtual. Layers hand keys and values to their cache, which here replaces those of virtual tokens. So the
prefix passes no rotary embedding or norm, as in peft, and the other tokens see [prefix, document]. Nothing else that
layers compute of virtual tokens is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from mobius.errors import CheckpointError
from mobius.models.layer_config import head_size, layer_configs, num_key_heads

PREFIX: Final = "prefix"
"""Name of a layer's parameter [virtual tokens, 2 * heads of keys * head size]: keys, then values."""
_CACHES: Final = ("cache", "layer_past")
"""Arguments of a layer for the cache of keys and values, by family."""


def key_shape(config: PretrainedConfig) -> tuple[int, int]:
    """Return the number of heads of keys, and their size, of a prefix in peft 0.21.

    Raises CheckpointError if layers differ in them.
    """
    shapes = {
        (num_key_heads(layer) or int(layer.num_attention_heads), head_size(layer)) for layer in layer_configs(config)
    }
    if len(shapes) > 1:
        raise CheckpointError(
            f"--finetuning_type prefix: the keys of the layers of {config.model_type!r} differ in their heads, and a "
            "prefix has the same in all layers. Use --finetuning_type prompt or --use_lora."
        )
    return shapes.pop()


def prefix_width(config: PretrainedConfig) -> int:
    """Return the number of values of a virtual token in all layers."""
    return int(config.num_hidden_layers) * 2 * math.prod(key_shape(config))


def add_prefixes(config: PretrainedConfig, layers: Sequence[nn.Module], whole: Tensor) -> None:
    """Add a prefix to the layers of a model; `whole` [virtual tokens, `prefix_width`] has the values of all layers.

    Raises CheckpointError for a model whose router loss would count virtual tokens.
    """
    if getattr(config, "output_router_logits", False):
        raise CheckpointError(
            "--finetuning_type prefix: 'output_router_logits' is true in the model's config.json, and its router loss "
            "would count virtual tokens, which peft leaves out. Set it to false there."
        )
    for layer, part in zip(layers, whole.chunk(len(layers), 1), strict=True):
        layer.register_parameter(PREFIX, nn.Parameter(part.contiguous()))
        vars(layer)["forward"] = _ForwardWithPrefix(layer, key_shape(config), config.model_type)


class _ForwardWithPrefix:
    """Forward of a layer whose cache puts the layer's prefix before the documents."""

    def __init__(self, layer: nn.Module, shape: tuple[int, int], family: str) -> None:
        self._layer, self._forward, self._shape, self.family = layer, layer.forward, shape, family

    def __call__(self, hidden: Tensor, *given: Any, **arguments: Any) -> Any:
        name = next((each for each in _CACHES if each in arguments), None)
        position_ids = arguments.get("position_ids")
        if name is None or position_ids is None:
            raise _refusal(self.family, "get no cache of keys and values, or no positions")
        cache = _PrefixedCache(self, position_ids, arguments[name])
        output = self._forward(hidden, *given, **{**arguments, name: cache})
        if cache.num_updates != 1:
            raise _refusal(self.family, "have no keys and values, or several")
        return output

    def replaced(self, key: Tensor, value: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, T, D] with the prefix at its positions; `position_ids` are [B or 1, T]."""
        if any((each.shape[1], each.shape[3]) != self._shape for each in (key, value)):
            raise _refusal(self.family, f"have keys and values of other shapes than {self._shape} in a token")
        prefix: Tensor = getattr(self._layer, PREFIX)
        length = len(prefix)
        is_virtual = (position_ids < length)[:, None, :, None]
        rows = F.embedding(position_ids.clamp(max=length - 1), prefix.to(key.dtype))
        keys, values = rows.unflatten(-1, (2, *self._shape)).unbind(2)
        return (
            torch.where(is_virtual, keys.transpose(1, 2), key),
            torch.where(is_virtual, values.transpose(1, 2), value),
        )


class _PrefixedCache:
    """Cache that a layer calls with its keys and values; those go to the cache that it stands for, if any."""

    def __init__(self, layer: _ForwardWithPrefix, position_ids: Tensor, cache: Any) -> None:
        self._layer, self._position_ids, self._cache = layer, position_ids, cache
        self.num_updates = 0

    def __getattr__(self, name: str) -> Any:
        if self._cache is None:
            raise _refusal(self._layer.family, "carry a state from token to token")
        return getattr(self._cache, name)

    def update(self, key: Tensor, value: Tensor, *more: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values to which the layer attends."""
        self.num_updates += 1
        heads = self._layer.replaced(key, value, self._position_ids)
        return heads if self._cache is None else self._cache.update(*heads, *more, **options)


def _refusal(family: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"--finetuning_type prefix: layers of the family {family!r} {reason}, so a prefix would not be peft's. Use "
        "--finetuning_type prompt, or adapters (--use_lora)."
    )
