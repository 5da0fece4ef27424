"""Whole runs of several processes with gloo end with the parameters of a plain torch AdamW loop."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness.replica_ranks import exact_results
from harness.rounding import assert_near_after_adam, reordered
from harness.runs import make_checkpoint, make_dataset, plain_training, run_main, torchrun_main
from plain_training import parts_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from mobius.config.config import DataConfig, DatasetEntry
from mobius.data.batches import TrainingBatches
from mobius.data.datasets import prepare_data
from mobius.data.mixture import WeightedSamples

Start = Callable[..., subprocess.CompletedProcess[str]]

STEPS = 10
BATCH, CHUNKS, LENGTH = 6, 3, 24
SHARE = reordered(BATCH * LENGTH)
LEARNING_RATE, DECAY, CLIP = 2e-3, 0.1, 0.5


def steps_of(dataset: Path, tokenizer_folder: Path, cache: Path) -> list[list[tuple[Tensor, Tensor]]]:
    """Microbatches of each step: tokens and labels."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = DataConfig(dataset=(DatasetEntry(str(dataset)),), seq_length=LENGTH)
    prepared = prepare_data(config, tokenizer, cache_dir=cache)
    batches = TrainingBatches(
        [WeightedSamples(prepared.training[0].tokenized)],
        batch_size=BATCH,
        seq_length=LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        seed=42,
        is_packed=prepared.is_packed,
    )
    return [[*parts_of(next(batches), CHUNKS)] for _ in range(STEPS)]


@pytest.mark.parametrize(
    ("start", "num_ranks", "num_stages", "is_tied", "options"),
    [
        pytest.param(torchrun_main, 2, 4, False, ["--use_offload", "--use_prefetch"], marks=pytest.mark.extended),
        (run_main, 2, 4, True, ["--use_offload", "--no_prefetch"]),
        pytest.param(run_main, 2, 2, True, ["--no_offload"], marks=pytest.mark.extended),
        pytest.param(run_main, 4, 8, False, ["--use_offload", "--use_prefetch"], marks=pytest.mark.extended),
    ],
)
def test_clipped_steps_equal_a_plain_adamw_loop(
    tmp_path: Path, start: Start, num_ranks: int, num_stages: int, is_tied: bool, options: list[str]
) -> None:
    model = make_checkpoint(tmp_path / "model", num_layers=num_stages, is_tied=is_tied)
    dataset = make_dataset(tmp_path / "data.jsonl")
    arguments = f"""--model_path model --dataset data.jsonl --fp32 --num_stages {num_stages} --num_chunks {CHUNKS}
        --batch_size {BATCH} --seq_length {LENGTH} --num_iterations {STEPS} --learning_rate {LEARNING_RATE}
        --warmup_steps 2 --weight_decay {DECAY} --max_grad_norm {CLIP} --save_dir out""".split()
    result = start(num_ranks, tmp_path, *arguments, *options)
    assert result.returncode == 0, result.stdout

    before = copy.deepcopy(model.state_dict())
    steps = steps_of(dataset, tmp_path / "model", tmp_path / "cache-plain")
    losses = plain_training(model, steps, learning_rate=LEARNING_RATE, num_warmup_steps=2, decay=DECAY, clip=CLIP)
    logged = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in logged] == pytest.approx(losses, rel=SHARE)
    assert any(row["grad_norm"] > CLIP for row in logged), "clipping was never exercised"

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert trained.config.tie_word_embeddings == is_tied
    rates = [row["learning_rate"] for row in logged]
    assert_near_after_adam(trained.state_dict(), model.state_dict(), before, rates=rates, share=SHARE)
    single_file = torch.load(tmp_path / "finetune_params.pt", weights_only=True)
    assert single_file.keys() == trained.state_dict().keys()  # a tied head under both of its names
    assert all(torch.equal(single_file[name], trained.get_parameter(name)) for name in single_file)


@pytest.mark.parametrize(
    "clipping",
    [
        pytest.param("--max_grad_norm 0.5", marks=pytest.mark.extended, id="clipped"),
        pytest.param("--max_grad_norm 0", id="not clipped"),
    ],
)
def test_overlaps_residency_and_recomputing_change_no_bit(tmp_path: Path, clipping: str) -> None:
    """With one resident stage the matrix of embedding and head is resident on one rank and streamed on the other."""
    options = f"""--device cpu --bf16 --num_stages 6 --num_chunks 2 --batch_size 4 --seq_length 16 --num_iterations 3
        --learning_rate 1e-3 {clipping}"""
    variants = [
        *("--resident_stages 0", "--resident_stages 0 --no_prefetch", "--resident_stages 0 --no_overlap_optimizer"),
        "--resident_stages 0 --no_overlap_optimizer --no_prefetch",
        *("--resident_stages 1", "--resident_stages 2 --no_overlap_optimizer", "--resident_stages 2 --no_prefetch"),
        *("--resident_stages all --recompute none", "--no_offload --recompute elementwise", "--no_offload"),
    ]
    wide = [f"{variant} --fp32_gradients" for variant in (variants[0], variants[4], variants[-1])]
    results = exact_results(2, tmp_path, options, [*variants, *wide])
    assert all(results[variant] == results[variants[0]] for variant in variants), results
    assert all(results[variant] == results[wide[0]] for variant in wide), results
    assert results[wide[0]] != results[variants[0]], "the comparison can fail"
