import re
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from harness.samples import dataset_of

from mobius.data.batches import Batch, EvaluationBatches, TrainingBatches, balance_microbatches
from mobius.data.mixture import WeightedSamples
from mobius.data.packing import PACKING_WINDOW, attention_cost
from mobius.data.token_store import TokenizedDataset
from mobius.errors import DataError

PAD = 99


def dataset(*rows: tuple[list[int], list[int]]) -> TokenizedDataset:
    return dataset_of([(np.array(ids, dtype=np.int32), np.array(is_target, dtype=np.bool_)) for ids, is_target in rows])


def numbered(num_samples: int) -> TokenizedDataset:
    """Sample i is the tokens [i, i], the second a target."""
    return dataset(*(([index, index], [0, 1]) for index in range(num_samples)))


def batches(tokenized: TokenizedDataset, batch_size: int, seq_length: int = 4, seed: int = 42) -> TrainingBatches:
    return TrainingBatches(
        [WeightedSamples(tokenized)],
        batch_size=batch_size,
        seq_length=seq_length,
        pad_token_id=PAD,
        seed=seed,
        is_packed=False,
    )


def order(stream: TrainingBatches, num_batches: int) -> list[list[int]]:
    return [batch.input_ids[:, 0].tolist() for batch in islice(stream, num_batches)]


@pytest.mark.parametrize(
    ("ids", "is_target", "labels"),
    [
        ([5, 6, 7], [0, 1, 1], [-100, 6, 7, -100, -100]),
        ([5, 6, 7], [1, 1, 1], [-100, 6, 7, -100, -100]),  # the first token of a row is never a target
        ([5, 6, PAD], [0, 1, 1], [-100, 6, PAD, -100, -100]),  # a target that equals the padding token counts
    ],
)
def test_rows_are_padded_on_the_right_and_labelled_by_the_mask(
    ids: list[int], is_target: list[int], labels: list[int]
) -> None:
    batch = next(batches(dataset((ids, is_target)), 1, seq_length=5))
    assert batch.input_ids.tolist() == [[*ids, PAD, PAD]]
    assert batch.labels.tolist() == [labels]
    assert (batch.num_targets, batch.num_tokens) == (2, 3)
    assert (batch.input_ids.dtype, batch.labels.dtype) == (np.int64, np.int64)


