"""Runs on a model that comes quantized are those on the decoded values, to the bit; what they save is plain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness.quantized_models import decode, quantize
from harness.runs import assert_equal_tensors, steps_of, tensors_of
from harness.sessions import resume
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mobius.commands import run_command
from mobius.config.config import ModelConfig
from mobius.errors import CheckpointError, ConfigError
from mobius.models.blocks import ModelParts
from mobius.models.families import load_model_config
from mobius.models.peft_folder import AdapterFolder
from mobius.models.weights import CheckpointWeights
from mobius.planner.forecast import forecast
from mobius.training.evaluation.generation import TextGenerator

Run = Callable[..., None]
SAVES = "--num_iterations 4 --save_steps 2 --save_total_limit 0 --learning_rate 1e-2 --save_params none"


def train(run: Run, folder: Path, *options: str) -> None:
    run(
        "--model_path",
        str(folder),
        *SAVES.split(),
        "--save_dir",
        f"{folder}_out",
        "--save_results",
        f"{folder}.txt",
        *options,
    )


WORDS = {"nf4": "bitsandbytes nf4", "fp8": "fp8", "int4": "compressed-tensors pack-quantized"}


@pytest.mark.parametrize("kind", WORDS)
def test_adapters_train_on_decoded_values_and_merge_into_them(
    run: Run, workplace: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    base, plain = quantize(Path("model"), kind, Path("base")), decode(Path("base"), Path("plain"))
    with caplog.at_level("INFO"):
        for folder in (base, plain):
            train(run, folder, "--use_lora", "--merge")

    assert [text for text in caplog.messages if "comes quantized" in text] == [
        f"base comes quantized ({WORDS[kind]}): 28 of its 39 tensors are decoded to plain weights"
    ]
    assert steps_of(Path("base_out")) == steps_of(Path("plain_out"))
    assert_equal_tensors(Path("base_out"), Path("plain_out"))
    assert_equal_tensors(Path("base_out/merged"), Path("plain_out/merged"))
    assert "quantization_config" not in json.loads(Path("base_out/merged/config.json").read_text())
    resume("base_out/checkpoint-2", "--save_dir", "resumed")
    assert_equal_tensors(Path("resumed"), Path("plain_out"))
    with pytest.raises(CheckpointError, match="comes quantized .* mobius export base_out FOLDER --merge"):
        TextGenerator.of_folder(base, torch.device("cpu"), adapter=AdapterFolder(Path("base_out")))


def test_weights_are_those_that_transformers_decodes(workplace: Path) -> None:
    base, plain = quantize(Path("model"), "fp8", Path("base")), decode(Path("base"), Path("plain"))

    theirs, ours = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (base, plain))

    values = theirs.state_dict()
    assert values.keys() == ours.state_dict().keys()
    assert all(torch.equal(values[name], own) for name, own in ours.state_dict().items())


def test_experts_are_decoded_one_by_one(workplace: Path) -> None:
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(
        **sizes, num_experts=4, num_experts_per_tok=2, num_hidden_layers=1, head_dim=16, vocab_size=64
    )
    Qwen3MoeForCausalLM(config).save_pretrained("experts")
    base, plain = quantize(Path("experts"), "fp8", Path("base")), decode(Path("base"), Path("plain"))
    parts = ModelParts(load_model_config(base, ModelConfig(model_path="base")), torch.device("cpu"))

    ours, theirs = (CheckpointWeights(each, parts.stored_names, parts.parameter_pieces) for each in (base, plain))

    for name, shape in parts.base_shapes().items():
        assert torch.equal(ours.read(name, shape), theirs.read(name, shape)), name
        assert len([*ours.reads_of(name, shape)]) == {"gate_up_proj": 8, "down_proj": 4}.get(name.split(".")[-1], 1)


def test_all_parameters_are_trained_only_if_asked_for_and_saved_plain(run: Run, workplace: Path) -> None:
    base, plain = quantize(Path("model"), "nf4", Path("base")), decode(Path("base"), Path("plain"))
    with pytest.raises(ConfigError, match="base comes quantized .bitsandbytes nf4., .* add --dequantize_base"):
        run("--model_path", "base")
    with pytest.raises(ConfigError, match="the weights in plain are not quantized. Leave it out"):
        run("--model_path", "plain", "--dequantize_base")
    for folder in ("plain", "base"):
        with pytest.raises(ConfigError, match=f"--base_dtype mxfp4: {folder} does not come in mxfp4, .* Use nf4, int8"):
            run("--model_path", folder, "--use_lora", "--base_dtype", "mxfp4")

    train(run, base, "--dequantize_base")
    train(run, plain)

    assert steps_of(Path("base_out")) == steps_of(Path("plain_out"))
    assert_equal_tensors(Path("base_out"), Path("plain_out"))
    fields = json.loads(Path("base_out/config.json").read_text())
    assert fields == json.loads(Path("plain_out/config.json").read_text())
    resume("base_out/checkpoint-2", "--save_dir", "resumed")
    assert_equal_tensors(Path("resumed"), Path("plain_out"))


def test_a_plan_and_an_export_take_it(workplace: Path) -> None:
    base, plain = quantize(Path("model"), "nf4", Path("base")), decode(Path("base"), Path("plain"))
    sizes = ["--card", "RTX4090", "--num_ranks", "2", "--batch_size", "4", "--seq_length", "16"]

    for words, options in ((["--use_lora"], ["--use_lora"]), (["--dequantize_base"], [])):
        planned = [
            forecast(["--model_path", str(folder), *given, *sizes], is_draft=True).found
            for folder, given in ((base, words), (plain, options))
        ]
        assert planned[0] is not None
        assert planned[1] is not None
        assert planned[0].host_estimate == planned[1].host_estimate
        assert planned[0].gpu_estimates == planned[1].gpu_estimates
    with pytest.raises(ConfigError, match="add --dequantize_base"):
        forecast(["--model_path", "base", *sizes])

    assert run_command("export", ["base", "exported", "--dtype", "fp32"]) == 0
    assert_equal_tensors(Path("exported"), plain)
    with pytest.raises(
        CheckpointError, match="bitsandbytes.*[.] It comes quantized; `mobius export base FOLDER` writes"
    ):
        TextGenerator.of_folder(base, torch.device("cpu"))


def test_a_damaged_scale_is_told_before_the_first_step(run: Run, workplace: Path) -> None:
    base = quantize(Path("model"), "fp8", Path("base"))
    tensors = tensors_of(base)
    name = next(name for name in tensors if name.endswith("_scale_inv"))
    del tensors[name]
    save_file(tensors, base / "model.safetensors")

    with pytest.raises(CheckpointError, match=f"has no '{name}'"):
        run("--model_path", "base", "--use_lora")
