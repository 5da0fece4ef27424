"""Decides which families support attention in slices: causal attention, with or without windows, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PretrainedConfig

_WHOLE = "Its rows have to be computed whole: choose a --seq_length that fits, or a family without this, such as"
_EXAMPLES = "llama, mistral, qwen3 or gemma3_text"

_SLICEABLE_KINDS = {"full_attention", "sliding_attention"}
_WINDOWS_IN_MASKS = ("qwen2_moe",)
"""Families whose code passes windows to attention in masks only."""
_WITHOUT_TOKENS = {"mlp", "moe"}
"""Kinds of layers without interaction between tokens."""
_STATE = "layers that carry a state from token to token, which would have to be handed on and differentiated, too"
_KINDS: Mapping[str, str] = {
    "chunked_attention": "attention that begins anew at every chunk (attention_chunk_size), which no window is",
    **dict.fromkeys(("linear_attention", "mamba", "recurrent", "conv", "hybrid", "hybrid_sliding"), _STATE),
    **dict.fromkeys(
        ("indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
        "attention to keys that are chosen by a search or compressed over the whole row",
    ),
}
_SINKS = "attention sinks, learned scores without a key that take a share of every softmax, with gradients of their own"
_BIAS = "scores with a bias by distance (alibi), which the kernels do not add"
_FAMILIES: Mapping[str, str] = {
    **dict.fromkeys(
        ("gpt_oss", "granite_swa", "granitemoe_swa", "flint", "hy_v4", "mimo_v2_flash", "openai_privacy_filter"), _SINKS
    ),
    **dict.fromkeys(("bloom", "mpt"), _BIAS),
    "doge": "a mask that is computed from its values and added to the scores",
    "diffllama": "the difference of two attentions, whose values are wider than their keys",
    **dict.fromkeys(("rwkv", "xlstm", "mamba", "mamba2", "falcon_mamba", "falcon_h1", "bamba", "jamba"), _STATE),
    "recurrent_gemma": _STATE,  # transformers 5.17 names no kinds of its layers
}


def unsliceable_reason(config: PretrainedConfig) -> str | None:
    """None if all layers support slices; else a message with the family, the reason and an alternative.

    Cases that neither the configuration nor these tables show are found when a layer is split at its attention.
    """
    if reason := _reason(config):
        return f"rows of the family {config.model_type!r} cannot be cut into slices: {reason}. {_WHOLE} {_EXAMPLES}."
    return None


def unpackable_reason(config: PretrainedConfig) -> str | None:
    """None if all layers can separate the documents of a row; else a message with the reason and an alternative.

    Only attention separates documents, and it must be of a kind that supports slices.
    """
    if reason := _reason(config):
        return (
            f"rows of the family {config.model_type!r} cannot hold several samples: {reason}. Use --packing off, or "
            "joined for plain text"
        )
    return None


def _reason(config: PretrainedConfig) -> str | None:
    reasons: tuple[Callable[[Any], str | None], ...] = (_of_family, _of_kinds, _of_fields, _of_code)
    return next((reason for find in reasons if (reason := find(config))), None)


def _of_family(config: Any) -> str | None:
    found = _FAMILIES.get(config.model_type)
    return f"it has {found}" if found else None


def _of_kinds(config: Any) -> str | None:
    """Reason from the list of layer kinds that newer families have."""
    for kind in sorted(set(getattr(config, "layer_types", None) or ()) - _SLICEABLE_KINDS - _WITHOUT_TOKENS):
        return f"it has {_KINDS.get(kind, 'layers of a kind that is not known here')} ({kind} in layer_types)"
    return None


def _of_fields(config: Any) -> str | None:
    """Reason from other fields of the configuration."""
    is_windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    width = (getattr(config, "qk_nope_head_dim", None) or 0) + (getattr(config, "qk_rope_head_dim", None) or 0)
    values = getattr(config, "v_head_dim", None)
    found = {
        f"it has {_BIAS}": getattr(config, "alibi", False),
        "its tokens see later ones (use_bidirectional_attention)": getattr(
            config, "use_bidirectional_attention", False
        ),
        "its windows are in its masks alone (sliding_attention in layer_types), which attention here does not read": (
            is_windowed and config.model_type in _WINDOWS_IN_MASKS
        ),
        "it has an encoder, whose tokens see later ones (is_encoder_decoder)": config.is_encoder_decoder,
        "its tokens see later ones (is_decoder is false)": getattr(config, "is_decoder", None) is False,
        "it is more than a text model": config.get_text_config(decoder=True) is not config,
        "its layers share keys and values (num_kv_shared_layers), so gradients of other layers belong to them, too": (
            getattr(config, "num_kv_shared_layers", 0)
        ),
        f"its heads of values ({values}) are not as wide as those of keys ({width}), which no kernel here takes": (
            width and values and width != values
        ),
    }
    return next((reason for reason, holds in found.items() if holds), None)


def _of_code(config: Any) -> str | None:
    """Reason from the family's code: attention must go through transformers' attention interface."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no causal language model of it"
    if not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_attention_backend:
        return "its code computes attention itself instead of by transformers' attention interface"
    return None
