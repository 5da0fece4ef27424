"""Phase of a run that gives its rows their reference scores: made before step 1, or read from an earlier run's file."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from mobius.config.config import Config
from mobius.data.batches import Batch
from mobius.process.ranks import cache_folder
from mobius.reporting.events import table_row
from mobius.training.evaluation.evaluator import Evaluator
from mobius.training.phases import Run
from mobius.training.reference import (
    TRAINING,
    ReferenceScores,
    ScoreCache,
    ScoredBatches,
    Scorer,
    read_scores,
    steps_of,
    weight_files,
)
from mobius.training.reference_model import reference_weights

logger = logging.getLogger(__name__)

_EVALUATION: Final = "evaluation/"
"""Beginning of the name of an evaluation dataset's scores."""


def reference_batches(run: Run, evaluator: Evaluator | None) -> tuple[Iterator[Batch], dict[str, ReferenceScores]]:
    """Return the training batches with their reference scores, if the objective needs them, and the scores to save.

    Scores are made by a forward pass before step 1, or read: those of an earlier run on the same rows from a cache,
    those of a resumed run from its folder. Collective.
    """
    batches = run.data.batches
    if not run.session.run_setup.objective.needs_reference:
        return batches, {}
    evaluated = {} if evaluator is None else {_EVALUATION + name: n for name, n in evaluator.num_sequences.items()}
    sizes = {TRAINING: sum(each.tokenized.num_sequences for each in run.data.prepared.training), **evaluated}
    if run.resume is not None:
        # A run may be resumed in another folder, to which the scores are copied.
        scores = read_scores([run.output.save_dir, run.resume.reader.path.parent], sizes)
    else:
        cache, needed = _cache_of(run), {name: _numbers(batches) for name, batches in _parts(run, evaluator)}
        scores = cache.read(needed, run.session.all_ranks)
        if not scores:
            scores = _score(run, evaluator, sizes)
            if run.session.is_first:
                cache.write(scores)
    if evaluator is not None:
        evaluator.reference = {name: scores[_EVALUATION + name] for name in evaluator.datasets}
    return ScoredBatches(batches, scores[TRAINING]), scores


def _parts(run: Run, evaluator: Evaluator | None) -> Iterator[tuple[str, Iterator[Batch]]]:
    """Yield the batches that need scores, by name: the steps of the run, and each dataset of the evaluation."""
    data, config = run.data, run.config
    has_all = all(each.entry.weight >= 1 for each in data.prepared.training)
    num_steps = config.optim.num_steps if config.evaluation.do_train else 0
    steps = data.make_batches(is_packed=data.prepared.is_packed)
    yield TRAINING, steps_of(steps, num_steps, has_all_in_an_epoch=has_all)
    for name, batches in {} if evaluator is None else evaluator.datasets.items():
        yield _EVALUATION + name, iter(batches)


def _numbers(batches: Iterator[Batch]) -> npt.NDArray[np.int64]:
    """Return the numbers of the sequences in `batches`, without duplicates."""
    every = [batch.sequence_numbers for batch in batches if batch.sequence_numbers is not None]
    numbers = np.unique(np.concatenate([each.ravel() for each in every] or [np.empty(0, np.int64)]))
    return numbers[numbers >= 0]


def _cache_of(run: Run) -> ScoreCache:
    """Return the cache for the run's tokens, reference weights and number format."""
    config, adapter = run.config, run.config.adapters.adapter_path
    folders = run.model.reference or run.model.folder, None if adapter is None else Path(adapter).expanduser()
    evaluated = run.data.evaluation_fingerprint() if config.evaluation.evaluates else None
    facts = [
        *(run.data.fingerprint(), evaluated, weight_files(*folders) or config.optim.seed),
        *(config.model, config.data.seq_length, config.pipeline.compile, run.session.run_setup.device.type),
    ]
    return ScoreCache.of(cache_folder() / "scores", facts, layout=_layout(config, run.start.ranks.num_replicas))


def _layout(config: Config, num_replicas: int) -> str:
    pipeline, packing = config.pipeline, config.data.packing.value
    microbatches = f"{pipeline.num_chunks} microbatches on each of {num_replicas} replicas"
    return f"{pipeline.batch_size} rows of a step, packing {packing}, seed {config.optim.seed}, {microbatches}"


def _score(run: Run, evaluator: Evaluator | None, sizes: dict[str, int]) -> dict[str, ReferenceScores]:
    """Score all rows by the initial weights, or by --reference_model, which is loaded for this time. Collective."""
    session, folder, start = run.session, run.model.reference, time.monotonic()
    by = "the initial weights"
    if folder is not None:
        session.activity.start_action("the weights of the reference model")
        session.stages.load_weights(reference_weights(session.run_setup, folder), progress=session.activity.progress)
        session.all_ranks.barrier()
        by = f"--reference_model {run.config.objective.reference_model}"
    scorer = Scorer(session)
    scores = {
        name: scorer.score(batches, sizes[name], is_training=name == TRAINING)
        for name, batches in _parts(run, evaluator)
    }
    if folder is not None:
        assert session.source is not None, "a new run loads its weights"
        session.activity.start_action("the weights of the trained model")
        session.all_ranks.barrier()
        session.stages.load_weights(session.source, progress=session.activity.progress)
        session.all_ranks.barrier()
    number, seconds = sum(int(np.isfinite(each).sum()) for each in scores.values()), time.monotonic() - start
    logger.info("%s", table_row("reference", f"{number:,} sequences scored in {seconds:.1f} s by {by}"))
    return scores
