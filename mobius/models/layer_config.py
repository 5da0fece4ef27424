"""Facts of a configuration that differ between its layers: the width of heads in Gemma 4, and what mixes tokens.

transformers holds fields that differ in `per_layer_config`, and raises an error if they are read from the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from transformers import PretrainedConfig

GATED_DELTA_NET: Final = {"linear_attention": "linear_attn"}
SHORT_CONVOLUTION: Final = {"conv": "conv"}
MIXERS: Final[dict[str, Mapping[str, str]]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), GATED_DELTA_NET),
    **dict.fromkeys(("lfm2", "lfm2_moe"), SHORT_CONVOLUTION),
}
"""Family -> kind of a layer, as in `layer_types` -> name of the mixer in such a layer."""


def layer_configs(config: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """Return the configuration of each layer; `config` alone if all layers have the same fields."""
    return [*config.per_layer_config] if getattr(config, "is_heterogeneous", False) else [config]


def head_size(config: PretrainedConfig) -> int:
    """Return the width of a query head, which is also that of a key head; of the widest layer if they differ."""
    return max(map(_head_size, layer_configs(config)))


def num_key_heads(config: PretrainedConfig) -> int | None:
    """Return the number of key heads of a layer; None if it is that of query heads.

    If layers differ, the number of heads of `head_size` that are as wide as the widest keys.
    """
    layers = layer_configs(config)
    if len(layers) == 1:
        return getattr(config, "num_key_value_heads", None)
    return -(-max(_key_heads(layer) * _head_size(layer) for layer in layers) // head_size(config))


def _key_heads(layer: PretrainedConfig) -> int:
    return int(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)


def _head_size(layer: PretrainedConfig) -> int:
    if (plain := getattr(layer, "qk_nope_head_dim", None)) is not None:  # queries and keys have two parts
        return int(plain + getattr(layer, "qk_rope_head_dim", 0))
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


def mixers_of(config: Any) -> Mapping[str, str]:
    """Return the kinds of layers with mixers that a configuration has, and the mixers' names."""
    kinds = {*(getattr(config, "layer_types", None) or ())}
    return {kind: name for kind, name in MIXERS.get(config.model_type, {}).items() if kind in kinds}
