"""Losses of answers with a label, from TRL 1.16's formulas; and the mismatched answers of which KL is the mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mobius.config.objective import LossType, ObjectiveConfig, ObjectiveName
from mobius.data.batches import RowFormat
from mobius.data.mismatched import MismatchedAnswers
from mobius.data.token_store import TokenizedDataset, TokenizedSample
from mobius.models.loss import EXISTS, IGNORE_INDEX, TargetRows
from mobius.objectives.objective import KL, REFERENCE, StepScale
from mobius.objectives.registry import make_objective
from mobius.objectives.sequences import SequenceObjective

GOOD, BAD = 0.4875026035, 0.4625701547
"""1 - sigmoid(0.1 * (1 - 0.5)), and 1 - sigmoid(0.1 * (0.5 + 1))."""


def rows(kl: float) -> tuple[torch.Tensor, TargetRows]:
    """A good answer with -20, which had -21, and a bad one with -25, which had -24."""
    targets, sequences = torch.full((1, 6), IGNORE_INDEX), torch.tensor([[0, 0, 0, 1, 1, 2]])
    targets[0, 1], targets[0, 3] = 5, 6
    logps = torch.tensor([[-7.0, -20.0, -7.0, -25.0, -7.0, -7.0]])
    exists = torch.tensor([[1.0, 1.0, 0.0]])
    values = {EXISTS: exists, REFERENCE: torch.tensor([[-21.0, -24.0, 0.0]]), "label": torch.tensor([[1.0, 0.0, 0.0]])}
    return logps, TargetRows(targets, {}, {**values, KL: kl * exists}, sequences, targets)


def objective(**options: float | LossType) -> SequenceObjective:
    made = make_objective(ObjectiveConfig(objective=ObjectiveName.KTO, **options))  # type: ignore[arg-type]
    assert isinstance(made, SequenceObjective)
    return made


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, GOOD + BAD),
        ({"desirable_weight": 2.0, "undesirable_weight": 3.0}, 2 * GOOD + 3 * BAD),
        ({"loss_type": LossType.APO_ZERO_UNPAIRED}, 0.4750208125 + 0.4750208125),
    ],
)
def test_answers_have_the_losses_of_the_formulas(options: dict[str, float], expected: float) -> None:
    sums = objective(**options).sums(*rows(0.5))
    assert float(sums["loss"]) == pytest.approx(expected, rel=1e-6)


def test_numbers_are_means_over_the_answers_of_a_label() -> None:
    made, (logps, own) = objective(), rows(0.5)
    counts = made.counts(own)
    assert counts == {"answers": 2.0, "good answers": 1.0, "bad answers": 1.0}
    sums = {name: float(value) for name, value in made.sums(logps, own).items()}
    scores = made.scores(sums, StepScale(2, counts=counts))
    expected = {"rewards/chosen": 0.1, "rewards/rejected": -0.1, "rewards/margins": 0.2, "kl": 0.5}
    assert scores == pytest.approx(
        {"loss": (GOOD + BAD) / 2, **expected, "logps/chosen": -20.0, "logps/rejected": -25.0}, rel=1e-5
    )


def sample(prompt: list[int], answer: list[int]) -> TokenizedSample:
    mask = np.array([False] * len(prompt) + [True] * len(answer))
    return TokenizedSample(
        np.array(prompt + answer, dtype=np.int32), mask, (len(mask),), {}, {"label": np.ones(1, np.float32)}
    )


def test_a_mismatched_answer_is_that_of_the_sample_before() -> None:
    """The first sample of each dataset gets the answer of the last; long ones are cut at a row's length."""
    datasets = [
        TokenizedDataset.of_samples([sample([1, 2], [3]), sample([4], [5, 6]), sample([7], [8, 9, 10, 11])]),
        TokenizedDataset.of_samples([sample([20], [21]), sample([22], [23, 24])]),
    ]
    format_ = RowFormat.of(datasets, batch_size=2, seq_length=5, pad_token_id=0, max_documents=3)
    batches = [*MismatchedAnswers(datasets, format_, row_multiple=1).batches(np.array([0, 1, 2, 3, 4]))]
    assert [batch.input_ids.shape for batch in batches] == [(2, 5), (1, 5)], "no row of padding"
    found = dict[int, tuple[list[int], list[int]]]()
    for batch in batches:
        assert batch.sequences is not None
        assert batch.sequence_numbers is not None
        for row, numbers in enumerate(batch.sequence_numbers):
            for place, number in enumerate(numbers):
                if number >= 0:
                    own = batch.sequences[row] == place
                    found[int(number)] = batch.input_ids[row][own].tolist(), batch.labels[row][own].tolist()
    assert found == {
        0: ([1, 2, 8, 9, 10], [-100, -100, 8, 9, 10]),
        1: ([4, 3], [-100, 3]),
        2: ([7, 5, 6], [-100, 5, 6]),
        3: ([20, 23, 24], [-100, 23, 24]),
        4: ([22, 21], [-100, 21]),
    }
