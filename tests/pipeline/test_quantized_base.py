"""Adapters beside codes take the steps of peft's adapters on the decoded model: of a folder, or of --base_dtype."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.adapted_models import GivenValues, adapt_by_peft, give, parameters_of, train, train_by_peft
from harness.quantized_models import decode, make_decoded, quantize
from harness.rounding import reordered
from harness.runs import make_checkpoint
from harness.sessions import random_samples
from transformers import AutoModelForCausalLM, Mxfp4Config

from mobius.config.config import AdapterConfig, FinetuningType
from mobius.models.weights import InitialAdapterWeights

LORA = AdapterConfig(finetuning_type=FinetuningType.LORA, lora_rank=4, lora_alpha=8.0)
OPTIONS = """--use_lora --lora_rank 4 --lora_alpha 8 --fp32 --num_iterations 8 --learning_rate 2e-3
    --lr_scheduler_type constant --warmup_steps 0 --weight_decay 0.1 --max_grad_norm 0.2 --batch_size 6 --num_chunks 3
    --seed 3"""
ALONE, PACKED = "--packing off --seq_length 24", "--packing on --seq_length 32"
DORA = "--base_dtype {} --use_dora"


@pytest.mark.parametrize(
    ("kind", "family", "num_ranks", "options"),
    [
        ("fp8", "llama", 2, f"--num_stages 4 {ALONE}"),
        ("nf4", "qwen3", 1, f"--num_stages 2 --resident_stages 1 {PACKED}"),
        ("nf4", "llama", 2, f"--num_stages 4 {ALONE} {DORA.format('nf4')}"),
        ("int8", "qwen3", 1, f"--num_stages 2 --resident_stages 1 {PACKED} {DORA.format('int8')}"),
        pytest.param(
            "fp8", "gemma3_text", 2, f"--num_stages 2 {PACKED} {DORA.format('fp8')}", marks=pytest.mark.extended
        ),
        pytest.param("int4", "gemma3_text", 2, f"--num_stages 2 {PACKED}", marks=pytest.mark.extended),
        pytest.param("nf4", "mistral", 1, f"--num_stages 1 --no_offload {ALONE}", marks=pytest.mark.extended),
        pytest.param("int4", "qwen2", 2, f"--num_stages 4 --num_rounds 3 {ALONE}", marks=pytest.mark.extended),
    ],
)
def test_clipped_steps_are_those_of_peft_on_decoded_weights(
    tmp_path: Path, kind: str, family: str, num_ranks: int, options: str
) -> None:
    make_checkpoint(tmp_path / "model", family=family)
    has_codes, config = "base_dtype" in options, replace(LORA, use_dora="dora" in options)
    folder = tmp_path / "model" if has_codes else quantize(tmp_path / "model", kind, tmp_path / "base")
    losses, ours, batches = train(num_ranks, folder, f"{OPTIONS} {options}", random_samples(30, 24))

    if has_codes:
        make_decoded(folder, kind, read := tmp_path / "plain")
    else:
        read = folder if kind == "fp8" else decode(folder, tmp_path / "plain")  # transformers itself decodes fp8
    model = adapt_by_peft(AutoModelForCausalLM.from_pretrained(read, dtype=torch.float32), config)
    given = parameters_of(model)
    fresh = InitialAdapterWeights(GivenValues(given), {name: (*each.shape,) for name, each in given.items()}, seed=3)
    give(model, {name: fresh.read(name, each.shape).clone() for name, each in given.items()})
    expected = train_by_peft(model, batches)

    assert losses == pytest.approx(expected, rel=reordered(batches[0].input_ids.size))
    assert expected[-1] < expected[0]
    coded = {name for name, value in ours.items() if value.dtype == torch.uint8}
    assert bool(coded) == has_codes
    frozen = {name: value for name, value in parameters_of(model).items() if "lora_" not in name and name not in coded}
    assert all(torch.equal(ours[name], value) for name, value in frozen.items())


def test_experts_in_mxfp4_are_trained_as_on_the_weights_that_transformers_decodes(tmp_path: Path) -> None:
    """gpt-oss as it is published: adapters of attention and experts beside its codes, and all parameters."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6}
    make_checkpoint(tmp_path / "model", family="gpt_oss", **sizes)
    folder = quantize(tmp_path / "model", "mxfp4", tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    samples, options = random_samples(30, 24), f"{OPTIONS} --num_stages 4 {ALONE} --lora_target_parameters all"
    losses, ours, batches = train(2, folder, options, samples)

    model = adapt_by_peft(plain, replace(LORA, lora_target_parameters="gate_up_proj,down_proj"))
    given = parameters_of(model)
    fresh = InitialAdapterWeights(GivenValues(given), {name: (*each.shape,) for name, each in given.items()}, seed=3)
    give(model, {name: fresh.read(name, each.shape).clone() for name, each in given.items()})
    assert losses == pytest.approx(train_by_peft(model, batches), rel=reordered(batches[0].input_ids.size))
    assert losses[-1] < losses[0]
    frozen = {name: value for name, value in parameters_of(model).items() if "lora_" not in name}
    assert sum(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in frozen) == 8
    assert all(torch.equal(ours[name], value) for name, value in frozen.items())

    found, in_codes, _ = train(2, folder, f"{options} --base_dtype mxfp4", samples)
    assert found == losses
    coded = {name for name, value in in_codes.items() if value.dtype == torch.uint8}
    assert len(coded) == 8
    assert all(torch.equal(value, ours[name]) for name, value in in_codes.items() if name not in coded)

    decode(folder, tmp_path / "plain")
    full = OPTIONS.replace("--use_lora --lora_rank 4 --lora_alpha 8", f"--num_stages 2 {PACKED}")
    decoded, plainly = (
        train(1, each, f"{full} {more}", samples)[0]
        for each, more in ((folder, "--dequantize_base"), (tmp_path / "plain", ""))
    )
    assert decoded == plainly
