"""Published shapes by a short name, and models of the hub that have them: a plan needs no files for these."""

from collections.abc import Mapping

LLAMA_SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, tokens, positions
    "1b": (2048, 5504, 20, 16, 16, 32000, 4096),
    "7b": (4096, 11008, 32, 32, 32, 32000, 4096),
    "8b": (4096, 14336, 32, 32, 8, 128256, 131072),
    "13b": (5120, 13824, 40, 40, 40, 32000, 4096),
    "30b": (6656, 17920, 60, 52, 52, 32000, 2048),
    "70b": (8192, 28672, 80, 64, 8, 32000, 4096),
}
"""Llama's published shapes (8b is that of Llama 3.1), and a 1B one of the same kind."""
OTHER_SHAPES: Mapping[str, Mapping[str, str | int | bool]] = {
    "14b": {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
}
"""Shapes of Qwen2.5-14B and of mixtures of experts: fields of their config.json that a plan depends on."""
KNOWN_SHAPES = (*LLAMA_SHAPES, *OTHER_SHAPES)
"""All names."""
SHAPES_ON_HUB = {
    "meta-llama/Llama-2-7b-hf": "7b",
    "meta-llama/Llama-2-13b-hf": "13b",
    "meta-llama/Llama-2-70b-hf": "70b",
    "meta-llama/Llama-3.1-8B": "8b",
    "Qwen/Qwen2.5-14B": "14b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
}
"""Models of the hub that are given only to who asks for access, or take long to fetch, and the shapes they have."""
_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


def known_fields(name: str) -> dict[str, str | int | bool]:
    """The fields of a config.json for the known shape `name`."""
    if name in OTHER_SHAPES:
        return dict(OTHER_SHAPES[name])
    return {"model_type": "llama", **dict(zip(_FIELDS, LLAMA_SHAPES[name], strict=True))}
