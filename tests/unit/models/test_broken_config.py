"""A config.json that is broken or describes no model is told in one message that names file, field and value."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.pipelines import CPU, FAMILIES

from mobius.config.config import ModelConfig
from mobius.errors import CheckpointError
from mobius.models.blocks import ModelParts
from mobius.models.families import load_model_config


def build(folder: Path, text: str | bytes) -> ModelParts:
    """What a run and a dry run do with a config.json."""
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return ModelParts(load_model_config(folder, replace(ModelConfig(), model_path=str(folder))), CPU)


def fields_of(family: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(FAMILIES[family](num_hidden_layers=2).to_json_string())
    return fields


def refusal(folder: Path, text: str | bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        build(folder, text)
    message = str(caught.value)
    assert str(folder / "config.json") in message
    return message


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"", "empty"),
        (b"{", "no JSON"),
        (b"[]", "no JSON object"),
        (b"null", "no JSON object"),
        (b'{"model_type": "llama", "rms_norm_eps": NaN}', "NaN"),
        (b'{"model_type": "llama", "rope_theta": 1e999}', "rope_theta"),
        (b'{"model_type": "ll\xff"}', "UTF-8"),
        (b"{}", "model_type"),
        (b'{"model_type": 3}', "'model_type'"),
        (b'{"model_type": "no-such-family"}', "'no-such-family'"),
    ],
)
def test_a_file_that_is_no_configuration_says_why(tmp_path: Path, text: bytes, complaint: str) -> None:
    assert complaint in refusal(tmp_path, text)


WRONG_VALUES: list[tuple[str, Any]] = [
    ("hidden_size", -32),
    ("hidden_size", 0),
    ("hidden_size", "32"),
    ("hidden_size", True),
    ("hidden_size", None),
    ("hidden_size", [32]),
    ("hidden_size", 10**12),
    ("intermediate_size", -1),
    ("intermediate_size", 1.5),
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 0),
    ("num_attention_heads", 0),
    ("num_key_value_heads", -2),
    ("head_dim", 10**12),
    ("vocab_size", 0),
    ("vocab_size", 10**18),
    ("pad_token_id", 96),
    ("pad_token_id", "0"),
    ("rms_norm_eps", "1e-6"),
    ("rms_norm_eps", -1.0),
    ("initializer_range", -0.02),
    ("tie_word_embeddings", "false"),
    ("tie_word_embeddings", 1),
    ("rope_theta", 0),
    ("rope_theta", "10000"),
    ("rope_parameters", {"rope_type": "no-such-type", "rope_theta": 1e4}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": -1}),
    ("rope_parameters", "default"),
    ("rope_scaling", {"type": "linear", "factor": 0}),
    ("rope_scaling", {"type": "linear", "factor": "2"}),
    ("rope_scaling", {"type": "yarn", "factor": 2.0, "beta_fast": []}),
]


@pytest.mark.parametrize(("field", "value"), WRONG_VALUES, ids=[f"{field}={value}" for field, value in WRONG_VALUES])
def test_a_wrong_value_is_named_with_its_field(tmp_path: Path, field: str, value: Any) -> None:
    fields = fields_of("llama")
    if field in ("rope_theta", "rope_scaling"):
        del fields["rope_parameters"]
    start = time.perf_counter()

    message = refusal(tmp_path, json.dumps(fields | {field: value}))

    assert f"'{field}" in message
    assert len(message.splitlines()) == 1, message
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        ("llama", {"hidden_act": ""}, r"'hidden_act'"),
        ("llama", {"hidden_act": "no-such"}, r"'hidden_act'"),
        ("gemma3", {"hidden_activation": "no-such"}, r"'hidden_activation'"),
        ("llama", {"num_attention_heads": 5, "head_dim": None}, r"hidden size"),
        ("llama", {"num_key_value_heads": 3}, r"'num_key_value_heads'"),
        ("qwen2", {"layer_types": ["full_attention"]}, r"'layer_types'"),
        ("qwen3", {"layer_types": ["full_attention", "conv"]}, r"'layer_types'"),
        ("qwen3", {"layer_types": "full_attention"}, r"'layer_types'"),
        ("gemma3", {"sliding_window": -4}, r"'sliding_window'"),
        ("gemma3", {"query_pre_attn_scalar": 0}, r"'query_pre_attn_scalar'"),
        ("gemma3", {"use_bidirectional_attention": True}, r"'use_bidirectional_attention'"),
        ("gemma3", {"rope_parameters": {"sliding_attention": 3, "full_attention": 4}}, r"'rope_parameters"),
        ("mistral", {"dtype": "no-such-dtype"}, r"no-such-dtype"),
        ("mistral", {"head_dim": 0}, r"'head_dim'"),
        ("llama", {"base_model_pp_plan": 7}, r""),
        ("llama", {"base_model_pp_plan": 7, "_name_or_path": "some/other-model"}, r""),
        ("llama", {"_attn_implementation": 7, "per_layer_config": [1]}, r""),
    ],
)
def test_values_that_disagree_are_told_too(
    tmp_path: Path, family: str, changes: dict[str, Any], complaint: str
) -> None:
    assert complaint in refusal(tmp_path, json.dumps(fields_of(family) | changes))


def test_all_wrong_values_are_told_together(tmp_path: Path) -> None:
    message = refusal(tmp_path, json.dumps(fields_of("llama") | {"hidden_size": -1, "rms_norm_eps": "small"}))

    assert "'hidden_size'" in message
    assert "'rms_norm_eps'" in message


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_published_checkpoints_leave_out_or_leave_empty_is_accepted(tmp_path: Path, family: str) -> None:
    fields = fields_of(family) | {"rope_scaling": None, "pad_token_id": None, "torch_dtype": "float16", "own": {"a": 1}}
    fields.pop("dtype", None)
    del fields["rope_parameters"]

    assert len(build(tmp_path, json.dumps(fields | {"rope_theta": 10000})).layers) == 2


@pytest.mark.parametrize("pad_token_id", [-1, 95])
def test_a_padding_token_may_be_counted_from_the_end(tmp_path: Path, pad_token_id: int) -> None:
    assert len(build(tmp_path, json.dumps(fields_of("llama") | {"pad_token_id": pad_token_id})).layers) == 2


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_a_quantized_model_is_refused_with_its_method_and_the_way_out(tmp_path: Path, field: str) -> None:
    message = refusal(tmp_path, json.dumps(fields_of("llama") | {field: {"quant_method": "fp8"}}))

    assert f"'{field}'" in message
    assert "fp8" in message
    assert "unquantized" in message
    assert build(tmp_path, json.dumps(fields_of("llama") | {field: None})).layers


def test_custom_code_is_refused_and_not_run(tmp_path: Path) -> None:
    fields = fields_of("llama") | {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('custom code was run')")

    message = refusal(tmp_path, json.dumps(fields))

    assert "'auto_map'" in message
    assert "modeling_own.Own" in message


def test_custom_code_of_another_family_is_not_asked_for(tmp_path: Path) -> None:
    fields = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}}

    assert '"own"' in refusal(tmp_path, json.dumps(fields))
