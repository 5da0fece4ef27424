"""Sizes out of a config.json, against parameters counted by hand; test_families compares with real models."""

import json
from pathlib import Path

import pytest

from mobius.errors import PlanError
from mobius.plan.model_files import LLAMA_SHAPES, shape_of_config, shape_of_model
from mobius.plan.shape import ModelShape


def test_llama_7b_is_what_was_counted_by_hand(llama_7b: ModelShape) -> None:
    assert shape_of_model("7b") == llama_7b


@pytest.mark.parametrize(
    ("name", "billions"), [("1b", 1.14), ("7b", 6.74), ("13b", 13.0), ("30b", 32.5), ("70b", 69.0)]
)
def test_known_shapes_have_their_published_size(name: str, billions: float) -> None:
    assert shape_of_model(name).num_parameters == pytest.approx(billions * 1e9, rel=0.01)
    assert name in LLAMA_SHAPES


def test_a_folder_or_its_file_can_be_named(tmp_path: Path, llama_7b: ModelShape) -> None:
    fields = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
              "vocab_size": 32000, "model_type": "llama"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert shape_of_model(str(tmp_path)) == shape_of_model(str(tmp_path / "config.json")) == llama_7b


def test_grouped_queries_have_fewer_keys_and_values() -> None:
    fields = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 10}  # fmt: skip
    # Queries and output 8 x 8 each, keys and values 8 x 4 each, three of 8 x 16, two norms.
    assert shape_of_config(fields).layer_parameters == (2 * 64 + 2 * 32 + 3 * 128 + 16,)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"hidden_size": "wide"}', '{"hidden_size": 4}'])
def test_a_file_that_is_no_configuration_is_said_to_be_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(PlanError, match="no configuration"):
        shape_of_model(str(tmp_path))


def test_an_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(PlanError, match="7b, 13b"):
        shape_of_model("no-such-model")
