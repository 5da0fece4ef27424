"""The yardstick trains as long as a run does, and the same model."""

from __future__ import annotations

from pathlib import Path

import plain_training
import pytest
import torch
from harness.runs import make_checkpoint, make_dataset
from harness.tiny_families import make_family_checkpoint
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from mobius.config.cli import parse_args


@pytest.mark.parametrize(("length", "num_steps"), [("--num_iterations 3", 3), ("--num_train_epochs 2", 6)])
def test_it_trains_for_steps_or_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: str, num_steps: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_checkpoint(tmp_path / "model", num_layers=2)
    dataset = make_dataset(tmp_path / "data.jsonl", num_records=12)
    options = f"""--model_path {tmp_path}/model --dataset {dataset} --fp32 --device cpu --packing off --num_stages 2
        --num_chunks 1 --batch_size 4 --seq_length 64 --learning_rate 1e-3 {length}"""
    losses = plain_training.train(parse_args(options.split()), torch.device("cpu")).losses
    assert len(losses) == num_steps
    assert losses[-1] < losses[0]


def test_a_cap_on_scores_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)  # as before transformers 5.23
    make_family_checkpoint(tmp_path, "gemma2", width=64)
    assert plain_training.load_model(str(tmp_path), torch.float32).config._attn_implementation == "eager"
