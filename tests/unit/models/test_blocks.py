"""A model taken apart: templates are shared only where layers agree, and the parts add up to the whole."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from harness.pipelines import CPU, FAMILIES, NUM_LAYERS, make_model
from transformers import GPT2Config, PreTrainedModel

from mobius.errors import CheckpointError
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts


@cache
def model_and_parts(family: str) -> tuple[PreTrainedModel, ModelParts]:
    """Both, built once, because no test changes them."""
    model = make_model(family)
    return model, ModelParts(model.config, CPU)


# Kinds of layers in 12 of them: sliding and full attention where a family mixes them, else one.
NUM_TEMPLATES = {
    "llama": 1,
    "llama-tied": 1,
    "qwen2": 2,
    "qwen3": 2,
    "mistral": 1,
    "gemma3": 2,
    "gemma3-softcap": 2,
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_layers_share_a_template_exactly_where_they_are_of_one_kind(family: str) -> None:
    _, parts = model_and_parts(family)
    config = FAMILIES[family]()

    assert len({id(layer.module) for layer in parts.layers}) == NUM_TEMPLATES[family]
    kinds = getattr(config, "layer_types", None) or ["one"] * NUM_LAYERS
    for one, kind in zip(parts.layers, kinds, strict=True):
        for other, other_kind in zip(parts.layers, kinds, strict=True):
            assert (one.module is other.module) == (kind == other_kind), (one.prefix, other.prefix)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_shape_counts_every_parameter_of_the_real_model_once(family: str) -> None:
    model, parts = model_and_parts(family)
    shape = parts.shape()

    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert shape.num_layers == NUM_LAYERS
    per_layer = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert list(shape.layer_parameters) == per_layer
    assert shape.is_tied == model.config.tie_word_embeddings
    assert (shape.hidden_size, shape.intermediate_size, shape.vocab_size) == (32, 48, 96)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parameters_have_no_storage_and_buffers_have_the_values_of_the_real_model(family: str) -> None:
    model, parts = model_and_parts(family)

    assert all(parameter.is_meta for parameter in parts.model.parameters())
    expected = dict(model.named_buffers())
    actual = dict(parts.model.named_buffers())
    assert actual.keys() == expected.keys()
    assert expected, "the family has no buffers to compare"
    for name, buffer in expected.items():
        assert torch.equal(actual[name], buffer), name


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma3"])
def test_tied_names_are_those_of_the_shared_matrix(family: str) -> None:
    _, parts = model_and_parts(family)

    assert parts.tied_names == (None if family == "llama" else ("model.embed_tokens.weight", "lm_head.weight"))


def test_a_family_with_learned_positions_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"'gpt2' has parameters outside of embedding"):
        ModelParts(GPT2Config(n_layer=1, n_embd=8, n_head=2), CPU)


def test_layer_inputs_follow_the_layer_kinds_and_the_length() -> None:
    _, parts = model_and_parts("gemma3")
    inputs = LayerArgumentsBuilder(parts, device=CPU, dtype=torch.float32)
    short, long = inputs(6), inputs(10)

    assert inputs(6) is short
    assert len(short) == len(long) == NUM_LAYERS
    sliding, full = short[0]["position_embeddings"], short[5]["position_embeddings"]
    assert sliding[0].shape == (1, 6, 16)
    assert not torch.equal(sliding[0], full[0]), "rotary frequencies differ by layer kind in Gemma 3"
    # A window of 4 hides from token 9 what is 4 or more tokens back.
    mask = long[0]["attention_mask"][0, 0, 9]
    visible = mask if mask.dtype == torch.bool else mask == 0
    assert visible.tolist() == [False] * 6 + [True] * 4
