"""Log-probabilities of evaluation samples, written as JSON lines (`mobius score`)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final

import numpy as np

from mobius.data.token_store import TokenizedDataset
from mobius.files.atomic_files import atomic_write
from mobius.training.evaluation.evaluator import Evaluator
from mobius.training.reference import ScorePlaces, Scorer
from mobius.training.session import Session

logger = logging.getLogger(__name__)

SCORES_FILE: Final = "scores.jsonl"


def write_sample_scores(session: Session, evaluator: Evaluator, folder: Path) -> list[str]:
    """Score every sample of the evaluation by the current weights and write a line for each; return the problems.

    A line has the dataset's name, the sample's number in it, and for each of its sequences (one; of a pair two) the
    log-probability of its targets and their number. Collective; the first rank writes.
    """
    scorer, lines = Scorer(session), list[str]()
    for name, tokenized, indices in evaluator.samples:
        scores = scorer.score(evaluator.datasets[name], ScorePlaces(tokenized.num_sequences), is_training=False)
        for index in range(len(tokenized)) if indices is None else indices.tolist():
            numbers = tokenized.sequence_numbers(index)
            line = {
                "dataset": name,
                "sample": index,
                "logps": [float(scores[number]) for number in numbers],
                "num_targets": _num_targets(tokenized, index),
            }
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    path = folder / SCORES_FILE
    if not session.is_first:
        return []
    try:
        with atomic_write(path) as partial:
            partial.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        return [f"--save_scores: {error}"]
    logger.info("log-probabilities of %d samples saved to %s", len(lines), path)
    return []


def _num_targets(tokenized: TokenizedDataset, index: int) -> list[int]:
    """Return the number of targets of each sequence of a sample; nothing predicts a sequence's first token."""
    sample = tokenized.sample(index)
    parts = np.split(sample.is_target, np.cumsum(sample.lengths)[:-1])
    return [int(np.count_nonzero(part[1:])) for part in parts]
