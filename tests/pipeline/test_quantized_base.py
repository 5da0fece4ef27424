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
from transformers import AutoModelForCausalLM

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
