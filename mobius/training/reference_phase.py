"""Phase of a run that gives its rows their reference scores: made before step 1, or read from an earlier run's file."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from mobius.config.config import Config
from mobius.data.batches import Batch
from mobius.data.mismatched import MismatchedAnswers
from mobius.objectives.objective import REFERENCE
from mobius.process.ranks import cache_folder
from mobius.reporting.events import table_row
from mobius.training.divergence import Divergence, StepDivergence, mismatched, mismatched_steps
from mobius.training.evaluation.evaluator import Evaluator
from mobius.training.phases import Run
from mobius.training.reference import (
    TRAINING,
    ReferenceScores,
    ScoreCache,
    ScoredBatches,
    ScorePlaces,
    Scorer,
    read_scores,
    steps_of,
    weight_files,
    with_reference,
)
from mobius.training.reference_model import reference_weights
from mobius.training.teacher import TaughtBatches, Teacher
from mobius.training.trainer import CompleteRows
from mobius.units import format_rounded

logger = logging.getLogger(__name__)

_EVALUATION: Final = "evaluation/"
"""Beginning of the name of an evaluation dataset's scores."""


@dataclass(frozen=True)
class ScoredData:
    """Training batches with the values that their objective needs."""

    batches: Iterator[Batch]
    scores: Mapping[str, ReferenceScores]
    """Scores to save; {} if there are none."""
    complete_rows: CompleteRows | None = None
    """As in `Trainer`."""


def scored_data(run: Run, evaluator: Evaluator | None) -> ScoredData:
    """Return the training batches, with reference scores or a teacher's numbers if the objective needs them.

    Reference scores are made by a forward pass before step 1, or read: those of an earlier run on the same rows from a
    cache, those of a resumed run from its folder. Collective.
    """
    batches, objective = run.data.batches, run.session.run_setup.objective
    if run.teacher is not None:
        return _taught(run, run.teacher, evaluator)
    of_tokens = REFERENCE in objective.token_values
    is_single_step = of_tokens and evaluator is None and run.config.optim.num_steps == 1
    if not objective.needs_reference or is_single_step:
        return ScoredData(batches, {})
    samples = () if evaluator is None else evaluator.samples
    datasets = {_EVALUATION + name: [tokenized] for name, tokenized, _ in samples}
    datasets[TRAINING] = [each.tokenized for each in run.data.prepared.training]
    answers = _mismatched_answers(run, evaluator)
    datasets |= {mismatched(name): datasets[name] for name in answers}
    places = {name: ScorePlaces.of(each, of_tokens=of_tokens) for name, each in datasets.items()}
    if run.resume is not None:
        # A run may be resumed in another folder, to which the scores are copied.
        sizes = {name: each.size for name, each in places.items()}
        scores = read_scores([run.output.save_dir, run.resume.reader.path.parent], sizes)
    else:
        cache = _cache_of(run, of_tokens=of_tokens)
        works = {name: _work_of(batches, places[name]) for name, batches in _parts(run, evaluator, answers)}
        scores = cache.read({name: work.places for name, work in works.items()}, run.session.all_ranks)
        if not scores:
            _announce(run, works)
            scores = _score(run, _parts(run, evaluator, answers), places)
            if run.session.is_first:
                cache.write(scores)
    if evaluator is not None:
        names = {name: _EVALUATION + name for name in evaluator.datasets}
        evaluator.complete = {
            name: partial(with_reference, scores=scores[stored], places=places[stored])
            for name, stored in names.items()
        }
    scored = ScoredBatches(batches, scores[TRAINING], places[TRAINING])
    if not answers:
        return ScoredData(scored, scores)
    divergences = {
        name: Divergence(Scorer(run.session), each, scores[mismatched(name)], is_training=name == TRAINING)
        for name, each in answers.items()
    }
    if evaluator is not None:
        evaluator.divergences = {name: divergences[_EVALUATION + name] for name in evaluator.datasets}
    steps = StepDivergence(scored, divergences[TRAINING])
    return ScoredData(steps, scores, steps.complete)


def _taught(run: Run, teacher: Teacher, evaluator: Evaluator | None) -> ScoredData:
    """Return the training batches with the teacher's numbers."""
    setup = run.session.run_setup
    stages = setup.plan.local_stages(setup.ranks.pipeline_rank)
    has_head = setup.plan.spreads_head or any(setup.plan.cuts[stage].is_last for stage in stages)
    if evaluator is not None:
        evaluator.complete = {
            name: partial(teacher.teach, places=places, has_head=has_head)
            for name, places in zip(evaluator.datasets, teacher.evaluation, strict=True)
        }
    return ScoredData(TaughtBatches(run.data.batches, teacher, has_head=has_head), {})


def _mismatched_answers(run: Run, evaluator: Evaluator | None) -> dict[str, MismatchedAnswers]:
    """Return the mismatched answers of the training data and of each evaluation; {} if the objective needs none."""
    if not run.session.run_setup.objective.needs_divergence:
        return {}
    training = [each.tokenized for each in run.data.prepared.training]
    rows = run.session.run_setup.result.request.microbatch_rows
    shared = rows * run.start.ranks.num_replicas
    answers = {TRAINING: MismatchedAnswers(training, run.data.batches.row_format, row_multiple=shared)}
    if evaluator is not None:
        for name, tokenized, _ in evaluator.samples:
            own_format = evaluator.datasets[name].row_format
            answers[_EVALUATION + name] = MismatchedAnswers([tokenized], own_format, row_multiple=rows)
    return answers


