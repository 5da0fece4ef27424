"""Numbers of tokenized samples are those that a walk sample by sample finds, whatever the chunks."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from harness.samples import Row, dataset_of

from mobius.config.config import DatasetEntry
from mobius.data import statistics
from mobius.data.datasets import PreparedDataset, SampleCounts
from mobius.data.statistics import (
    SampleStatistics,
    choose_fingerprint_stride,
    compute_sample_statistics,
    count_repeated,
    find_data_warnings,
)
from mobius.data.token_store import TokenizedDataset, TokenizedSample

EOS, UNKNOWN = 2, 0


def rows_of(*texts: str) -> list[Row]:
    """Words are tokens (their numbers), those behind a `|` are targets."""
    rows = []
    for text in texts:
        prompt, _, target = text.partition("|")
        ids, num_prompt = [int(word) for word in (prompt + " " + target).split()], len(prompt.split())
        rows.append((np.array(ids, dtype=np.int32), np.arange(len(ids)) >= num_prompt))
    return rows


def drawn_rows(number: int, seed: int) -> list[Row]:
    generator = np.random.Generator(np.random.PCG64(seed))
    rows = []
    for _ in range(number):
        ids = generator.integers(0, 4, size=generator.integers(2, 9), dtype=np.int32)
        rows.append((ids, generator.random(len(ids)) < 0.5))
    return rows


def found_in(rows: list[Row], fingerprint_stride: int = 1) -> SampleStatistics:
    tokenized = dataset_of(rows)
    return compute_sample_statistics(
        tokenized, eos_token_id=EOS, unknown_token_id=UNKNOWN, fingerprint_stride=fingerprint_stride
    )


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_numbers_are_those_of_a_walk_by_hand(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_CHUNK_TOKENS", chunk)
    rows = drawn_rows(300, seed=5)
    found = found_in(rows)
    targets = [[token for token, flag in list(zip(ids, mask, strict=True))[1:] if flag] for ids, mask in rows]
    assert found.num_samples == 300
    assert found.num_tokens == sum(len(ids) for ids, _ in rows)
    assert found.num_targets == sum(map(len, targets))
    assert found.num_eos_targets == sum(own.count(EOS) for own in targets)
    assert found.num_single_token_targets == sum(len(own) == 1 for own in targets)
    assert found.num_ended == sum(ids[-1] == EOS for ids, _ in rows)
    assert found.num_unknown == sum(int((ids == UNKNOWN).sum()) for ids, _ in rows)
    lengths = Counter(len(ids) for ids, _ in rows)
    assert found.length_counts.tolist() == [lengths[length] for length in range(max(lengths) + 1)]
    distinct = {tuple(ids.tolist()) for ids, _ in rows}
    assert found.num_duplicates == 300 - len(distinct) > 40


def test_samples_that_differ_in_order_or_by_a_tail_are_no_duplicates() -> None:
    found = found_in(rows_of("1 | 2", "2 | 1", "1 | 2 0", "1 | 2 0 0", "0 | 0", "0 | 0 0"))
    assert found.num_duplicates == 0


def test_many_samples_keep_some_fingerprints_and_estimate_duplicates() -> None:
    generator = np.random.Generator(np.random.PCG64(1))
    distinct = [generator.integers(0, 30_000, size=6, dtype=np.int32) for _ in range(8_000)]
    mask = np.ones(6, dtype=np.bool_)
    rows = [(ids, mask) for ids in [*distinct, *distinct[:4_000]]]
    found = found_in(rows, fingerprint_stride=8)
    assert not found.is_exact
    assert len(found.fingerprints) == pytest.approx(12_000 / 8, rel=0.1)
    assert found.num_duplicates == pytest.approx(4_000, rel=0.15)


def test_fingerprints_are_kept_up_to_a_number() -> None:
    assert choose_fingerprint_stride(1) == choose_fingerprint_stride(1 << 22) == 1
    assert choose_fingerprint_stride((1 << 22) + 1) == 2


def test_samples_trained_on_and_evaluated_on_are_found() -> None:
    found = found_in(rows_of("1 | 2", "3 | 2", "1 | 2", "5 | 2"))
    trained = found.fingerprints_of(np.array([0, 1]))
    assert count_repeated(found.fingerprints_of(np.array([2, 3])), trained) == 1
    assert count_repeated(found.fingerprints_of(np.array([3])), trained) == 0
    assert len(found.fingerprints_of(None)) == 4


def told_of(rows: list[Row], *, is_text: bool = False, warnings: tuple[str, ...] = (), **counts: int) -> list[str]:
    tokenized = dataset_of(rows)
    numbers = {"read": len(rows), "kept": len(rows), "cut": 0, "dropped": 0, "empty": 0} | counts
    dataset = PreparedDataset(
        entry=DatasetEntry("a.jsonl"),
        tokenized=tokenized,
        counts=SampleCounts(**numbers),
        format_name="text" if is_text else "alpaca",
        is_text=is_text,
        warnings=warnings,
        cache_folder=Path(),
    )
    return find_data_warnings(dataset, found_in(rows))


def test_good_data_is_no_concern() -> None:
    assert told_of(rows_of("1 3 | 4 5 2", "3 | 4 2", "3 4 | 1 5 2")) == []


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (["3 | 4 2", "3 | 4 2", "5 | 6 2"], "1 of 3 samples repeat an earlier one exactly"),
        (["3 | 4 2", "3 | 2"], "1 of 2 samples have a single token as their target: answers without words?"),
        (["3 | 4 5", "3 | 6 5"], "no target is the end-of-sequence token: the model would not learn to stop"),
        (["3 | 4 2", "3 | 4 5"], "1 of 2 samples end in the middle of an answer: it was cut"),
        (["3 " * 98 + "| 4 2"], "only 2 % of the tokens are targets: most of the work is for prompts"),
        (["3 0 | 4 2"], "25 % of the tokens are unknown to the tokenizer: is it made for other text?"),
    ],
)
def test_what_is_odd_in_the_samples_is_told(rows: list[str], told: str) -> None:
    assert told_of(rows_of(*rows)) == [told]


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ({"empty": 3}, "3 of 8 records are empty: they hold no text"),
        ({"dropped": 3, "unanswered": 3}, "3 of 8 records without an answer were dropped"),
        ({"dropped": 3}, "3 of 8 records without a token to train on were dropped"),
        ({"cut": 3}, "3 of 8 records are longer than seq_length: they were cut, and tokens of them are lost"),
    ],
)
def test_what_became_of_records_is_told(counts: dict[str, int], told: str) -> None:
    assert told_of(rows_of("3 | 4 2"), warnings=("a note",), read=8, **counts) == ["a note", told]


def test_rows_of_plain_text_may_end_anywhere() -> None:
    assert told_of(rows_of("| 4 2 3", "| 4 5 3"), is_text=True) == []


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_a_pair_is_one_sample_whose_sequences_both_count(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_CHUNK_TOKENS", chunk)
    sides = [("1 | 3 2", "1 | 4 2"), ("1 | 3 2", "1 | 2"), ("1 | 3 2", "1 | 4 5"), ("| 3 2", "| 4 2")]
    pairs = []
    for texts in sides:
        parts = dataset_of(rows_of(*texts))
        pairs.append(TokenizedSample(parts.input_ids, parts.is_target, tuple(parts.lengths.tolist())))
    found = compute_sample_statistics(TokenizedDataset.of_samples(pairs), eos_token_id=EOS, unknown_token_id=None)
    assert (found.num_samples, found.num_tokens) == (4, 21)
    assert found.num_targets == 4 + 3 + 4 + 2, "the first token of a sequence is no target"
    assert found.num_ended == 3
    assert found.num_single_token_targets == 2
    assert found.num_eos_targets == 4 - 2 + 3 + 1 + 1
