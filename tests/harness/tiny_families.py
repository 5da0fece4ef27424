"""A tiny configuration with all its features on, for every family of transformers that declares a pipeline plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NUM_LAYERS, WINDOW = 4, 4

FIELDS: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    # biases, norms of queries and keys
    **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "qkv_bias"), True),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm"), True),
    # windows
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    # scalings and caps
    "logit_scale": 0.3,
    "embedding_multiplier": 1.7,
    "logits_scaling": 1.3,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "query_pre_attn_scalar": 5,
    "final_logit_softcapping": 5.0,
    "attn_logit_softcapping": 2.0,
    "mup_enabled": True,
    # projections of low rank, whose values have another width than their keys
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    # experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 3),
    "norm_topk_prob": True,
    **dict.fromkeys(("routed_scaling_factor", "moe_routed_scaling_factor", "route_scale"), 1.7),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
}
"""Values of fields by name; a family gets those that its class declares."""

_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_KINDS = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
_OF_TWO_KINDS = ("cohere2", "cwm", "exaone4", "gemma2", "ministral", "olmo3", "vaultgemma")
_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "qwen2_moe": {"mlp_only_layers": [1]},
    "qwen3_moe": {"decoder_sparse_step": 2},
    **dict.fromkeys(("glm", "glm4", "phi", "gpt_neox"), _PARTIAL),
    **{family: {"layer_types": _KINDS} for family in _OF_TWO_KINDS},
    "gemma3_text": {"layer_types": _KINDS, "attn_logit_softcapping": None},
    "cohere_compass_text": {
        "layer_types": _KINDS,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _KINDS[:2]},
    },
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": _KINDS, "activation_sparsity_pattern": None},
    "minicpm3": {"dim_model_base": 24},
    "helium": {"head_dim": 8},
    "olmo": {"clip_qkv": 0.5},
    "phi3": {"sliding_window": WINDOW, "original_max_position_embeddings": 64},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1], "layer_types": None},
}


def causal_families() -> list[str]:
    """Families of the installed transformers that have a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def planned_families() -> list[str]:
    """Families among these that declare a pipeline plan."""
    return [family for family in causal_families() if getattr(CONFIG_MAPPING[family], "base_model_pp_plan", None)]


def tiny_config(family: str, **more: Any) -> PretrainedConfig:
    """The tiny configuration of `family`, with whatever else is given."""
    kind = CONFIG_MAPPING[family]
    declared = {field.name for field in dataclasses.fields(kind)}
    fields = {name: value for name, value in FIELDS.items() if name in declared}
    if "kv_lora_rank" in declared:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    config = kind(**fields | dict(_OVERRIDES.get(family, {})) | more)
    # Other attention of transformers leaves the cap out.
    config._attn_implementation = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    return config
