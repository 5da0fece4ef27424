"""Trains a tiny model once per variant of options, with deterministic kernels, and leaves a digest of every result."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch

from mobius.config.cli import parse_args
from mobius.data.batches import TrainingBatches
from mobius.data.mixture import WeightedSamples
from mobius.data.token_store import TokenizedDataset
from mobius.distributed.transport import Transport
from mobius.hardware.devices import MemoryMeter
from mobius.models.families import load_model_config
from mobius.planner.run_setup import make_run_setup
from mobius.ranks import Ranks, prepare_environment
from mobius.training.session import open_session


def train(folder: Path, options: list[str], ranks: Ranks, transport: Transport | None) -> tuple[Transport, float, str]:
    """One run; returns its transport for the next, the last loss and a digest of this rank's masters and moments."""
    config = parse_args(options, num_ranks=ranks.num_ranks)
    run_setup = make_run_setup(config, ranks, load_model_config(folder, config.model))
    session = open_session(run_setup, folder, transport=transport)
    steps = list(session.trainer(_batches(run_setup.shape.vocab_size, options)).train())
    MemoryMeter(run_setup.rank_context.device).synchronize()
    digest = hashlib.sha256()
    for stage in (memory.state for _, memory in sorted(session.stages.memory.items())):
        for tensor in (stage.read_master(), stage.exp_avg, stage.exp_avg_sq, stage.weights.float()):
            digest.update(tensor.cpu().numpy().tobytes())
    session.stages.close()
    return session.transport, steps[-1].loss, digest.hexdigest()


def _batches(vocab_size: int, options: list[str]) -> TrainingBatches:
    config = parse_args(options)
    size, length = config.pipeline.batch_size, config.data.seq_length
    tokens = np.random.default_rng(0).integers(0, vocab_size, 3 * size * length, dtype=np.int32)
    offsets = np.arange(3 * size + 1, dtype=np.int64) * length
    dataset = TokenizedDataset(tokens, np.ones(len(tokens), dtype=bool), offsets)
    return TrainingBatches(
        [WeightedSamples(dataset)], batch_size=size, seq_length=length, pad_token_id=0, seed=1, is_packed=False
    )


def train_variants(output: str, folder: str, shared: str, *variants: str) -> None:
    """Run every variant and write {variant: [loss, digest of every rank]} to `output` from the first rank."""
    prepare_environment()
    torch.use_deterministic_algorithms(True)
    ranks = Ranks.from_environment()
    torch.set_num_threads(1)
    transport: Transport | None = None
    results: dict[str, list[object]] = {}
    for variant in variants:
        options = f"--model_path {folder} {shared} {variant}".split()
        transport, loss, digest = train(Path(folder), options, ranks, transport)
        halves = torch.zeros(ranks.num_ranks, 8, dtype=torch.float64)
        numbers = [int(digest[i : i + 8], 16) for i in range(0, 64, 8)]
        halves[ranks.rank] = torch.tensor(numbers, dtype=torch.float64)
        results[variant] = [loss, transport.sum_over_ranks(halves).tolist()]
    assert transport is not None
    transport.barrier()
    transport.close()
    if ranks.is_first:
        Path(output).write_text(json.dumps(results))