def test_an_epoch_has_every_sample_once_and_each_epoch_another_order() -> None:
    stream = batches(numbered(20), 5)
    first, second = ([index for batch in order(stream, 4) for index in batch] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first != list(range(20))


def test_all_ranks_draw_the_same_order_from_the_seed() -> None:
    tokenized = numbered(13)
    assert order(batches(tokenized, 4), 10) == order(batches(numbered(13), 4), 10)
    assert order(batches(tokenized, 4), 10) != order(batches(tokenized, 4, seed=43), 10)


def test_a_batch_larger_than_the_dataset_repeats_whole_epochs() -> None:
    (batch,) = order(batches(numbered(3), 8), 1)
    assert sorted(batch[:3]) == sorted(batch[3:6]) == [0, 1, 2]
    assert len(batch) == 8


def of_lengths(lengths: Sequence[int], first: int = 0) -> TokenizedDataset:
    """Sample i is its length times the token first + i, all targets."""
    return dataset_of(
        [(np.full(n, first + i, dtype=np.int32), np.ones(n, dtype=np.bool_)) for i, n in enumerate(lengths)]
    )


def drawn_lengths(number: int, longest: int = 64) -> list[int]:
    return np.random.default_rng(number).integers(2, longest, number, endpoint=True).tolist()


def packed(*parts: TokenizedDataset | WeightedSamples, batch_size: int = 4, **changes: Any) -> TrainingBatches:
    options: dict[str, Any] = {"seq_length": 64, "pad_token_id": -1, "seed": 42, "is_packed": True}
    weighted = [part if isinstance(part, WeightedSamples) else WeightedSamples(part) for part in parts]
    return TrainingBatches(weighted, batch_size=batch_size, **(options | changes))


def documents_of(batch: Batch) -> list[tuple[int, int]]:
    """Token and length of each document, read from the tokens: no two neighbours have the same one."""
    found = list[tuple[int, int]]()
    for row in batch.input_ids:
        bounds = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
        found += [(int(row[start]), stop - start) for start, stop in pairwise(bounds)]
    return [document for document in found if document[0] != -1]


@pytest.mark.parametrize("number", [1, 2, 7, 300])
@pytest.mark.parametrize("num_epochs", [1, 2])
def test_packed_epochs_have_every_sample_whole_and_exactly_so_often(number: int, num_epochs: int) -> None:
    lengths = drawn_lengths(number)
    counts = Counter(
        document for batch in packed(of_lengths(lengths), num_epochs=num_epochs) for document in documents_of(batch)
    )
    assert counts == dict.fromkeys(enumerate(lengths), num_epochs)


def test_windows_hold_every_sample_of_an_epoch_once() -> None:
    lengths = drawn_lengths(2 * PACKING_WINDOW + 1, longest=9)
    stream = packed(of_lengths(lengths), batch_size=64, num_epochs=1)
    assert Counter(token for batch in stream for token, _ in documents_of(batch)) == dict.fromkeys(
        range(len(lengths)), 1
    )


def test_packed_rows_say_their_documents_and_mask_the_first_token_of_each() -> None:
    stream = packed(of_lengths([5, 3, 2]), batch_size=1, seq_length=12, num_epochs=1)
    (batch,) = stream
    assert batch.document_lengths == ((5, 3, 2),)
    assert batch.input_ids.tolist() == [[0] * 5 + [1] * 3 + [2] * 2 + [-1] * 2]
    assert batch.labels.tolist() == [[-100, 0, 0, 0, 0, -100, 1, 1, -100, 2, -100, -100]]
    assert (batch.num_samples, batch.num_tokens, batch.num_targets) == (3, 10, 7)
    assert stream.max_documents is not None
    assert stream.max_documents >= 4, "the padding is a document"


def test_targets_of_packed_samples_are_those_of_the_samples() -> None:
    (batch,) = packed(dataset(([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 1])), batch_size=1, seq_length=6, num_epochs=1)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, -1]]
    assert batch.labels.tolist() == [[-100, 6, 7, -100, 9, -100]]


def test_documents_agree_with_the_tokens_and_with_the_limit() -> None:
    stream = packed(of_lengths(drawn_lengths(500)))
    for given in islice(stream, 60):
        batch = balance_microbatches(given, 2)
        assert batch.document_lengths is not None
        assert [length for row in batch.document_lengths for length in row] == [
            length for _, length in documents_of(batch)
        ]
        assert max(len(row) + (sum(row) < 64) for row in batch.document_lengths) <= (stream.max_documents or 0)
        assert batch.num_samples == sum(map(len, batch.document_lengths))


