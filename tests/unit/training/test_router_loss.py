"""A run with a loss over routers tells its executor which tokens are padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness.run_setups import make_run_setup
from harness.runs import EXPERTS, make_checkpoint

from mobius.config.cli import parse_args
from mobius.data.batches import TrainingBatches, balance_microbatches, shard_batch
from mobius.data.mixture import WeightedSamples
from mobius.data.token_store import TokenizedDataset
from mobius.models.families import load_model_config
from mobius.process.ranks import Ranks
from mobius.training.session import open_session

LENGTHS = [9, 3, 12, 5, 7, 2, 16, 4]


def make_batches(*, is_packed: bool) -> TrainingBatches:
    tokens = np.random.default_rng(0).integers(1, 90, sum(LENGTHS), dtype=np.int32)
    offsets = np.cumsum([0, *LENGTHS], dtype=np.int64)
    dataset = TokenizedDataset(tokens, np.ones(len(tokens), dtype=bool), offsets)
    settings = {"batch_size": 4, "seq_length": 16, "pad_token_id": 0, "seed": 1}
    return TrainingBatches([WeightedSamples(dataset)], is_packed=is_packed, **settings)


@pytest.mark.parametrize("is_packed", [False, True])
def test_lengths_go_with_the_rows_of_a_batch(is_packed: bool) -> None:
    batch = next(make_batches(is_packed=is_packed))
    for own in (batch, balance_microbatches(batch, 2), shard_batch(batch, 1, 2)):
        assert own.row_lengths == tuple((own.input_ids != 0).sum(1).tolist())
    assert sum(batch.row_lengths or ()) == batch.num_tokens < batch.input_ids.size


@pytest.mark.parametrize("has_loss", [False, True])
def test_a_step_has_lengths_where_routers_have_a_loss(tmp_path: Path, has_loss: bool) -> None:
    make_checkpoint(tmp_path, family="qwen3_moe", num_layers=1, output_router_logits=has_loss, **EXPERTS)
    words = "--device cpu --fp32 --num_stages 1 --batch_size 4 --seq_length 16 --packing off"
    config = parse_args(f"--model_path {tmp_path} {words}".split())
    run_setup = make_run_setup(config, Ranks(0, 1, 0), load_model_config(tmp_path, config.model))
    session = open_session(run_setup, tmp_path)
    trainer = session.trainer(make_batches(is_packed=False), has_kernel=False)

    batch = next(trainer._batches)

    assert (batch.lengths is not None) == has_loss
    if batch.lengths is not None:
        assert batch.lengths.tolist() == (batch.input_ids != 0).sum(1).tolist()
    session.close()
