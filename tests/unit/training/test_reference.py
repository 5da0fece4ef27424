"""Places of scores: the tokens of packed sequences of several datasets find their own."""

from __future__ import annotations

import numpy as np

from mobius.data.batches import TrainingBatches, balance_microbatches
from mobius.data.mixture import WeightedSamples
from mobius.data.token_store import TokenizedDataset, TokenizedSample
from mobius.training.reference import ScorePlaces, with_reference
from mobius.training.step_batches import target_rows


def datasets_of(*numbers: int) -> list[TokenizedDataset]:
    """Samples of one to three sequences; all tokens differ, and follow one another."""
    draw, token, result = np.random.default_rng(3), 1, []
    for number in numbers:
        samples = []
        for _ in range(number):
            lengths = tuple(draw.integers(2, 9, draw.integers(1, 4)).tolist())
            ids = np.arange(token, token + sum(lengths), dtype=np.int32)
            samples.append(TokenizedSample(ids, np.ones(len(ids), np.bool_), lengths))
            token += len(ids)
        result.append(TokenizedDataset.of_samples(samples))
    return result


def test_each_token_gets_its_own_score_wherever_its_sequence_is_packed() -> None:
    datasets = datasets_of(20, 13)
    places = ScorePlaces.of(datasets, of_tokens=True)
    scores = np.concatenate([dataset.input_ids for dataset in datasets]).astype(np.float32)
    assert places.size == len(scores)
    parts = [WeightedSamples(dataset, 1.0, np.arange(len(dataset))) for dataset in datasets]
    batches = TrainingBatches(parts, batch_size=4, seq_length=48, pad_token_id=0, seed=1, is_packed=True, num_epochs=2)
    for batch in batches:
        for each in (batch, balance_microbatches(batch, 2)):
            found = with_reference(each, scores, places).token_values["reference"]
            np.testing.assert_array_equal(found, each.input_ids)


def test_scores_of_sequences_are_found_by_their_numbers() -> None:
    datasets = datasets_of(5, 4)
    places = ScorePlaces.of(datasets, of_tokens=False)
    parts = [WeightedSamples(dataset, 1.0, np.arange(len(dataset))) for dataset in datasets]
    batch = next(TrainingBatches(parts, batch_size=2, seq_length=48, pad_token_id=0, seed=1, is_packed=True))
    assert places.size == sum(dataset.num_sequences for dataset in datasets)
    firsts = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(each.all_sequence_offsets) for each in datasets]))])
    found = with_reference(batch, (1 + firsts[:-1]).astype(np.float32), places).sequence_values["reference"]
    assert batch.sequences is not None
    for row, place in zip(*np.nonzero(found), strict=True):
        assert batch.input_ids[row, batch.sequences[row] == place][0] == found[row, place]


def test_values_of_sequences_are_told_from_those_of_tokens_in_rows_with_as_many_places_as_tokens() -> None:
    (dataset,) = datasets_of(6)
    parts = [WeightedSamples(dataset, 1.0, np.arange(len(dataset)))]
    batches = TrainingBatches(
        parts, batch_size=2, seq_length=32, pad_token_id=0, seed=1, is_packed=False, max_sequences=31
    )
    assert batches.max_documents == 32
    batch = next(batches)
    for of_tokens in (True, False):
        places = ScorePlaces.of([dataset], of_tokens=of_tokens)
        rows = target_rows(with_reference(batch, np.ones(places.size, np.float32), places))
        assert ("reference" in rows.token_values, "reference" in rows.sequence_values) == (of_tokens, not of_tokens)
