"""On one GPU: a plan that promises too little memory is found before weights are read, and replaced by another."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from harness.run_setups import make_run_setup
from harness.sessions import random_samples
from transformers import LlamaConfig

from mobius.config.cli import parse_args
from mobius.data.batches import TrainingBatches
from mobius.data.mixture import WeightedSamples
from mobius.models.families import load_model_config
from mobius.planner import memory_estimates
from mobius.process.ranks import Ranks
from mobius.training.data import packed_rows
from mobius.training.session import open_session

pytestmark = pytest.mark.gpu

GIB = 2**30
LIMIT = 2.0
OPTIONS = f"""--device cuda --dtype bf16 --num_stages 4 --num_chunks 4 --batch_size 16 --seq_length 1024
    --num_iterations 2 --gpu_memory_limit {LIMIT}"""


def test_a_plan_that_promises_too_little_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.use_deterministic_algorithms(False)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=4096,
        tie_word_embeddings=False,
    )
    config.save_pretrained(tmp_path / "model")
    # A planner that overlooks half a GiB fills the limit with states and activations that do not fit.
    monkeypatch.setattr(memory_estimates, "LIBRARY_BYTES", -GIB // 2)
    words = ["--model_path", str(tmp_path / "model"), *OPTIONS.split()]
    asked = parse_args(words, num_ranks=1)
    batches = TrainingBatches(
        [WeightedSamples(random_samples(200, 1024, seed=1))],
        batch_size=16,
        seq_length=1024,
        pad_token_id=0,
        seed=42,
        is_packed=True,
    )
    model_config = load_model_config(tmp_path / "model", asked.model)
    run_setup = make_run_setup(asked, Ranks(0, 1, 0), model_config, packed=packed_rows(batches))
    try:
        with caplog.at_level(logging.INFO):
            session = open_session(run_setup, tmp_path / "model")
        losses = [metrics.loss for metrics in session.trainer(batches).train()]
        session.close()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "rehearsal: a step took" in caplog.text
    assert len(losses) == 2
    assert torch.cuda.max_memory_reserved() <= LIMIT * GIB
