"""Routers in fp32 beside bf16 weights: transformers' loss, states without a separate master, checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from harness.pipelines import Pipeline, make_batch, model_of, plain_step
from harness.runs import VOCAB, assert_equal_tensors
from harness.small_run import Run, run, saved_inputs, workplace  # noqa: F401
from harness.tiny_families import tiny_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

MICROBATCHES = 2
FAMILIES = {"deepseek_v2": "mlp.gate.weight", "ernie4_5_moe": "mlp.gate.weight", "afmoe": "mlp.expert_bias"}


def loaded_in_bf16(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return loaded.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_in_bf16_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    model, batch = model_of(tiny_config(family)), make_batch(MICROBATCHES)
    reference = loaded_in_bf16(model, tmp_path)
    kept = {name: value for name, value in reference.state_dict().items() if value.dtype is torch.float32}
    assert any(name.endswith(FAMILIES[family]) for name in kept)
    loss, _ = plain_step(reference, batch, MICROBATCHES)
    pipeline = Pipeline(model, 2, 2, MICROBATCHES, 1, dtype=torch.bfloat16)
    assert float(pipeline.run(batch)) == pytest.approx(float(loss), rel=2e-6)
    for name, value in kept.items():  # as older versions rounded them
        reference.get_parameter_or_buffer(name).data = value.bfloat16()
    assert float(plain_step(reference, batch, MICROBATCHES)[0]) != pytest.approx(float(loss), rel=2e-6)


TRAINING = """--model_path routed --dtype bf16 --learning_rate 1e-2 --warmup_steps 0 --num_stages 4 --num_iterations 6
    --max_grad_norm 0.5 --save_params none --save_results auto"""
SAVING = ["--save_steps", "3", "--save_total_limit", "0"]
WAYS = ["--no_offload", "--resident_stages 1", "--no_offload --recompute none", "--offload_states_to disk"]


@pytest.fixture
def routed(workplace: Path) -> Path:  # noqa: F811
    """A folder with a tiny model that has routers and constants in fp32."""
    config = tiny_config("ernie4_5_moe", vocab_size=VOCAB)
    model_of(config).save_pretrained("routed")
    for file in Path("model").glob("*token*"):
        shutil.copy(file, "routed")
    return Path("routed")


def in_fp32(path: Path) -> dict[str, torch.Tensor]:
    found = load_file(path)
    assert {value.dtype for value in found.values()} == {torch.bfloat16, torch.float32}
    return {name: value for name, value in found.items() if value.dtype is torch.float32}


def test_runs_keep_save_and_resume_fp32_weights(run: Run, routed: Path) -> None:  # noqa: F811
    run(*TRAINING.split(), *SAVING, "--save_dir", "one")
    before, after = load_file(routed / "model.safetensors"), in_fp32(Path("one/model.safetensors"))
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in after} == {"gate", "moe_statics"}
    for name, value in after.items():
        assert torch.equal(value, before[name]) == name.endswith("bias"), "routers are trained, constants are not"
        assert not torch.equal(value, value.bfloat16().float())
    files = Path("one/checkpoint-3").glob("optimizer*.safetensors")
    routers = [name for file in files for name in load_file(file) if ".gate.weight." in name]
    assert {name.rpartition(".")[2] for name in routers} == {"exp_avg", "exp_avg_sq"}, "a router is its own master"

    run(*TRAINING.split(), *SAVING, "--save_dir", "other", "--resume_from_checkpoint", "one/checkpoint-3")
    assert_equal_tensors(Path("one"), Path("other"))
    loaded = AutoModelForCausalLM.from_pretrained("one", dtype=torch.bfloat16)
    routers = {name: value for name, value in after.items() if name.endswith("gate.weight")}
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in routers.items())


@pytest.mark.parametrize("way", WAYS)
def test_the_place_of_states_changes_no_bit(run: Run, routed: Path, way: str) -> None:  # noqa: F811
    for name, options in (("one", "--resident_stages 0"), ("other", way)):
        run(*TRAINING.split(), *options.split(), "--save_dir", name, "--save_strategy", "no")
    assert_equal_tensors(Path("one"), Path("other"))
