"""Families whose rows can be cut into slices, and what is told of others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mobius.models.family_support import unsliceable_reason


@pytest.mark.parametrize(
    "family",
    ["gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", "olmo2", "cohere2", "phi3", "glm4", "granite"],
)
def test_causal_attention_in_windows_or_not_can_be_sliced(family: str) -> None:
    assert unsliceable_reason(CONFIG_MAPPING[family]()) is None


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("llama4_text", {}, "starts again at every chunk .attention_chunk_size.*.chunked_attention in layer_types"),
        ("gpt_oss", {}, "attention sinks"),
        ("bloom", {}, "bias by distance"),
        ("mpt", {}, "bias by distance"),
        ("falcon", {"alibi": True}, "bias by distance"),
        ("falcon", {}, "computes attention itself"),
        ("qwen3_next", {}, "carry a state from token to token.*.linear_attention in layer_types"),
        ("mamba2", {}, "carry a state from token to token"),
        ("recurrent_gemma", {}, "carry a state from token to token"),
        ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "carry a state"),
        ("deepseek_v3", {}, "heads of values .128. are not as wide as those of keys .192."),
        ("gemma3n_text", {}, "layers share keys and values"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "layers share keys and values"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "tokens see later ones"),
        ("bart", {}, "has an encoder"),
        ("musicgen", {}, "has an encoder"),
        ("t5", {}, "has an encoder"),
        ("bert", {}, "tokens see later ones .is_decoder"),
        ("gemma3", {}, "more than a text model"),
        ("diffllama", {}, "difference of two attentions"),
        ("clip_text_model", {}, "no causal language model"),
    ],
)
def test_other_attention_is_refused_with_its_family_the_reason_and_a_way_out(
    family: str, fields: dict[str, Any], reason: str
) -> None:
    try:
        config = CONFIG_MAPPING[family](**fields)
    except StrictDataclassError:
        assert family == "musicgen"
        pytest.skip("the installed transformers has no default configuration of it")
    message = unsliceable_reason(config)
    assert message is not None
    assert re.search(f"'{family}'.*{reason}", message), message
    assert "--seq_length" in message
    assert "llama" in message


@pytest.mark.parametrize("word", ["s_aux=", "build_alibi_tensor"])
def test_no_family_is_missed_whose_code_has_sinks_or_biases(word: str) -> None:
    """Against the sources of transformers as they are installed."""
    folder = Path(transformers.__file__).parent / "models"
    found = {path.parent.name for path in folder.glob("*/modeling_*.py") if word in path.read_text(encoding="utf-8")}
    assert len(found) >= 3, found
    classes = {family: CONFIG_MAPPING[family] for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    affected = [family for family, own in classes.items() if own.__module__.split(".")[-2] in found]
    assert [family for family in affected if unsliceable_reason(classes[family]()) is None] == []
