"""The text part of a larger model is trained, and saved in the larger model, or as a text model of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from harness.family_checks import tiny_whole
from harness.runs import TOKENIZER, make_dataset, run_main
from harness.tiny_families import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from mobius.commands import run_command
from mobius.models.weights import text_weight_names

OPTIONS = """--model_path model --dataset data.jsonl --fp32 --num_stages 2 --num_chunks 1 --batch_size 2 --seq_length 32
    --num_iterations 2 --warmup_steps 0 --save_dir out"""
STILL = "--learning_rate 1e-30"
"""Too small to change a number."""


def make_whole(folder: Path, family: str) -> PreTrainedModel:
    """Save a tiny model of `family` with the quickstart's tokenizer."""
    model = tiny_whole(family, is_tied=False, vocab_size=4096 + 64)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    return model


def text_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors of the text part, by the names that it has alone."""
    stored = model.state_dict()
    names = text_weight_names(stored) | {"lm_head.weight": "lm_head.weight"}
    return {own: stored[name] for name, own in names.items()}


@pytest.mark.parametrize(
    ("family", "text", "class_name"),
    [("gemma3", "gemma3_text", "Gemma3ForCausalLM"), ("qwen2_5_vl", "qwen2", "Qwen2ForCausalLM")],
)
def test_ranks_put_the_text_part_back_into_the_model_which_export_writes_alone(
    tmp_path: Path, family: str, text: str, class_name: str
) -> None:
    whole = make_whole(tmp_path / "model", family)
    make_dataset(tmp_path / "data.jsonl")

    result = run_main(2, tmp_path, *OPTIONS.split(), *STILL.split())

    assert result.returncode == 0, result.stdout
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "model" / "model.safetensors").read_bytes()
    assert "saved: the text with" in result.stdout
    words = [str(tmp_path / "out"), str(tmp_path / "text"), "--export_as", "text", "--dtype", "fp32"]
    assert run_command("export", words) == 0
    assert f"describes more than a text model ({family}): its text part ({text}) is trained" in result.stdout
    assert "not trained: vision_config" in result.stdout
    fields = json.loads((tmp_path / "text" / "config.json").read_text())
    assert (fields["model_type"], fields["architectures"]) == (text, [class_name])
    assert not {"text_config", "vision_config"} & fields.keys()
    saved, told = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert type(saved).__name__ == class_name
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    expected = text_tensors(whole)
    assert saved.state_dict().keys() == expected.keys()
    assert all(torch.equal(saved.state_dict()[name], value) for name, value in expected.items())


def test_prompts_ask_for_the_text_part_as_a_model_of_its_own_which_export_writes(tmp_path: Path) -> None:
    whole = make_whole(tmp_path / "model", "mistral3")
    make_dataset(tmp_path / "data.jsonl")

    refused = run_main(1, tmp_path, *OPTIONS.split(), "--finetuning_type", "prompt")

    assert refused.returncode == 1
    assert "is more than a text model (mistral3)" in refused.stdout
    assert "mobius export model FOLDER --export_as text" in refused.stdout
    words = [str(tmp_path / "model"), str(tmp_path / "text"), "--export_as", "text", "--dtype", "fp32"]
    assert run_command("export", words) == 0
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "text").state_dict()
    expected = text_tensors(whole)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], value) for name, value in expected.items())


def test_constants_among_the_weights_are_read_and_saved_unchanged(tmp_path: Path) -> None:
    config = tiny_config("apertus", vocab_size=4096 + 64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            layer.mlp.act_fn.beta.fill_(0.5 + number / 16)
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, tmp_path / "model" / name)
    make_dataset(tmp_path / "data.jsonl")

    result = run_main(1, tmp_path, *OPTIONS.split(), "--learning_rate", "1e-2")

    assert result.returncode == 0, result.stdout
    saved, before = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), model.state_dict()
    constants = [name for name in before if name.endswith((".beta", ".eps"))]
    assert len(constants) == 2 * len(model.model.layers)
    assert all(torch.equal(saved[name], before[name]) for name in constants)
    assert not torch.equal(saved["model.layers.0.mlp.act_fn.alpha_p"], before["model.layers.0.mlp.act_fn.alpha_p"])
