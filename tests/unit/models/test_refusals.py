"""A folder that is no model which can be trained is refused in one message, which names file or option, and value."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from harness.pipelines import CPU, FAMILIES
from safetensors.torch import save_file

from mobius.config.config import ModelConfig
from mobius.errors import CheckpointError, ConfigError
from mobius.models.blocks import ModelParts
from mobius.models.families import load_model_config
from mobius.models.family_support import checked_families

OWN_VERSION = pytest.mark.skipif(
    transformers.__version__ != checked_families().transformers, reason="another transformers was checked"
)


def build(folder: Path, content: bytes | dict[str, Any], **options: int) -> ModelParts:
    """What a run and a dry run do with a config.json."""
    (folder / "config.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    config = replace(ModelConfig(), model_path=str(folder), **options)  # type: ignore[arg-type]
    return ModelParts(load_model_config(folder, config), CPU)


def fields_of(family: str, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(FAMILIES[family](num_hidden_layers=2).to_json_string())
    if changes.keys() & {"rope_theta", "rope_scaling"}:
        del fields["rope_parameters"]
    return fields | changes


def refusal(folder: Path, content: bytes | dict[str, Any], **options: int) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        build(folder, content, **options)
    return str(caught.value)


NO_CONFIGURATION = [
    (b"", "empty"),
    (b"{", "no JSON"),
    (b"[]", "must hold a JSON object"),
    (b"null", "must hold a JSON object"),
    (b'{"model_type": "llama", "rms_norm_eps": NaN}', "NaN"),
    (b'{"model_type": "llama", "rope_theta": 1e999}', "rope_theta"),
    (b'{"model_type": "ll\xff"}', "UTF-8"),
    (b"{}", "model_type"),
    (b'{"model_type": 3}', "'model_type'"),
    (b'{"model_type": "no-such-family"}', "'no-such-family'"),
    (b'{"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}}', '"own"'),
]
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
"""Of a Llama; a message has the name of the field."""
WRONG_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": ""}, "'hidden_act'"),
    ("llama", {"hidden_act": "no-such"}, "'hidden_act'"),
    ("gemma3", {"hidden_activation": "no-such"}, "'hidden_activation'"),
    ("llama", {"num_attention_heads": 5, "head_dim": None}, "hidden size"),
    ("llama", {"num_key_value_heads": 3}, "'num_key_value_heads'"),
    ("qwen2", {"layer_types": ["full_attention"]}, "'layer_types'"),
    ("qwen3", {"layer_types": ["full_attention", "conv"]}, "'layer_types'"),
    ("qwen3", {"layer_types": "full_attention"}, "'layer_types'"),
    ("gemma3", {"sliding_window": -4}, "'sliding_window'"),
    ("gemma3", {"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar'"),
    ("gemma3", {"use_bidirectional_attention": True}, "'use_bidirectional_attention'"),
    ("gemma3", {"rope_parameters": {"sliding_attention": 3, "full_attention": 4}}, "'rope_parameters"),
    ("mistral", {"dtype": "no-such-dtype"}, "no-such-dtype"),
    ("mistral", {"head_dim": 0}, "'head_dim'"),
    ("llama", {"base_model_pp_plan": 7}, "describes no model that can be built"),
    ("llama", {"base_model_pp_plan": 7, "_name_or_path": "some/other-model"}, "describes no model that can be built"),
    ("llama", {"_attn_implementation": 7, "per_layer_config": [1]}, ""),
    ("llama", {"hidden_size": -1, "rms_norm_eps": "small"}, "'hidden_size'"),
    ("llama", {"hidden_size": -1, "rms_norm_eps": "small"}, "'rms_norm_eps'"),
    *(
        ("llama", {name: {"quant_method": "hqq"}}, told)
        for name in ("quantization_config", "compression_config")
        for told in (f"'{name}'", "hqq", "unquantized")
    ),
]
OTHER_MODELS: list[tuple[dict[str, Any], str]] = [
    *(
        ({"model_type": family}, f"of the family '{family}', which is not supported: {reason}")
        for family, reason in (
            ("longcat_flash", "it has experts that are not held in one tensor per matrix"),
            ("gpt2", "it has learned positions"),
            ("mamba", "it has layers that carry a state from token to token"),
            ("bart", "it has an encoder"),
            ("clip", "it was not compared with transformers"),
        )
    ),
    ({"model_type": "bart"}, f"Supported: {checked_families().names}."),
]
SHARES_KEYS = {"hidden_size_per_layer_input": 0, "num_hidden_layers": 12, "num_kv_shared_layers": 2}
TEXT_PARTS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mistral3", "text_config": {"model_type": "clip_text_model"}}, '"clip_text_model", which is no'),
    ({"model_type": "llava", "text_config": {"model_type": "jetmoe"}}, "'jetmoe', which is not supported: it"),
    ({"model_type": "cohere2_vision"}, "its text part does not give what transformers gives"),
    ({"model_type": "gemma3", "text_config": {"hidden_size": "x"}}, "is refused by transformers"),
    ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 0}}, "'num_hidden_layers' is 0"),
    ({"model_type": "gemma3", "quantization_config": {"quant_method": "hqq"}}, "a quantized model"),
    ({"model_type": "gemma4"}, "'hidden_size_per_layer_input' is 256: each layer also reads an input of its own"),
    ({"model_type": "gemma4", "text_config": SHARES_KEYS}, "'num_kv_shared_layers' is 2: its last layers read keys"),
    ({"model_type": "gemma4", "text_config": SHARES_KEYS | {"use_bidirectional_attention": "all"}}, "only causal"),
]
CASES = [
    *((content, told) for content, told in NO_CONFIGURATION),
    *((fields_of("llama", **{name: value}), f"'{name}") for name, value in WRONG_VALUES),
    *((fields_of(family, **changes), told) for family, changes, told in WRONG_FIELDS),
    *OTHER_MODELS,
    *(pytest.param(*row, marks=OWN_VERSION) for row in TEXT_PARTS),
]


@pytest.mark.parametrize(("content", "told"), CASES, ids=lambda value: str(value)[-60:])
def test_a_configuration_that_cannot_be_trained_is_refused(
    tmp_path: Path, content: bytes | dict[str, Any], told: str
) -> None:
    start = time.perf_counter()

    message = refusal(tmp_path, content)

    assert told in message
    assert str(tmp_path / "config.json") in message
    assert ("--model_path" in message) == ("can be built" not in message)
    assert len(message.splitlines()) == 1, message
    assert time.perf_counter() - start < 5


SHAPES = ("embedding_dim", "ff_dim", "num_heads", "num_layers")


@pytest.mark.parametrize(
    ("has_weights", "options", "told"),
    [
        (True, {"num_layers": 13}, "--num_layers 13 is more than the 12 layers"),
        (False, {"num_heads": 5}, "--num_heads 5 .*2 key-value heads"),
        (False, {"embedding_dim": 34}, "--embedding_dim 34 .*4 attention heads"),
        (False, {"embedding_dim": 12}, "--embedding_dim 12 .*4 attention heads"),  # 3 per head: rotary turns pairs
        *((False, {name: 10**9}, f"--{name} 1000000000 .* from 1 to") for name in SHAPES),
    ],
)
def test_a_shape_that_cannot_be_is_refused_before_it_is_built(
    tmp_path: Path, has_weights: bool, options: dict[str, int], told: str
) -> None:
    if has_weights:
        save_file({}, tmp_path / "model.safetensors")
    assert re.search(told, refusal(tmp_path, json.loads(FAMILIES["llama"]().to_json_string()), **options))


def test_pickled_weights_are_refused_with_the_command_that_converts_them(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()

    message = refusal(tmp_path, fields_of("llama"))

    assert "pytorch_model.bin" in message
    assert f"from_pretrained('{tmp_path}').save_pretrained(" in message


def test_custom_code_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('custom code was run')")

    message = refusal(tmp_path, fields_of("llama", auto_map={"AutoModelForCausalLM": "modeling_own.Own"}))

    assert "'auto_map'" in message
    assert "modeling_own.Own" in message


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_published_checkpoints_leave_out_or_leave_empty_is_accepted(tmp_path: Path, family: str) -> None:
    fields = fields_of(family, rope_theta=10000, rope_scaling=None, pad_token_id=None, torch_dtype="float16", own={})
    fields.pop("dtype", None)

    assert len(build(tmp_path, fields | {"quantization_config": None}).layers) == 2


@pytest.mark.parametrize("pad_token_id", [-1, 95])
def test_a_padding_token_may_be_counted_from_the_end(tmp_path: Path, pad_token_id: int) -> None:
    assert len(build(tmp_path, fields_of("llama", pad_token_id=pad_token_id)).layers) == 2