def _parts(
    run: Run, evaluator: Evaluator | None, answers: Mapping[str, MismatchedAnswers]
) -> Iterator[tuple[str, Iterator[Batch]]]:
    """Yield the batches that need scores, by name: the steps of the run, and each dataset of the evaluation."""
    data, config = run.data, run.config
    has_all = all(each.entry.weight >= 1 for each in data.prepared.training)
    num_steps = config.optim.num_steps if config.evaluation.do_train else 0

    def steps() -> Iterator[Batch]:
        batches = data.make_batches(is_packed=data.prepared.is_packed)
        return steps_of(batches, num_steps, has_all_in_an_epoch=has_all)

    yield TRAINING, steps()
    if answers:
        yield mismatched(TRAINING), mismatched_steps(steps(), answers[TRAINING])
    for given, batches in {} if evaluator is None else evaluator.datasets.items():
        name = _EVALUATION + given
        yield name, iter(batches)
        if answers:
            yield mismatched(name), answers[name].batches(batches.indices)


@dataclass(frozen=True)
class _Work:
    """Work of a pass over batches."""

    places: npt.NDArray[np.int64]
    """Places of the scores, without duplicates."""
    num_tokens: int
    num_rows: int


def _work_of(batches: Iterator[Batch], places: ScorePlaces) -> _Work:
    """Return the work of a pass that plays the batches with new scores."""
    is_needed, num_tokens, num_rows = np.zeros(places.size + 1, dtype=np.bool_), 0, 0
    is_needed[-1] = True  # stands for none, -1
    for batch in batches:
        if not is_needed[own := places.in_batch(batch)].all():
            is_needed[own] = True
            num_tokens, num_rows = num_tokens + batch.num_tokens, num_rows + len(batch.input_ids)
    return _Work(np.flatnonzero(is_needed[:-1]), num_tokens, num_rows)


def _announce(run: Run, works: Mapping[str, _Work]) -> None:
    """Log the work of the pass, with its seconds if a step is predicted."""
    result, text = run.session.run_setup.result, f"{sum(work.num_tokens for work in works.values()):,} tokens to score"
    if (seconds := result.pass_seconds) is not None:
        replicas = run.start.ranks.num_replicas  # share the rows of a step, and play all rows of an evaluation
        rows = sum(work.num_rows * (replicas if _EVALUATION in name else 1) for name, work in works.items())
        text += f" before step 1: {format_rounded(seconds * rows / run.config.pipeline.batch_size)} s as predicted"
    logger.info("%s", table_row("reference", text))


def _cache_of(run: Run, *, of_tokens: bool) -> ScoreCache:
    """Return the cache for the run's tokens, reference weights and number format."""
    config, adapter = run.config, run.config.adapters.adapter_path
    folders = run.model.reference or run.model.folder, None if adapter is None else Path(adapter).expanduser()
    evaluated = run.data.evaluation_fingerprint() if config.evaluation.evaluates else None
    prepared = run.data.prepared  # the fingerprints are of a few samples' tokens, names of cache folders of all content
    facts = [
        *(dataset.cache_folder.name for dataset in (*prepared.training, *prepared.evaluation)),
        *(run.data.fingerprint(), evaluated, weight_files(*folders) or config.optim.seed),
        *(config.model, config.data.seq_length, config.pipeline.compile, run.session.run_setup.device.type, of_tokens),
    ]
    return ScoreCache.of(cache_folder() / "scores", facts, layout=_layout(config, run.start.ranks.num_replicas))


def _layout(config: Config, num_replicas: int) -> str:
    pipeline, packing = config.pipeline, config.data.packing.value
    microbatches = f"{pipeline.num_chunks} microbatches on each of {num_replicas} replicas"
    return f"{pipeline.batch_size} rows of a step, packing {packing}, seed {config.optim.seed}, {microbatches}"


def _score(
    run: Run, parts: Iterable[tuple[str, Iterator[Batch]]], places: Mapping[str, ScorePlaces]
) -> dict[str, ReferenceScores]:
    """Score all `parts` by the initial weights, or by --reference_model, which is loaded for this time. Collective."""
    session, folder, start = run.session, run.model.reference, time.monotonic()
    by = "the initial weights"
    if folder is not None:
        session.activity.start_action("the weights of the reference model")
        session.stages.load_weights(reference_weights(session.run_setup, folder), progress=session.activity.progress)
        session.all_ranks.barrier()
        by = f"--reference_model {run.config.objective.reference_model}"
    scorer = Scorer(session)
    scores = {
        name: scorer.score(batches, places[name], is_training=name in (TRAINING, mismatched(TRAINING)))
        for name, batches in parts
    }
    if folder is not None:
        assert session.source is not None, "a new run loads its weights"
        session.activity.start_action("the weights of the trained model")
        session.all_ranks.barrier()
        session.stages.load_weights(session.source, progress=session.activity.progress)
        session.all_ranks.barrier()
    number, seconds = sum(int(np.isfinite(each).sum()) for each in scores.values()), time.monotonic() - start
    unit = "sequences" if places[TRAINING].offsets is None else "tokens"
    logger.info("%s", table_row("reference", f"{number:,} {unit} scored in {seconds:.1f} s by {by}"))
    return scores
