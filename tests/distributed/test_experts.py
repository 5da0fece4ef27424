"""Two ranks train a mixture of experts with its loss over routers to the bit: as one does, and on from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness.runs import EXPERTS, assert_goes_on_exactly, make_checkpoint, make_dataset, run_main, tensors_of
from transformers import AutoModelForCausalLM

OPTIONS = """--model_path model --dataset data.jsonl --fp32 --num_stages 4 --num_chunks 2
    --batch_size 4 --seq_length 64 --num_iterations 4 --save_steps 2 --save_total_limit 0 --learning_rate 1e-3
    --val_size 4 --save_params none --eval_strategy steps --eval_steps 4"""
LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train(num_ranks: int, place: Path, options: str) -> str:
    finished = run_main(num_ranks, place, *options.split())
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("packing", ["auto", pytest.param("off", marks=pytest.mark.extended)])
def test_two_ranks_train_experts_and_routers_as_one_does(tmp_path: Path, packing: str) -> None:
    make_checkpoint(tmp_path / "model", family="qwen3_moe", decoder_sparse_step=2, **EXPERTS, **LOSS)
    make_dataset(tmp_path / "data.jsonl", 60)
    options = f"{OPTIONS} --packing {packing}"
    train(2, tmp_path, f"{options} --save_dir two --save_results two.txt")
    train(1, tmp_path, f"{options} --save_dir one --save_results one.txt")

    one, two = (metrics_of(tmp_path / name) for name in ("one", "two"))
    for field in ("loss", "aux_loss", "grad_norm"):
        assert [step[field] for step in two] == [step[field] for step in one]
    # Of 2 experts of a token the times chosen sum up to 2, so evenly used ones have a loss of 2.
    assert all(1.9 < step["aux_loss"] < 4 for step in two)
    expected, saved = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    assert "model.layers.1.mlp.experts.5.down_proj.weight" in saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    assert json.loads((tmp_path / "two" / "config.json").read_text())["output_router_logits"] is True
    AutoModelForCausalLM.from_pretrained(tmp_path / "two", dtype=torch.float32)
    if packing == "auto":
        words = "--resume_from_checkpoint two/checkpoint-2 --save_dir on --save_params none --save_results on.txt"
        train(2, tmp_path, words)
        assert_goes_on_exactly(tmp_path / "two", tmp_path / "on", step=2)
        assert metrics_of(tmp_path / "on")[-1]["aux_loss"] == two[-1]["aux_loss"]
