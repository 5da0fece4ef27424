"""Published model shapes by common names, so that planning needs no files for them.

Values are the fields of each released model's config.json that a plan depends on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

Fields = Mapping[str, str | int | bool]

_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)


def _dense(model_type: str, *values: int | bool, **more: int | bool) -> Fields:
    return {"model_type": model_type, **dict(zip(_NAMES, values, strict=True)), **more}


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
    "Qwen/Qwen2.5-0.5B": _dense("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, True),
    "Qwen/Qwen2.5-1.5B": _dense("qwen2", 1536, 8960, 28, 12, 2, 151936, 131072, True),
    "Qwen/Qwen2.5-3B": _dense("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, True),
    "Qwen/Qwen2.5-7B": _dense("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, False),
    "Qwen/Qwen2.5-14B": _dense("qwen2", 5120, 13824, 48, 40, 8, 152064, 131072, False),
    "Qwen/Qwen2.5-32B": _dense("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072, False),
    "Qwen/Qwen2.5-72B": _dense("qwen2", 8192, 29568, 80, 64, 8, 152064, 131072, False),
    "Qwen/Qwen3-0.6B": _dense("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, True, head_dim=128),
    "Qwen/Qwen3-1.7B": _dense("qwen3", 2048, 6144, 28, 16, 8, 151936, 40960, True, head_dim=128),
    "Qwen/Qwen3-4B": _dense("qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, True, head_dim=128),
    "Qwen/Qwen3-8B": _dense("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, False, head_dim=128),
    "Qwen/Qwen3-14B": _dense("qwen3", 5120, 17408, 40, 40, 8, 151936, 40960, False, head_dim=128),
    "Qwen/Qwen3-32B": _dense("qwen3", 5120, 25600, 64, 64, 8, 151936, 40960, False, head_dim=128),
    "Qwen/Qwen3-30B-A3B": {
        **_dense("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960, False, head_dim=128),
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "mistralai/Mixtral-8x7B-v0.1": {
        **_dense("mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, False),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "a Llama of 20 layers": _dense("llama", 2048, 5504, 20, 16, 16, 32000, 4096, False),
    "LLaMA-30B": _dense("llama", 6656, 17920, 60, 52, 52, 32000, 2048, False),
}
"""Model name -> shape: models of the hub, one shape of our own, and Llama 1 30B."""
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
_VARIANTS = re.compile(r"-(hf|base|instruct|chat|v0\.1)(?=-|$)")
"""Name suffixes that do not change a model's shape."""


@dataclass(frozen=True)
class PublishedShape:
    """The shape of a published model."""

    model: str
    """The model's name on the hub."""
    fields: Fields
    """Fields of its config.json."""
    is_on_hub: bool
    """Whether the given name may be a model on the hub."""

    def describe(self, given: str) -> str:
        """The given name, followed by the model with this shape if that has another name."""
        return given if given.lower() == self.model.lower() else f"{given} (the shape of {self.model})"


def find_published_shape(name: str) -> PublishedShape | None:
    """The shape of `name`, such as `8b`, `Qwen3-8B` or `Qwen/Qwen3-8B`; None if unknown.

    Case does not matter. An owner must be the model's own: other owners may use the name for another shape.
    """
    short = SHORT_NAMES.get(name.lower())
    model = short or _BY_PLAIN_NAME.get(_plain(name))
    if model is None:
        return None
    return PublishedShape(model, PUBLISHED_SHAPES[model], is_on_hub="/" in name)


def _plain(name: str) -> str:
    """The name without case and suffixes that do not change the shape."""
    owner, _, model = name.lower().rpartition("/")
    model = _VARIANTS.sub("", model).removeprefix("meta-").replace("llama3", "llama-3")
    return f"{owner}/{model}" if owner else model


_BY_PLAIN_NAME = {
    plain: model
    for model in PUBLISHED_SHAPES
    if "/" in model
    for plain in (_plain(model), _plain(model).rpartition("/")[2])
}
