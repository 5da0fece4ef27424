"""Shapes of published models by common names: a plan for such a model needs no files.

A shape has those fields of the released model's config.json on which a plan depends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Fields = Mapping[str, Any]

_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)


def _dense(model_type: str, *values: int | bool, **more: float | None) -> Fields:
    return {"model_type": model_type, **dict(zip(_NAMES, values, strict=True)), **more}


_A3B: Fields = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
_GEMMA_4: Fields = {
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
}

PUBLISHED_SHAPES: Mapping[str, Fields] = {
    "meta-llama/Llama-2-7b-hf": _dense("llama", 4096, 11008, 32, 32, 32, 32000, 4096, False),
    "meta-llama/Llama-2-13b-hf": _dense("llama", 5120, 13824, 40, 40, 40, 32000, 4096, False),
    "meta-llama/Llama-2-70b-hf": _dense("llama", 8192, 28672, 80, 64, 8, 32000, 4096, False),
    "meta-llama/Meta-Llama-3-8B": _dense("llama", 4096, 14336, 32, 32, 8, 128256, 8192, False),
    "meta-llama/Meta-Llama-3-70B": _dense("llama", 8192, 28672, 80, 64, 8, 128256, 8192, False),
    "meta-llama/Llama-3.1-8B": _dense("llama", 4096, 14336, 32, 32, 8, 128256, 131072, False),
    "meta-llama/Llama-3.1-70B": _dense("llama", 8192, 28672, 80, 64, 8, 128256, 131072, False),
    "meta-llama/Llama-3.2-1B": _dense("llama", 2048, 8192, 16, 32, 8, 128256, 131072, True, head_dim=64),
    "meta-llama/Llama-3.2-3B": _dense("llama", 3072, 8192, 28, 24, 8, 128256, 131072, True, head_dim=128),
    "meta-llama/Llama-3.3-70B-Instruct": _dense("llama", 8192, 28672, 80, 64, 8, 128256, 131072, False),
    "codellama/CodeLlama-7b-hf": _dense("llama", 4096, 11008, 32, 32, 32, 32016, 16384, False),
    "codellama/CodeLlama-13b-hf": _dense("llama", 5120, 13824, 40, 40, 40, 32016, 16384, False),
    "codellama/CodeLlama-34b-hf": _dense("llama", 8192, 22016, 48, 64, 8, 32000, 16384, False),
    "openlm-research/open_llama_3b_v2": _dense("llama", 3200, 8640, 26, 32, 32, 32000, 2048, False),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _dense("llama", 2048, 5632, 22, 32, 4, 32000, 2048, False),
    "TinyLlama/TinyLlama_v1.1": _dense("llama", 2048, 5632, 22, 32, 4, 32000, 2048, False),
    "HuggingFaceTB/SmolLM-135M": _dense("llama", 576, 1536, 30, 9, 3, 49152, 2048, True),
    "HuggingFaceTB/SmolLM-360M": _dense("llama", 960, 2560, 32, 15, 5, 49152, 2048, True),
    "HuggingFaceTB/SmolLM-1.7B": _dense("llama", 2048, 8192, 24, 32, 32, 49152, 2048, True),
    "HuggingFaceTB/SmolLM2-135M": _dense("llama", 576, 1536, 30, 9, 3, 49152, 8192, True),
    "HuggingFaceTB/SmolLM2-360M": _dense("llama", 960, 2560, 32, 15, 5, 49152, 8192, True),
    "HuggingFaceTB/SmolLM2-1.7B": _dense("llama", 2048, 8192, 24, 32, 32, 49152, 8192, True),
    "HuggingFaceTB/SmolLM3-3B": _dense("smollm3", 2048, 11008, 36, 16, 4, 128256, 65536, True),
    "mistralai/Mistral-7B-v0.1": _dense("mistral", 4096, 14336, 32, 32, 8, 32000, 32768, False, sliding_window=4096),
    "mistralai/Mistral-7B-v0.3": _dense("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, False, sliding_window=None),
    "google/gemma-2b": _dense("gemma", 2048, 16384, 18, 8, 1, 256000, 8192, True, head_dim=256),
    "google/gemma-7b": _dense("gemma", 3072, 24576, 28, 16, 16, 256000, 8192, True, head_dim=256),
    "google/gemma-2-2b": _dense("gemma2", 2304, 9216, 26, 8, 4, 256000, 8192, True, head_dim=256),
    "google/gemma-2-9b": _dense("gemma2", 3584, 14336, 42, 16, 8, 256000, 8192, True, head_dim=256),
    "google/gemma-3-1b-pt": _dense("gemma3_text", 1152, 6912, 26, 4, 1, 262144, 32768, True, head_dim=256),
    "google/gemma-4-31B": {
        **_dense("gemma4_text", 5376, 21504, 60, 32, 16, 262144, 262144, True, num_global_key_value_heads=4),
        **_GEMMA_4,
    },
    "google/gemma-4-26B-A4B": {
        **_dense("gemma4_text", 2816, 2112, 30, 16, 8, 262144, 262144, True, num_global_key_value_heads=2),
        **_GEMMA_4,
        "enable_moe_block": True,
        "moe_intermediate_size": 704,
        "num_experts": 128,
        "top_k_experts": 8,
    },
    "microsoft/phi-1_5": _dense("phi", 2048, 8192, 24, 32, 32, 51200, 2048, False),
    "microsoft/phi-2": _dense("phi", 2560, 10240, 32, 32, 32, 51200, 2048, False, partial_rotary_factor=0.4),
    "microsoft/Phi-3-mini-4k-instruct": _dense("phi3", 3072, 8192, 32, 32, 32, 32064, 4096, False, sliding_window=2047),
    "microsoft/Phi-3.5-mini-instruct": _dense("phi3", 3072, 8192, 32, 32, 32, 32064, 131072, False),
    "microsoft/phi-4": _dense("phi3", 5120, 17920, 40, 40, 10, 100352, 16384, False),
    "bigcode/starcoder2-3b": _dense("starcoder2", 3072, 12288, 30, 24, 2, 49152, 16384, True, sliding_window=4096),
    "bigcode/starcoder2-15b": _dense("starcoder2", 6144, 24576, 40, 48, 4, 49152, 16384, False, sliding_window=4096),
    "swiss-ai/Apertus-8B-Instruct-2509": _dense("apertus", 4096, 21504, 32, 32, 8, 131072, 65536, False),
    "allenai/Olmo-3-7B-Instruct": _dense("olmo3", 4096, 11008, 32, 32, 32, 100278, 65536, False),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": _dense(
        "seed_oss", 5120, 27648, 64, 80, 8, 155136, 524288, False, head_dim=128
    ),
    "EleutherAI/pythia-1.4b": _dense("gpt_neox", 2048, 8192, 24, 16, 16, 50304, 2048, False),
    "EleutherAI/pythia-12b": _dense("gpt_neox", 5120, 20480, 36, 40, 40, 50688, 2048, False),
    "Qwen/Qwen2-0.5B": _dense("qwen2", 896, 4864, 24, 14, 2, 151936, 131072, True),
    "Qwen/Qwen2-1.5B": _dense("qwen2", 1536, 8960, 28, 12, 2, 151936, 131072, True),
    "Qwen/Qwen2-7B": _dense("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, False),
    "Qwen/Qwen2.5-0.5B": _dense("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, True),
    "Qwen/Qwen2.5-1.5B": _dense("qwen2", 1536, 8960, 28, 12, 2, 151936, 131072, True),
    "Qwen/Qwen2.5-3B": _dense("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, True),
    "Qwen/Qwen2.5-7B": _dense("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, False),
    "Qwen/Qwen2.5-14B": _dense("qwen2", 5120, 13824, 48, 40, 8, 152064, 131072, False),
    "agentica-org/DeepCoder-14B-Preview": _dense("qwen2", 5120, 13824, 48, 40, 8, 152064, 131072, False),
    "Qwen/Qwen2.5-32B": _dense("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072, False),
    "Qwen/Qwen2.5-72B": _dense("qwen2", 8192, 29568, 80, 64, 8, 152064, 131072, False),
    "Qwen/Qwen3-0.6B": _dense("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, True, head_dim=128),
    "Qwen/Qwen3-1.7B": _dense("qwen3", 2048, 6144, 28, 16, 8, 151936, 40960, True, head_dim=128),
    "Qwen/Qwen3-4B": _dense("qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, True, head_dim=128),
    "Qwen/Qwen3-4B-Instruct-2507": _dense("qwen3", 2560, 9728, 36, 32, 8, 151936, 262144, True, head_dim=128),
    "Qwen/Qwen3-8B": _dense("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, False, head_dim=128),
    "Qwen/Qwen3-14B": _dense("qwen3", 5120, 17408, 40, 40, 8, 151936, 40960, False, head_dim=128),
    "Qwen/Qwen3-32B": _dense("qwen3", 5120, 25600, 64, 64, 8, 151936, 40960, False, head_dim=128),
    "Qwen/Qwen3-30B-A3B": {**_dense("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960, False, head_dim=128), **_A3B},
    "Qwen/Qwen3-30B-A3B-Instruct-2507": {
        **_dense("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 262144, False, head_dim=128),
        **_A3B,
    },
    "mistralai/Mixtral-8x7B-v0.1": {
        **_dense("mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, False),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mistralai/Mixtral-8x22B-v0.1": {
        **_dense("mixtral", 6144, 16384, 56, 48, 8, 32000, 65536, False),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "openai/gpt-oss-20b": {
        **_dense("gpt_oss", 2880, 2880, 24, 64, 8, 201088, 131072, False, head_dim=64, sliding_window=128),
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
    "openai/gpt-oss-120b": {
        **_dense("gpt_oss", 2880, 2880, 36, 64, 8, 201088, 131072, False, head_dim=64, sliding_window=128),
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    "Qwen/Qwen1.5-MoE-A2.7B": {
        **_dense("qwen2_moe", 2048, 5632, 24, 16, 16, 151936, 8192, False, moe_intermediate_size=1408),
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
    "deepseek-ai/DeepSeek-V2-Lite": {
        **_dense("deepseek_v2", 2048, 10944, 27, 16, 16, 102400, 163840, False, moe_intermediate_size=1408),
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    "a Llama of 20 layers": _dense("llama", 2048, 5504, 20, 16, 16, 32000, 4096, False),
    "LLaMA-30B": _dense("llama", 6656, 17920, 60, 52, 52, 32000, 2048, False),
}
"""Model name -> shape: models of the hub, one shape that is not published, and Llama 1 30B."""
SHORT_NAMES: Mapping[str, str] = {
    "0.5b": "Qwen/Qwen2.5-0.5B",
    "0.6b": "Qwen/Qwen3-0.6B",
    "1b": "a Llama of 20 layers",
    "1.5b": "Qwen/Qwen2.5-1.5B",
    "1.7b": "Qwen/Qwen3-1.7B",
    "3b": "meta-llama/Llama-3.2-3B",
    "4b": "Qwen/Qwen3-4B",
    "7b": "meta-llama/Llama-2-7b-hf",
    "8b": "meta-llama/Llama-3.1-8B",
    "13b": "meta-llama/Llama-2-13b-hf",
    "14b": "Qwen/Qwen2.5-14B",
    "30b": "LLaMA-30B",
    "32b": "Qwen/Qwen2.5-32B",
    "70b": "meta-llama/Llama-2-70b-hf",
    "72b": "Qwen/Qwen2.5-72B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
}
"""Short name -> model with this shape."""
_VARIANTS = re.compile(r"-(hf|base|instruct|chat|thinking|sft|it|pt|deduped|v0\.1|v1\.0)(?=-|$)")
"""Name suffixes that do not change a model's shape."""
_MIRRORS = {"nousresearch": "meta-llama"}
"""Owner of copies with unchanged model names -> owner of the original models."""


