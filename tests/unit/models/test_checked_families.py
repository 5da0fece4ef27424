"""Supported families are those that were checked; the program, the page and the installed transformers agree."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from harness.pipelines import CPU
from harness.tiny_families import (
    DOCUMENT,
    causal_families,
    other_versions,
    tiny_config,
    written_table,
)
from transformers import PretrainedConfig, Trainer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mobius.config.config import ModelConfig
from mobius.engine.stage import StageModule
from mobius.errors import CheckpointError, ConfigError
from mobius.models import families, family_support
from mobius.models.blocks import ModelParts
from mobius.models.config_rules import find_invalid_fields
from mobius.models.families import changed_fields, load_model_config
from mobius.models.family_support import checked_families, checked_text_parts, is_text_config_supported
from mobius.models.model_files import read_model_files
from mobius.models.weights import InitialWeights
from mobius.schedule.partition import StageCut

ROOT = Path(__file__).parents[3]
CHECKED = checked_families()
OWN_VERSION = pytest.mark.skipif(
    transformers.__version__ != CHECKED.transformers, reason="the families of another transformers were checked"
)
ROUTERS_NOT_DRAWN = ("qwen3_5_moe_text", "qwen3_next")
"""Families of which transformers draws a router's weights with the layer's, not by itself."""
APERTUS = ("apertus", "apertus1p5_text")


def load(folder: Path) -> transformers.PretrainedConfig:
    return load_model_config(folder, ModelConfig(model_path=str(folder)))


@cache
def parts_of(family: str) -> ModelParts:
    """A tiny model's parts from its saved configuration: the same for several tests, none of which changes them."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_config(family).save_pretrained(folder)
        return ModelParts(load(Path(folder)), CPU)


def test_the_page_is_what_the_check_has_found() -> None:
    page = written_table(CHECKED, checked_text_parts(), other_versions())
    assert (ROOT / DOCUMENT).read_text(encoding="utf-8") == page, "run scripts/check_families"


def test_at_least_thirty_families_are_bit_equal_and_five_of_them_in_everything() -> None:
    assert len(CHECKED.supported) >= 30
    assert {found["parity"] for found in CHECKED.supported.values()} == {"bit-equal"}
    for family in ("gemma3_text", "llama", "mistral", "qwen2", "qwen3"):
        assert set(CHECKED.supported[family].values()) == {"bit-equal", "yes"}


@OWN_VERSION
def test_every_family_of_transformers_is_either_supported_or_refused_with_a_reason() -> None:
    taken_apart = set(filter(is_text_config_supported, checked_text_parts())) & set(causal_families())
    assert sorted([*CHECKED.supported, *CHECKED.refused, *taken_apart]) == causal_families()
    assert all(CHECKED.refused.values())


@OWN_VERSION
@pytest.mark.parametrize("family", CHECKED.supported)
def test_a_supported_family_is_loaded_and_taken_apart_with_all_its_parameters(family: str) -> None:
    parts = parts_of(family)

    assert parts.config._attn_implementation == tiny_config(family)._attn_implementation
    assert parts.shape().num_parameters == sum(each.numel() for each in parts.model.parameters())
    blocks = (parts.embedding, *parts.layers, parts.norm, parts.head)
    shapes = {name: shape for block in blocks for name, shape in block.parameter_shapes().items()}
    named = parts.model.named_parameters(remove_duplicate=False)
    assert shapes == {name: tuple(parameter.shape) for name, parameter in named}