def test_rows_of_long_and_of_short_samples_mix() -> None:
    lengths = np.exp(np.random.default_rng(0).uniform(0.7, 4, 4000)).astype(int).tolist()
    batches_of_epoch = list(packed(of_lengths(lengths), batch_size=16, num_epochs=1))[:-1]
    counts = [batch.num_samples for batch in batches_of_epoch]
    assert sum(counts[: len(counts) // 2]) == pytest.approx(sum(counts) / 2, rel=0.1)


def test_rows_without_packing_have_no_documents() -> None:
    stream = batches(numbered(3), 2)
    assert next(stream).document_lengths is None
    assert stream.max_documents is None
    assert next(stream).num_samples == 2


def test_a_step_has_the_same_rows_in_whatever_microbatches() -> None:
    lengths = drawn_lengths(400)
    costs = Counter[int]()
    for one in islice(packed(of_lengths(lengths), batch_size=8), 30):
        for number in (2, 4):
            batch = balance_microbatches(one, number)
            assert sorted(batch.input_ids.tolist()) == sorted(one.input_ids.tolist())
            assert sorted(batch.labels.tolist()) == sorted(one.labels.tolist())
            costs[number] += most_cost(batch, number)
            costs[-number] += most_cost(one, number)
    assert costs[2] < costs[-2]
    assert costs[4] < costs[-4]


def most_cost(batch: Batch, num_microbatches: int) -> int:
    assert batch.document_lengths is not None
    costs = [attention_cost(row, batch.input_ids.shape[1]) for row in batch.document_lengths]
    return int(np.array(costs).reshape(num_microbatches, -1).sum(axis=1).max())


def test_a_step_has_the_same_order_without_packing_in_whatever_microbatches() -> None:
    for batch in islice(packed(of_lengths(drawn_lengths(40)), is_packed=False), 20):
        assert balance_microbatches(batch, 2) is batch


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("number", [1, 5, 90])
def test_seek_reaches_any_step_of_mixed_epochs(number: int, is_packed: bool) -> None:
    def fresh() -> TrainingBatches:
        parts = of_lengths(drawn_lengths(number)), WeightedSamples(of_lengths(drawn_lengths(7), 1000), 0.4)
        return packed(*parts, is_packed=is_packed)

    expected = [(batch.input_ids.tolist(), batch.epoch) for batch in islice(fresh(), 40)]
    used = fresh()
    for step in (37, 0, 11, 5, 30, 4):
        other = fresh()
        for stream in (used, other):
            stream.seek(step)
            found = [(batch.input_ids.tolist(), batch.epoch) for batch in islice(stream, 3)]
            assert found == expected[step : step + 3]


@pytest.mark.parametrize("is_packed", [True, False])
def test_epochs_end_with_a_step_that_is_filled_with_empty_rows(is_packed: bool) -> None:
    stream = packed(of_lengths([60] * 7), batch_size=4, num_epochs=1, is_packed=is_packed)
    assert stream.num_steps == 2
    full, last = stream
    assert (full.num_samples, last.num_samples) == (4, 3)
    empty = [row for row in range(4) if (last.input_ids[row] == -1).all()]
    assert len(empty) == 1
    assert (last.labels[empty[0]] == -100).all()
    assert last.document_lengths is None or last.document_lengths[empty[0]] == ()
    assert (full.epoch, last.epoch) == (pytest.approx(4 / 7), 1)
    assert list(stream) == []


@pytest.mark.parametrize(
    ("num_epochs", "num_steps"), [(1, 10), (0.1, 1), (0.11, 2), (0.3, 3), (2.5, 25), (3, 30), (0.001, 1)]
)
@pytest.mark.parametrize("is_packed", [True, False])
def test_parts_of_an_epoch_are_counted_in_rows_and_rounded_up(
    num_epochs: float, num_steps: int, is_packed: bool
) -> None:
    stream = packed(of_lengths([60] * 10), batch_size=1, num_epochs=num_epochs, is_packed=is_packed)
    assert stream.num_steps == num_steps
    steps = list(stream)
    assert len(steps) == num_steps
    assert steps[-1].epoch == pytest.approx(num_steps / 10)


def test_without_a_number_of_epochs_there_is_no_end() -> None:
    stream = packed(of_lengths([60] * 3), batch_size=2)
    assert stream.num_steps is None
    assert [batch.epoch for batch in islice(stream, 6)] == pytest.approx([2 / 3, 4 / 3, 2, 8 / 3, 10 / 3, 4])
    assert stream.num_epochs_of(6) == pytest.approx(4)


def test_a_mixture_is_trained_by_weight() -> None:
    parts = [
        WeightedSamples(of_lengths(drawn_lengths(600), 0)),
        WeightedSamples(of_lengths(drawn_lengths(900), 10_000), 1 / 3),
        WeightedSamples(of_lengths(drawn_lengths(200), 20_000), 2.5),
    ]
    counts = Counter(
        token // 10_000 for batch in packed(*parts, num_epochs=1) for token, _ in merged(documents_of(batch), parts)
    )
    for part, expected in enumerate((600, 300, 500)):
        assert counts[part] == pytest.approx(expected, rel=0.01)


def merged(documents: list[tuple[int, int]], parts: Sequence[WeightedSamples]) -> list[tuple[int, int]]:
    """Documents with those apart that are the same sample twice in a row."""
    lengths = {
        10_000 * number + index: int(length)
        for number, part in enumerate(parts)
        for index, length in enumerate(part.tokenized.lengths)
    }
    return [(token, lengths[token]) for token, length in documents for _ in range(length // lengths[token])]


def test_only_the_given_samples_are_trained_on() -> None:
    part = WeightedSamples(of_lengths(drawn_lengths(20)), indices=np.array([3, 4, 17]))
    assert {token for batch in packed(part, num_epochs=1) for token, _ in documents_of(batch)} == {3, 4, 17}


@pytest.mark.parametrize("is_packed", [True, False])
def test_samples_as_long_as_a_row_fill_it(is_packed: bool) -> None:
    (batch,) = packed(of_lengths([64] * 4), num_epochs=1, is_packed=is_packed)
    assert batch.num_tokens == batch.input_ids.size
    assert sorted(token for token, _ in documents_of(batch)) == [0, 1, 2, 3]


@pytest.mark.parametrize("is_packed", [True, False])
def test_an_epoch_without_a_sample_of_a_dataset_or_of_any_is_passed_by(is_packed: bool) -> None:
    halves = [WeightedSamples(of_lengths([9], first), 0.5) for first in (1, 2)]
    (batch,) = packed(*halves, num_epochs=2, is_packed=is_packed)
    assert sorted(documents_of(batch)) == [(1, 9), (2, 9)]
    assert next(packed(*halves, is_packed=is_packed)).epoch > 1
    with pytest.raises(DataError, match=r"--num_train_epochs 1: .* no sample"):
        packed(*halves, num_epochs=1, is_packed=is_packed)


@pytest.mark.parametrize("is_packed", [True, False])
def test_an_empty_mixture_is_refused_with_its_numbers(is_packed: bool) -> None:
    for part in (WeightedSamples(of_lengths([9]), 0.001), WeightedSamples(of_lengths([9]), indices=np.array([], int))):
        with pytest.raises(DataError, match=r"empty mixture: .* \([01] x [\d.]+\), at least 1 .* Raise the weights"):
            packed(part, is_packed=is_packed)


def test_facts_are_the_averages_of_all_rows() -> None:
    lengths = drawn_lengths(500)
    stream = packed(of_lengths(lengths), batch_size=1, num_epochs=1)
    rows = [row for batch in stream for row in batch.document_lengths or ()]
    squares = sum(sum(n * n for n in row) + (64 - sum(row)) ** 2 for row in rows)
    assert stream.row_statistics.samples_per_row == pytest.approx(500 / len(rows))
    assert stream.row_statistics.padding == pytest.approx(1 - sum(lengths) / (64 * len(rows)))
    assert stream.row_statistics.attention_length == pytest.approx(squares / (64 * len(rows)))
    assert packed(of_lengths(lengths), is_packed=False).row_statistics.attention_length == 64


def test_a_line_says_how_full_rows_are_and_which_batch_keeps_the_samples_of_a_step() -> None:
    corpus = of_lengths([16] * 400)
    assert packed(corpus, batch_size=64).describe(4) == (
        "packing: 4.0 samples in a row of 64 tokens, 0.0 % padding; a step of 64 rows holds some 256 samples "
        "(--batch_size 16 keeps it at some 64; without packing it is 64)"
    )
    assert packed(corpus, batch_size=12).describe(12).endswith("a step of 12 rows holds some 48 samples")
    assert packed(corpus, is_packed=False).describe(1) == "no packing: one sample in a row of 64 tokens, 75.0 % padding"


@pytest.mark.grid
@pytest.mark.parametrize("length", [9, 12, 16, 21, 32])
@pytest.mark.parametrize("unit", [1, 2, 4, 6])
def test_a_batch_that_is_said_to_keep_the_samples_of_a_step_does(length: int, unit: int) -> None:
    corpus, told = of_lengths([length] * 600), 0
    for size in range(unit, 65, unit):
        text = packed(corpus, batch_size=size).describe(unit)
        found = re.search(r"--batch_size (\d+) keeps it at some (\d+); without packing it is (\d+)", text)
        if found is not None:
            smaller, kept, without = map(int, found.groups())
            told += 1
            held = [batch.num_samples for batch in packed(corpus, batch_size=smaller, num_epochs=1)][:-1]
            assert smaller % unit == 0
            assert without == size
            assert sum(held) / len(held) == pytest.approx(kept, rel=0.03)
            assert kept == pytest.approx(size, rel=0.1, abs=0.5)
    assert told > 0


def test_short_samples_fill_long_rows() -> None:
    lengths = [50] * (655 * 32)
    assert packed(of_lengths(lengths), seq_length=32_768).row_statistics.padding < 0.02


def test_a_step_deep_in_the_data_is_sought_by_lengths_in_little_time() -> None:
    stream = packed(of_lengths(drawn_lengths(50_000)), batch_size=64)
    started = time.perf_counter()
    stream.seek(1000)
    assert next(stream).epoch > 2
    assert time.perf_counter() - started < 5  # some 0.2 s on an idle core


def evaluation_batches(tokenized: TokenizedDataset, *, batch_size: int = 2, **more: Any) -> EvaluationBatches:
    settings: dict[str, Any] = {"seq_length": 8, "pad_token_id": PAD, "max_documents": None} | more
    return EvaluationBatches(tokenized, batch_size=batch_size, **settings)


def test_evaluation_takes_each_sample_once_in_order_and_fills_the_last_batch_with_empty_rows() -> None:
    found = evaluation_batches(numbered(5))
    assert len(found) == 3
    for _ in range(2):  # however often they are gone through
        batches = list(found)
        assert [batch.input_ids[:, 0].tolist() for batch in batches] == [[0, 1], [2, 3], [4, PAD]]
        assert [batch.num_samples for batch in batches] == [2, 2, 1]
        assert [(batch.num_tokens, batch.num_targets) for batch in batches] == [(4, 2), (4, 2), (2, 1)]
        assert [batch.epoch for batch in batches] == [0.4, 0.8, 1.0]
        assert all(batch.document_lengths is None for batch in batches)
        assert batches[-1].labels[1].tolist() == [-100] * 8
        assert batches[-1].input_ids.shape == (2, 8)


def test_evaluation_takes_the_samples_that_are_named() -> None:
    batches = list(evaluation_batches(numbered(9), indices=np.array([7, 2, 5])))
    assert [batch.input_ids[:, 0].tolist() for batch in batches] == [[7, 2], [5, PAD]]


@pytest.mark.parametrize("max_documents", [3, 4, 9])
def test_packed_evaluation_holds_each_sample_once_and_no_more_documents_than_a_run(max_documents: int) -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(2, 5, 200).tolist()
    samples = dataset(*(([index] * length, [1] * length) for index, length in enumerate(lengths)))
    batches = list(evaluation_batches(samples, batch_size=4, max_documents=max_documents))
    seen = list[int]()
    firsts = list[int]()
    for batch in batches:
        assert batch.document_lengths is not None
        assert len(batch.document_lengths) == len(batch.input_ids) == 4
        for row, document_lengths in zip(batch.input_ids, batch.document_lengths, strict=True):
            assert len(document_lengths) <= max_documents - 1, "the padding behind them is one more"
            starts = np.cumsum([0, *document_lengths])[:-1]
            own = row[starts].tolist()
            assert own == sorted(own)
            assert [lengths[index] for index in own] == list(document_lengths)
            seen += own
            firsts += own[:1]
    assert sorted(seen) == list(range(200))
    assert firsts == sorted(firsts)
    assert sum(batch.num_targets for batch in batches) == sum(lengths) - 200
    assert len(batches) < 40, "samples share rows"
