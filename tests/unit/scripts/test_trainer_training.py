"""What transformers' Trainer is compared on is what a plain loop, and so the pipeline, computes."""

from __future__ import annotations

from pathlib import Path

import plain_training
import pytest
import torch
import trainer_training
from harness.runs import make_checkpoint, make_dataset
from transformers import AutoModelForCausalLM

from mobius.config.cli import parse_args


@pytest.mark.parametrize("options", ["--packing on --max_grad_norm 0.5", "--packing off --warmup_steps 1"])
def test_the_trainer_gets_the_samples_and_settings_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_checkpoint(tmp_path / "model", num_layers=2)
    dataset = make_dataset(tmp_path / "data.jsonl", num_records=12)
    words = f"""--model_path {tmp_path}/model --dataset {dataset} --fp32 --device cpu --num_stages 2 --num_chunks 1
        --batch_size 4 --seq_length 64 --learning_rate 1e-3 --num_iterations 4 --weight_decay 0.1 {options}"""
    config = parse_args(words.split())

    losses = trainer_training.train(config, tmp_path / "trainer")

    assert losses == pytest.approx(plain_training.train(config, torch.device("cpu")).losses, rel=1e-5)
    start, end = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).lm_head.weight
        for name in ("model", "trainer")
    )
    assert not torch.equal(start, end)