@dataclass(frozen=True)
class PublishedShape:
    """The shape of a published model."""

    model: str
    """The model's name on the hub."""
    fields: Fields
    """Fields of the model's config.json."""
    is_on_hub: bool
    """Whether the given name may be a model on the hub."""

    def describe(self, given: str) -> str:
        """Return `given`, followed by the model with this shape if its name differs."""
        return given if given.lower() == self.model.lower() else f"{given} (the shape of {self.model})"


def find_published_shape(name: str) -> PublishedShape | None:
    """Return the shape of a model by `name`, such as `8b`, `Qwen3-8B` or `Qwen/Qwen3-8B`; None if unknown.

    Case does not matter. If `name` has an owner, it must be the model's: other owners may use the name differently.
    """
    short = SHORT_NAMES.get(name.lower())
    model = short or _BY_PLAIN_NAME.get(_plain(name))
    if model is None:
        return None
    return PublishedShape(model, PUBLISHED_SHAPES[model], is_on_hub="/" in name)


def _plain(name: str) -> str:
    """Convert `name` to lower case, without suffixes that do not change the shape."""
    owner, _, model = name.lower().rpartition("/")
    model = _VARIANTS.sub("", model).removeprefix("meta-").replace("llama3", "llama-3")
    return f"{_MIRRORS.get(owner, owner)}/{model}" if owner else model


_BY_PLAIN_NAME = {
    plain: model
    for model in PUBLISHED_SHAPES
    if "/" in model
    for plain in (_plain(model), _plain(model).rpartition("/")[2])
}
