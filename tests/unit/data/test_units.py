"""Samples of several sequences, and values that data carry by name, from the files of a dataset to the batches."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.samples import dataset_of
from transformers import PreTrainedTokenizerBase

from mobius.data import token_store
from mobius.data.batches import Batch, EvaluationBatches, TrainingBatches, balance_microbatches, shard_batch
from mobius.data.datasets import PreparedData
from mobius.data.formats import FORMATS_OF, RecordFormat
from mobius.data.messages import Completion, Unit
from mobius.data.mixture import WeightedSamples
from mobius.data.token_store import DatasetWriter, TokenizedDataset, TokenizedSample, load_tokenized

LENGTH, PAD = 64, 0


def draw_unit(draw: np.random.Generator, number: int, *, most: int = 3, values: Sequence[str] = ()) -> TokenizedSample:
    """A unit of 1 to `most` sequences, whose tokens are 100 * its number + the place of the sequence + 1."""
    lengths = tuple(draw.integers(2, 12, draw.integers(1, most, endpoint=True)).tolist())
    tokens = np.concatenate([np.full(n, 100 * number + place + 1, np.int32) for place, n in enumerate(lengths)])
    return TokenizedSample(
        tokens,
        np.ones(len(tokens), np.bool_),
        lengths,
        {"weight": draw.random(len(tokens), dtype=np.float32)} if "weight" in values else {},
        {"score": draw.random(len(lengths), dtype=np.float32)} if "score" in values else {},
    )


def draw_units(seed: int, count: int = 40, *, values: Sequence[str] = ("weight", "score")) -> list[TokenizedSample]:
    draw = np.random.default_rng(seed)
    return [draw_unit(draw, number, values=values) for number in range(1, count + 1)]


def is_equal(first: TokenizedSample, second: TokenizedSample) -> bool:
    arrays = [
        [sample.input_ids, sample.is_target, sample.token_values, sample.sequence_values] for sample in (first, second)
    ]
    np.testing.assert_equal(*arrays)
    return first.lengths == second.lengths


def written(folder: Path, parts: Iterable[Sequence[TokenizedSample]]) -> TokenizedDataset:
    with DatasetWriter(folder) as writer:
        for part in parts:
            writer.append(TokenizedDataset.of_samples(part))
            writer.commit_part({})
        writer.finish({})
    found = load_tokenized(folder)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("values", [(), ("weight",), ("score",), ("weight", "score")])
def test_units_come_back_from_their_files_with_all_values(tmp_path: Path, values: Sequence[str]) -> None:
    units = draw_units(1, values=values)
    dataset = written(tmp_path / "a", [units[:7], units[7:]])
    assert dataset.num_sequences == sum(len(unit.lengths) for unit in units)
    assert dataset.max_sequences == 3
    assert all(is_equal(dataset.sample(index), unit) for index, unit in enumerate(units))
    numbers = [number for index in range(len(units)) for number in dataset.sequence_numbers(index)]
    assert numbers == list(range(dataset.num_sequences))
    assert all(dataset.sequence_lengths(index) == unit.lengths for index, unit in enumerate(units))


def test_a_value_that_begins_late_is_neutral_for_all_samples_before_and_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "_VALUES_AT_ONCE", 5)
    units = draw_units(2)
    for index in range(len(units)):
        if index < 20 or index % 3 == 0:
            units[index] = replace(units[index], token_values={}, sequence_values={})
    dataset = written(tmp_path / "a", [units[:10], units[10:22], units[22:30], [units[30]], units[31:]])
    for index, unit in enumerate(units):
        filled = replace(
            unit,
            token_values=unit.token_values or {"weight": np.ones(len(unit), np.float32)},
            sequence_values=unit.sequence_values or {"score": np.zeros(len(unit.lengths), np.float32)},
        )
        assert is_equal(dataset.sample(index), filled)


def test_an_unfinished_dataset_of_units_goes_on_behind_its_last_part(tmp_path: Path) -> None:
    units = draw_units(3)
    bare = [replace(unit, token_values={}) for unit in units[:10]]
    with DatasetWriter(tmp_path / "a") as writer:
        writer.append(TokenizedDataset.of_samples(bare))
        writer.commit_part({"done": 1})
        writer.append(TokenizedDataset.of_samples(units[:20]))  # begins the value, and is lost
    with DatasetWriter(tmp_path / "a") as writer:
        assert writer.progress == {"done": 1}
        writer.append(TokenizedDataset.of_samples([replace(unit, token_values={}) for unit in units[10:20]]))
        writer.commit_part({"done": 2})
        writer.append(TokenizedDataset.of_samples(units[20:30]))
        writer.commit_part({"done": 3})
    with DatasetWriter(tmp_path / "a") as writer:
        writer.append(TokenizedDataset.of_samples(units[30:]))
        writer.finish({})
    found = load_tokenized(tmp_path / "a")
    assert found is not None
    ones = [replace(unit, token_values={"weight": np.ones(len(unit), np.float32)}) for unit in units[:20]]
    assert all(is_equal(found[0].sample(index), unit) for index, unit in enumerate([*ones, *units[20:]]))


def test_a_dataset_without_values_has_the_files_of_former_versions_byte_for_byte(tmp_path: Path) -> None:
    rows = [(np.array([1, 2, 3], np.int32), np.array([False, True, True])), (np.array([4], np.int32), np.array([True]))]
    with DatasetWriter(tmp_path / "a") as writer:
        writer.append(dataset_of(rows))
        writer.finish({"name": "value"})
    facts = {"name": "value", "num_tokens": 4, "num_samples": 2}
    checksum = json.loads((tmp_path / "a" / "facts.json").read_bytes())[1]
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == {
        "facts.json": json.dumps([facts, checksum], indent=1).encode(),
        "input_ids.bin": np.array([1, 2, 3, 4], np.int32).tobytes(),
        "is_target.bin": bytes([0, 1, 1, 1]),
        "offsets.bin": np.array([0, 3, 4], np.int64).tobytes(),
    }
    (found, _) = load_tokenized(tmp_path / "a") or pytest.fail("not loaded")
    assert not found.has_sequences
    assert [found.sample(index).lengths for index in (0, 1)] == [(3,), (1,)]


@pytest.mark.parametrize("name", ["sequence_offsets", "token.weight", "sequence.score"])
def test_files_of_another_size_than_the_facts_say_are_made_anew(tmp_path: Path, name: str) -> None:
    written(tmp_path / "a", [draw_units(4)])
    path = tmp_path / "a" / f"{name}.bin"
    path.write_bytes(path.read_bytes()[:-8])
    assert load_tokenized(tmp_path / "a") is None


def training(*datasets: TokenizedDataset, **changes: Any) -> TrainingBatches:
    options: dict[str, Any] = {"batch_size": 4, "seq_length": LENGTH, "pad_token_id": PAD, "seed": 7, "is_packed": True}
    return TrainingBatches([WeightedSamples(dataset) for dataset in datasets], **(options | changes))


def sequences_of(batch: Batch) -> list[tuple[int, list[int], list[int], list[float], float]]:
    """Number, tokens, labels, weights and score of each sequence, read by `Batch.sequences`."""
    assert batch.sequences is not None
    assert batch.sequence_numbers is not None
    found = []
    for row in range(len(batch.input_ids)):
        for place, number in enumerate(batch.sequence_numbers[row].tolist()):
            own = batch.sequences[row] == place
            if number < 0:
                assert not own.any()
                continue
            tokens, labels, weights = (
                array[row, own].tolist() for array in (batch.input_ids, batch.labels, batch.token_values["weight"])
            )
            found.append((number, tokens, labels, weights, float(batch.sequence_values["score"][row, place])))
    return found


@pytest.mark.parametrize("is_packed", [True, False])
def test_every_sequence_is_once_in_an_epoch_with_its_values(is_packed: bool) -> None:
    first, second = draw_units(5), draw_units(6, 11)
    expected = {}
    for unit in (*first, *second):
        start = 0
        for place, length in enumerate(unit.lengths):
            span = slice(start, start + length)
            tokens = unit.input_ids[span].tolist()
            values = unit.token_values["weight"][span].tolist(), float(unit.sequence_values["score"][place])
            expected[len(expected)] = (tokens, [-100, *tokens[1:]], *values)
            start += length
    stream = training(TokenizedDataset.of_samples(first), TokenizedDataset.of_samples(second), is_packed=is_packed)
    batches = list(
        training(*(TokenizedDataset.of_samples(units) for units in (first, second)), is_packed=is_packed, num_epochs=1)
    )
    found = [sequence for batch in batches for sequence in sequences_of(batch)]
    assert Counter(number for number, *_ in found) == dict.fromkeys(expected, 1)
    assert {number: tuple(rest) for number, *rest in found} == expected
    assert sum(batch.num_samples for batch in batches) == len(first) + len(second)
    assert stream.max_documents is not None
    for batch in batches:
        assert batch.document_lengths is not None
        assert batch.sequences is not None
        assert batch.sequence_values["score"].shape == (4, stream.max_documents)
        assert max(map(len, batch.document_lengths)) < stream.max_documents, "the padding is one more"
        assert [n for row in batch.document_lengths for n in row] == [
            len(tokens) for _, tokens, *_ in sequences_of(batch)
        ]
        padding = batch.input_ids == PAD
        assert (batch.sequences[padding] == stream.max_documents).all()
        assert (batch.token_values["weight"][padding] == 0).all()
        assert batch.num_targets == (batch.labels != -100).sum()
    if not is_packed:
        assert stream.max_documents == 4
        assert all(
            len({token // 100 for token in row} - {0}) <= 1 for batch in batches for row in batch.input_ids.tolist()
        )


def test_a_unit_never_spans_rows() -> None:
    for batch in training(TokenizedDataset.of_samples(draw_units(8, 200)), num_epochs=1):
        rows = [{token // 100 for token in row} - {0} for row in batch.input_ids.tolist()]
        assert sum(map(len, rows)) == len(set().union(*rows)) == batch.num_samples


def test_shards_and_balanced_microbatches_keep_values_with_their_tokens() -> None:
    for batch in training(TokenizedDataset.of_samples(draw_units(9, 60)), num_epochs=1):
        whole = sorted(sequences_of(batch))
        shards = [shard_batch(batch, index, 2) for index in range(2)]
        assert sorted(sequence for shard in shards for sequence in sequences_of(shard)) == whole
        assert sorted(sequences_of(balance_microbatches(batch, 2))) == whole


@pytest.mark.parametrize("max_documents", [4, 7, 13])
def test_evaluation_has_every_sequence_once_with_numbers_of_its_dataset(max_documents: int) -> None:
    units = draw_units(10)
    dataset = TokenizedDataset.of_samples(units)
    batches = list(
        EvaluationBatches(dataset, batch_size=3, seq_length=LENGTH, pad_token_id=PAD, max_documents=max_documents)
    )
    found = sorted(sequence for batch in batches for sequence in sequences_of(batch))
    assert [number for number, *_ in found] == list(range(dataset.num_sequences))
    assert [score for *_, score in found] == dataset.sequence_values["score"].tolist()
    assert all(batch.sequence_values["score"].shape == (3, max_documents) for batch in batches)


def test_rows_leave_room_for_the_largest_unit_of_the_evaluation() -> None:
    units = [replace(unit, sequence_values={}) for unit in draw_units(11) if len(unit.lengths) < 3]
    dataset = TokenizedDataset.of_samples(units)
    least = training(dataset).max_documents
    assert least is not None
    assert training(dataset, max_sequences=8).max_documents == (least - 1) // 2 * 8 + 1


def test_a_dataset_of_a_mixture_without_the_value_of_another_gets_neutral_ones() -> None:
    bare = [replace(unit, token_values={}, sequence_values={}) for unit in draw_units(12, 5)]
    parts = [TokenizedDataset.of_samples(units) for units in (bare, draw_units(13, 5))]
    num_bare = parts[0].num_sequences
    for batch in training(*parts, num_epochs=1):
        for number, _, _, weights, score in sequences_of(batch):
            assert number >= num_bare or (set(weights) == {1.0} and score == 0)


def test_plain_data_have_no_values() -> None:
    rows = [(np.array([5, 6, 7], np.int32), np.ones(3, np.bool_)) for _ in range(8)]
    for is_packed in (True, False):
        batch = next(training(dataset_of(rows), is_packed=is_packed))
        assert (batch.token_values, batch.sequence_values) == ({}, {})
        assert (batch.sequences, batch.sequence_numbers) == (None, None)
        assert (batch.document_lengths is None) is not is_packed


def test_weights_alone_leave_rows_as_they_are() -> None:
    rows = [np.array([5, 6, 7], np.int32) for _ in range(8)]
    weighted = [
        TokenizedSample(ids, np.ones(3, np.bool_), (3,), {"weight": np.array([0, 0.5, 2], np.float32)}) for ids in rows
    ]
    batch = next(training(TokenizedDataset.of_samples(weighted), is_packed=False))
    assert (batch.document_lengths, batch.sequence_numbers) == (None, None)
    assert (batch.token_values.keys(), batch.sequence_values) == ({"weight"}, {})
    assert batch.token_values["weight"].dtype == np.float32
    assert batch.token_values["weight"][:, :4].tolist() == [[0, 0.5, 2, 0]] * 4


def parse_triple(record: Mapping[str, object]) -> Unit:
    return Unit(tuple(Completion(str(record["ask"]), str(record[name])) for name in "abc"), {"score": (1.0, 0.5, -2.0)})


def test_a_kind_of_rows_is_a_line_in_a_table(
    prepare_all: Callable[..., PreparedData],
    write_lines: Callable[..., Path],
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FORMATS_OF, "triples", (RecordFormat("triple", ("ask", "a", "b", "c"), (), parse_triple),))
    path = write_lines([{"ask": "one", "a": " two", "b": " three four", "c": f" {n}"} for n in range(9)])
    prepared = prepare_all(path, rows="triples", seq_length=96)
    (dataset,) = prepared.training
    assert (dataset.format_name, dataset.counts.kept, prepared.is_packed) == ("triple", 9, True)
    for batch in training(dataset.tokenized, seq_length=96, num_epochs=1):
        assert batch.sequences is not None
        assert batch.sequence_numbers is not None
        for row, numbers in enumerate(batch.sequence_numbers.tolist()):
            for place, number in enumerate(numbers):
                if number >= 0:
                    own = batch.sequences[row] == place
                    text = tokenizer.decode(batch.input_ids[row, own].tolist())
                    answer = [" two", " three four", f" {number // 3}"][number % 3]
                    assert text == f"one{answer}<|im_end|>"
                    target = tokenizer.decode(batch.labels[row, own & (batch.labels[row] != -100)].tolist())
                    assert target == f"{answer}<|im_end|>"
                    assert batch.sequence_values["score"][row, place] == (1.0, 0.5, -2.0)[number % 3]
