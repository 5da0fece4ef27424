"""What is told of llama.cpp and vLLM: names that gguf's table has, and classes that vLLM's registry lists."""

from __future__ import annotations

import sys

import pytest
import torch
from harness.tiny_families import tiny_config
from transformers import AutoModelForCausalLM

from mobius.checkpoint.other_readers import reader_notes


def told(family: str) -> dict[str, str]:
    config = tiny_config(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = [name for name in model.state_dict() if "rotary" not in name]
    return dict(reader_notes(type(model).__name__, config, names))


@pytest.mark.parametrize(("family", "arch"), [("mistral", "llama"), ("gemma3_text", "gemma3"), ("cohere", "command_r")])
def test_names_of_a_text_are_looked_up_in_the_table_of_its_family(family: str, arch: str) -> None:
    found = told(family)
    assert f" for {arch}" in found["llama.cpp"]
    assert ("lm_head" in found["llama.cpp"]) == (family == "cohere")  # whose head is always the embedding there
    assert " lists " in found["vLLM"]


def test_names_that_only_the_converter_knows_and_classes_that_are_not_listed_are_told() -> None:
    found = told("qwen3_5_text")
    assert "left to its converter: model.layers.0.linear_attn.dt_bias" in found["llama.cpp"]
    assert found["vLLM"] == "0.33.0 lists Qwen3_5ForCausalLM, as versions from 0.27.1 on do"
    found = told("helium")
    assert found["llama.cpp"].endswith("has no table of names for the family 'helium'")
    assert "does not list HeliumForCausalLM" in found["vLLM"]


def test_without_gguf_a_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "is in the package gguf, which is not installed" in told("llama")["llama.cpp"]
