"""A trainer of one rank on a tiny checkpoint and random tokens, without the files of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from harness.runs import make_checkpoint

from mobius.config.cli import parse_args
from mobius.data.batches import TrainingBatches
from mobius.data.mixture import WeightedSamples
from mobius.data.token_store import TokenizedDataset
from mobius.models.families import load_model_config
from mobius.planner.run_setup import make_run_setup
from mobius.ranks import Ranks
from mobius.training.session import Session, open_session
from mobius.training.trainer import Trainer


def make_single_trainer(folder: Path, options: str, *, is_tied: bool = False) -> tuple[Trainer, Session]:
    """A trainer with `options` of main.py, and its session; that is to be closed when nothing copies any more."""
    make_checkpoint(folder, is_tied=is_tied)
    config = parse_args(f"--model_path {folder} {options}".split())
    size, length = config.pipeline.batch_size, config.data.seq_length
    run_setup = make_run_setup(config, Ranks(0, 1, 0), load_model_config(folder, config.model))
    tokens = np.random.default_rng(0).integers(0, run_setup.shape.vocab_size, size * length, dtype=np.int32)
    offsets = np.arange(size + 1, dtype=np.int64) * length
    dataset = TokenizedDataset(tokens, np.ones(len(tokens), dtype=bool), offsets)
    batches = TrainingBatches(
        [WeightedSamples(dataset)], batch_size=size, seq_length=length, pad_token_id=0, seed=1, is_packed=False
    )
    threads = torch.get_num_threads()  # those of this process, which runs other tests too
    session = open_session(run_setup, folder)
    torch.set_num_threads(threads)
    return session.trainer(batches), session
