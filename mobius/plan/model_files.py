"""Reads a model's sizes out of its config.json, without torch and transformers; weights and code are not looked at.

Exact for the dense families that Mobius trains (tests compare with the models themselves).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mobius.errors import PlanError
from mobius.plan.shape import ModelShape

LLAMA_SHAPES = {  # hidden, intermediate, layers, heads, key-value heads
    "1b": (2048, 5504, 20, 16, 16),
    "7b": (4096, 11008, 32, 32, 32),
    "13b": (5120, 13824, 40, 40, 40),
    "30b": (6656, 17920, 60, 52, 52),
    "70b": (8192, 28672, 80, 64, 8),
}
"""Llama's published shapes, and a 1B one of the same kind; all with 32000 tokens."""

_QUERY_BIASES = ("qwen2",)
_HEAD_NORMS = ("qwen3", "gemma3_text")
_NORMS_OF_LAYER = {"gemma3_text": 4}


def llama_fields(name: str) -> dict[str, int]:
    """What the config.json of the known shape `name` says of its sizes."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {**dict(zip(names, LLAMA_SHAPES[name], strict=True)), "vocab_size": 32000}


def shape_of_model(name: str) -> ModelShape:
    """The sizes of a known shape, such as `7b`, or of a config.json or the folder that has it.

    Raises PlanError if there is no such thing or it cannot be read.
    """
    if name in LLAMA_SHAPES:
        return shape_of_config(llama_fields(name))
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        return shape_of_config(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        known = ", ".join(LLAMA_SHAPES)
        raise PlanError(
            f"the model {name!r} is none of {known}, and {path} cannot be read: {error.strerror}."
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"{path} is no configuration of a model: {type(error).__name__} {error}.") from error


def shape_of_config(fields: Mapping[str, Any]) -> ModelShape:
    """The sizes of the model that a config.json describes; raises KeyError where a dimension is missing."""
    family = fields.get("model_type", "llama")
    hidden, intermediate = fields["hidden_size"], fields["intermediate_size"]
    heads, vocab = fields["num_attention_heads"], fields["vocab_size"]
    key_heads = fields.get("num_key_value_heads") or heads
    width = fields.get("head_dim") or hidden // heads
    projected = (heads + 2 * key_heads) * width
    layer = hidden * projected + heads * width * hidden + 3 * hidden * intermediate
    layer += _NORMS_OF_LAYER.get(family, 2) * hidden
    layer += projected if family in _QUERY_BIASES else 0
    layer += 2 * width if family in _HEAD_NORMS else 0
    if fields.get("attention_bias") and family not in _QUERY_BIASES:
        layer += projected + hidden
    is_tied = bool(fields.get("tie_word_embeddings", family == "gemma3_text"))
    return ModelShape(
        embedding_parameters=vocab * hidden,
        layer_parameters=(layer,) * fields["num_hidden_layers"],
        head_parameters=vocab * hidden + hidden,
        hidden_size=hidden,
        intermediate_size=intermediate,
        vocab_size=vocab,
        is_tied=is_tied,
    )
