"""Families whose rows can be cut into slices, and what is told of others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mobius.models.family_support import checked_families, unsliceable_reason


@pytest.mark.parametrize(
    "family",
    ["gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", "olmo2", "cohere2", "phi3", "glm4", "granite"],
)
def test_causal_attention_in_windows_or_not_can_be_sliced(family: str) -> None:
    assert unsliceable_reason(CONFIG_MAPPING[family]()) is None


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("minimax", {}, "carry a state from token to token.*.linear_attention in layer_types"),
        ("llama", {"layer_types": ["other"]}, "layers of an unknown kind .other in layer_types"),
        ("youtu", {}, "value heads .128. are not as wide as its key heads .192."),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 24}, "only its masks contain its windows"),
    ],
)
def test_other_attention_is_refused_with_its_family_the_reason_and_a_way_out(
    family: str, fields: dict[str, Any], reason: str
) -> None:
    config = CONFIG_MAPPING[family]()
    vars(config).update(fields)  # past the checks of transformers and of ours

    message = unsliceable_reason(config)

    assert message is not None
    assert re.search(f"'{family}'.*{reason}", message), message
    assert "--seq_length" in message
    assert "llama" in message


def test_no_supported_family_has_biases_of_scores_which_attention_of_slices_leaves_out() -> None:
    """Against the sources of transformers as they are installed."""
    folder, word = Path(transformers.__file__).parent / "models", "build_alibi_tensor"
    found = {path.parent.name for path in folder.glob("*/modeling_*.py") if word in path.read_text(encoding="utf-8")}
    assert len(found) >= 3, found
    supported = [family for family in checked_families().supported if family in CONFIG_MAPPING]
    assert [family for family in supported if CONFIG_MAPPING[family].__module__.split(".")[-2] in found] == []
