"""KL of a step: how far the weights have moved from the reference, on mismatched answers (`data/mismatched.py`).

    rows of a step -> its mismatched answers, forward only, by the current weights -> mean log-ratio, at least 0
                   -> a value of each sequence of the rows -> the step

Mismatched answers have no gradient, so they are in no row of a step: the pass costs one forward of as many tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from mobius.data.batches import Batch
from mobius.data.mismatched import MismatchedAnswers
from mobius.engine.step_inputs import StepBatch
from mobius.models.loss import EXISTS
from mobius.objectives.objective import KL
from mobius.training.reference import ReferenceScores, ScorePlaces, Scorer

_ACTION: Final = "the log-probabilities of mismatched answers"


def mismatched(name: str) -> str:
    """Return the name of the scores of a dataset's mismatched answers."""
    return f"{name}, mismatched"


class Divergence:
    """Estimates KL for the samples of a step or of an evaluation."""

    def __init__(
        self, scorer: Scorer, answers: MismatchedAnswers, reference: ReferenceScores, *, is_training: bool
    ) -> None:
        """`reference` has the score of each sample's mismatched answer by the sample's number."""
        self._scorer, self._answers, self._reference = scorer, answers, reference
        self._is_training = is_training

    def estimate(self, numbers: npt.NDArray[np.int64]) -> float:
        """Return the mean log-ratio of the mismatched answers of samples, or 0 if it is below. Collective.

        `numbers` has a number for each sample, and -1 for none.
        """
        chosen, counts = np.unique(numbers[numbers >= 0], return_counts=True)
        batches = (replace(each, sequence_numbers=_places(each, chosen)) for each in self._answers.batches(chosen))
        scores = self._scorer.score(batches, ScorePlaces(len(chosen)), is_training=self._is_training, action=_ACTION)
        ratios = scores.astype(np.float64) - self._reference[chosen]
        return max(0.0, float((ratios * counts).sum() / counts.sum()))


def _places(batch: Batch, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the places of a batch's samples in `chosen`; -1 for none."""
    numbers = numbers_of(batch)
    return np.where(numbers < 0, -1, np.searchsorted(chosen, numbers))


class StepDivergence:
    """Batches of the steps; before a step, its rows get KL by the weights of that time."""

    def __init__(self, batches: Iterator[Batch], divergence: Divergence) -> None:
        self._batches, self._divergence = batches, divergence
        self._coming = deque[npt.NDArray[np.int64]]()

    def __iter__(self) -> StepDivergence:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._coming.append(numbers_of(batch))
        return batch

    def complete(self, rows: StepBatch) -> StepBatch:
        """Return the rows of the next step with KL. Collective, between steps."""
        exists, kl = rows.sequence_values[EXISTS], self._divergence.estimate(self._coming.popleft())
        values = exists * kl
        values = values.pin_memory() if exists.is_pinned() else values
        return replace(rows, sequence_values={**rows.sequence_values, KL: values})


def numbers_of(batch: Batch) -> npt.NDArray[np.int64]:
    """Return the numbers of a batch's sequences, [rows, S]; -1 for none."""
    assert batch.sequence_numbers is not None, "samples with labels have sequences"
    return batch.sequence_numbers


def mismatched_steps(steps: Iterable[Batch], answers: MismatchedAnswers) -> Iterator[Batch]:
    """Yield the mismatched answers of each step in the rows that the step will play."""
    for batch in steps:
        numbers = numbers_of(batch)
        yield from answers.batches(np.unique(numbers[numbers >= 0]))