@OWN_VERSION
@pytest.mark.parametrize("family", CHECKED.supported)
def test_weight_decay_leaves_alone_what_the_trainer_leaves_alone_and_all_other_vectors(family: str) -> None:
    """The Trainer goes by names: it decays norms that are named `post_norm1`, and vectors of which it knows no name."""
    parts = parts_of(family)
    no_weight_decay = frozenset[str]().union(*(block.no_weight_decay_names() for block in parts.blocks))
    named = parts.model.named_parameters(remove_duplicate=False)
    names = {name for name, parameter in named if parameter.requires_grad}
    decayed_by_trainer = set(Trainer.get_decay_parameter_names(cast(Any, None), parts.model))

    assert names - decayed_by_trainer <= no_weight_decay
    assert {
        name.removesuffix(".weight").rpartition(".")[2] for name in no_weight_decay & decayed_by_trainer & names
    } == {
        **{key: {"A_log"} for key in ("olmo_hybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
        **{key: {"alpha_n", "alpha_p"} for key in APERTUS},
        **{key: {"sinks"} for key in ("flint", "gpt_oss", "granite_swa", "mimo_v2_flash")},
        "hyperclovax": {"post_norm1", "post_norm2"},
        "diffllama": {"lambda_k1", "lambda_k2", "lambda_q1", "lambda_q2"},
    }.get(family, set())


def test_norms_of_two_dimensions_are_not_decayed() -> None:
    parts = ModelParts(tiny_config("cohere"), CPU)
    stage = StageModule(parts, StageCut(0, 0, len(parts.layers), True, True), loss_chunk_tokens=8)
    layout, prefix = stage.layout(torch.float32), "model.layers.0.self_attn"
    decayed, no_weight_decay = layout.ranges

    assert len(stage.shapes[f"{prefix}.q_norm.weight"]) == 2
    for name in (f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight", "model.norm.weight"):
        assert no_weight_decay.start <= layout.slice_of(name).start < no_weight_decay.end
    assert decayed.start <= layout.slice_of(f"{prefix}.q_proj.weight").start < decayed.end
    assert (decayed.has_decay, no_weight_decay.has_decay) == (True, False)


@OWN_VERSION
@pytest.mark.parametrize("family", CHECKED.supported)
def test_fresh_weights_of_a_supported_family_are_drawn_or_refused(family: str) -> None:
    parts = parts_of(family)
    source = InitialWeights(parts, seed=1)
    if family in APERTUS:  # its activation's parameters are as their constructor makes them
        with pytest.raises(
            CheckpointError, match=r"no initial values for '.*act_fn.alpha_p' .* Give a model with weights"
        ):
            source.read("model.layers.0.mlp.act_fn.alpha_p", (1,))
        return
    for block in (parts.embedding, *parts.layers, parts.norm, parts.head):
        for name, shape in block.parameter_shapes().items():
            if family in ROUTERS_NOT_DRAWN and name.endswith("mlp.gate.weight"):
                with pytest.raises(CheckpointError, match="draws no initial values for"):
                    source.read(name, shape)
            else:
                assert source.read(name, shape).isfinite().all(), name


@OWN_VERSION
@pytest.mark.parametrize("family", CHECKED.supported)
def test_the_defaults_of_a_supported_family_break_no_rule(family: str) -> None:
    kind = CONFIG_MAPPING[family]

    assert find_invalid_fields(kind().to_dict(), {field.name for field in dataclasses.fields(kind)}) == []


def test_a_family_that_an_older_transformers_does_not_know_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setattr(families, "CONFIG_MAPPING", {})

    with pytest.raises(
        CheckpointError, match=rf"'llama', which the installed transformers .* {CHECKED.transformers} does"
    ):
        load(tmp_path)


@OWN_VERSION
def test_the_text_part_of_a_larger_model_is_taken_with_the_fields_of_a_text_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 3, "vocab_size": 500, "rope_theta": 5e5}
    fields = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(fields))

    config = load(tmp_path)

    assert type(config) is CONFIG_MAPPING["gemma3_text"]
    assert (config.num_hidden_layers, config.vocab_size, config.eos_token_id) == (3, 500, [1, 106])
    assert config.tie_word_embeddings, "as the larger model has it"
    assert "its text part (gemma3_text) is trained" in caplog.text
    assert "not trained: vision_config" in caplog.text
    written = read_model_files(tmp_path).config
    assert "architectures" in written
    assert not {"text_config", "vision_config"} & written.keys()
    assert changed_fields(written, config) == {}


def test_the_text_part_of_a_model_that_was_not_compared_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (family_support, families):
        monkeypatch.setattr(module, "checked_text_parts", dict)
    fields = {"model_type": "mistral3", "text_config": {"model_type": "mistral"}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(fields))

    with pytest.raises(CheckpointError, match=r"more than a text model. Its text part .* is of the family 'mistral'"):
        load(tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("option", ["embedding_dim", "ff_dim", "num_heads", "num_layers"])
@pytest.mark.parametrize("family", checked_families().supported)
def test_a_shape_that_is_asked_for_is_written(family: str, option: str, tmp_path: Path) -> None:
    """Or refused in one message, where the family has no such field; it never ends in a traceback after training."""
    written = json.loads(tiny_config(family).to_json_string(use_diff=False))
    (tmp_path / "config.json").write_text(json.dumps(written))
    wanted = {"embedding_dim": 64, "ff_dim": 96, "num_heads": 8, "num_layers": 2}[option]
    options = replace(ModelConfig(), model_path=str(tmp_path), **{option: wanted})
    has_no_field = option == "ff_dim" and "intermediate_size" not in written
    if has_no_field or (family, option) == ("olmo_hybrid", "num_layers"):  # its first two layers have no attention
        with pytest.raises(ConfigError, match=f"--{option} {wanted}"):
            load_model_config(tmp_path, options)
        return

    config = load_model_config(tmp_path, options)

    saved = type(config).from_dict({**written, **changed_fields(written, config)})

    assert public_fields(saved) == public_fields(config)


def public_fields(config: PretrainedConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
