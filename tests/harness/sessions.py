"""Sessions of rank-threads on a tiny checkpoint, and evaluators of them, without the files of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from harness.local_transport import LocalTransport
from harness.replica_threads import run_replica_threads

from mobius.config.cli import parse_args
from mobius.data.batches import TrainingBatches
from mobius.data.mixture import WeightedSamples
from mobius.data.token_store import TokenizedDataset
from mobius.models.families import load_model_config
from mobius.planner.run_setup import make_run_setup
from mobius.ranks import Ranks
from mobius.training.data import packed_rows
from mobius.training.evaluation.evaluator import EvaluationSamples, Evaluator, make_evaluator
from mobius.training.session import Session, open_session

T = TypeVar("T")
VOCAB = 4096
_MAKING = threading.Lock()


def random_samples(num_samples: int, longest: int, *, seed: int = 0, shortest: int = 2) -> TokenizedDataset:
    """Samples of different lengths, the first third of each a prompt."""
    draw = np.random.default_rng(seed)
    rows = []
    for length in draw.integers(shortest, longest, num_samples, endpoint=True).tolist():
        tokens = draw.integers(1, VOCAB, length, dtype=np.int32)
        rows.append((tokens, np.arange(length) >= max(1, length // 3)))
    return TokenizedDataset.from_rows(rows)


def in_sessions(
    num_ranks: int,
    folder: Path,
    options: str,
    training: TokenizedDataset,
    work: Callable[[Session, TrainingBatches], T],
    *,
    num_replicas: int = 1,
) -> list[T]:
    """Open a session in a thread for each rank, and give what `work` makes of each, with its batches of `training`.

    `num_ranks` are those of a pipeline.
    """
    num_all = num_replicas * num_ranks

    def run(rank: int, transport: LocalTransport) -> T:
        with _MAKING:
            words = f"--device cpu --model_path {folder} {options}".split()
            config = parse_args(words, num_ranks=num_all, num_nodes=num_replicas)
            batches = TrainingBatches(
                [WeightedSamples(training)],
                batch_size=config.pipeline.batch_size,
                seq_length=config.data.seq_length,
                pad_token_id=0,
                seed=config.optim.seed,
                is_packed=config.data.packing.value != "off",
            )
            ranks = Ranks(rank, num_all, transport.rank, num_replicas=num_replicas, num_nodes=num_replicas)
            model_config = load_model_config(folder, config.model)
            run_setup = make_run_setup(config, ranks, model_config, packed=packed_rows(batches))
        session = open_session(run_setup, folder, transport=transport)
        # A rank alone would take a thread on every core for matrices that take one less time.
        torch.set_num_threads(threads)
        try:
            return work(session, batches)
        finally:
            session.stages.close()

    threads = torch.get_num_threads()  # those of this process, which runs other tests too
    try:
        return run_replica_threads(num_replicas, num_ranks, run)
    finally:
        torch.set_num_threads(threads)


def evaluator_of(session: Session, *datasets: TokenizedDataset, names: Sequence[str] = "abc") -> Evaluator:
    """The evaluator on all samples of `datasets`, which have the names of letters."""
    samples = [EvaluationSamples(name=name, tokenized=each) for name, each in zip(names, datasets, strict=False)]
    return make_evaluator(session, samples, pad_token_id=0)
