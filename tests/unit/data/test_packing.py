import json
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from transformers import PreTrainedTokenizerBase

from mobius.data.packing import (
    PACKING_WINDOW,
    attention_cost,
    balanced_order,
    choose_max_samples_per_row,
    pack_samples,
    packing_window_size,
)

Lengths = npt.NDArray[np.int64]
UNLIMITED = 10**9


def long_tailed(number: int, *, mean: int = 700, longest: int = 4096, sigma: float = 0.8) -> Lengths:
    """Log-normal token counts of that mean, before the longest are cut."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, number)
    return np.clip(drawn, 1, longest).astype(np.int64)


def padding(lengths: Lengths, capacity: int, max_samples_per_row: int) -> float:
    return 1 - float(lengths.sum()) / (capacity * len(pack_samples(lengths, capacity, max_samples_per_row)))


@pytest.mark.parametrize("max_samples_per_row", [1, 2, 3, 7, UNLIMITED])
@pytest.mark.parametrize("capacity", [8, 64, 500])
def test_every_sample_is_in_one_row_and_no_row_holds_too_much(capacity: int, max_samples_per_row: int) -> None:
    lengths = np.random.default_rng(capacity).integers(1, capacity, 1000, endpoint=True)
    rows = pack_samples(lengths, capacity, max_samples_per_row)
    assert sorted(index for row in rows for index in row) == list(range(1000))
    assert max(int(lengths[row].sum()) for row in rows) <= capacity
    assert max(len(row) for row in rows) <= max_samples_per_row


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([5, 4, 6, 5], [[2, 1], [0, 3]]),
        ([3, 7, 8, 2], [[2, 3], [1, 0]]),  # 2 goes where it leaves nothing, not to the first row that has space
        ([10, 10], [[0], [1]]),
        ([1], [[0]]),
        ([], []),
    ],
)
def test_a_sample_goes_to_the_fullest_row_that_takes_it(lengths: list[int], rows: list[list[int]]) -> None:
    assert sorted(map(sorted, pack_samples(np.array(lengths, dtype=np.int32), 10, UNLIMITED))) == sorted(
        map(sorted, rows)
    )


def test_rows_are_a_function_of_the_lengths() -> None:
    lengths = np.random.default_rng(1).integers(1, 30, 5000)
    assert pack_samples(lengths, 64, 8) == pack_samples(lengths.astype(np.int32), 64, 8)


def test_long_tailed_samples_leave_next_to_nothing_empty() -> None:
    lengths = long_tailed(PACKING_WINDOW)
    most = choose_max_samples_per_row(lengths, 4096)
    assert padding(lengths, 4096, most) < 0.03
    assert most < 50


def test_the_shipped_corpus_leaves_little_empty(assets: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    records = map(json.loads, (assets / "docstrings" / "train.jsonl").read_text(encoding="utf-8").splitlines())
    texts = ["\n".join(record.values()) for record in records]
    lengths = np.array([len(ids) for ids in tokenizer(texts).input_ids])
    most = choose_max_samples_per_row(lengths, 512)
    assert padding(lengths, 512, most) < 0.06
    assert most < 20


def test_a_million_samples_are_packed_in_seconds() -> None:
    lengths = long_tailed(PACKING_WINDOW)
    started = time.perf_counter()
    pack_samples(lengths, 4096, 24)
    assert time.perf_counter() - started < PACKING_WINDOW * 10e-6  # some 0.6 microseconds a sample on an idle core


@pytest.mark.parametrize("lengths", [long_tailed(3000), long_tailed(3000, mean=100), long_tailed(3000, sigma=1.3)])
def test_the_limit_of_a_row_costs_half_a_percent_at_most_and_half_of_it_costs_more(lengths: Lengths) -> None:
    most, least = choose_max_samples_per_row(lengths, 4096), padding(lengths, 4096, UNLIMITED)
    assert padding(lengths, 4096, most) <= least + 0.005
    assert padding(lengths, 4096, most // 2) > least + 0.005
    assert most in {number * 2**power for power in range(12) for number in (2, 3)}


def test_the_limit_of_rows_of_one_or_two_samples_is_two() -> None:
    assert choose_max_samples_per_row(np.full(10, 64), 64) == 2
    assert choose_max_samples_per_row(np.array([7]), 64) == 2
    assert choose_max_samples_per_row(np.full(10, 32), 64) == 2
    assert choose_max_samples_per_row(np.full(12, 21), 64) == 3


def test_a_window_of_short_samples_has_many_rows() -> None:
    assert packing_window_size(np.full(100, 61), 512) == PACKING_WINDOW
    assert packing_window_size(np.full(100, 50), 131_072) * 50 >= 64 * 131_072


def test_the_cost_of_a_row_is_that_of_its_documents_and_of_the_padding_behind_them() -> None:
    assert attention_cost([3, 4], 8) == 9 + 16 + 1
    assert attention_cost([8], 8) == attention_cost([], 8) == 64


@pytest.mark.parametrize("num_microbatches", [4, 8])
def test_microbatches_of_long_tailed_samples_cost_nearly_the_same(num_microbatches: int) -> None:
    lengths = long_tailed(PACKING_WINDOW)
    rows = pack_samples(lengths, 4096, 24)
    drawn = np.random.default_rng(1).permutation(len(rows))[:64]
    costs = np.array([attention_cost(lengths[rows[row]].tolist(), 4096) for row in drawn])

    def most(order: list[int]) -> float:
        sums = costs[order].reshape(num_microbatches, -1).sum(axis=1)
        return float(sums.max() / sums.mean())

    order = balanced_order(costs, num_microbatches)
    assert sorted(order) == list(range(64))
    assert most(order) < 1.03 < 1.1 < most(list(range(64)))


def test_a_microbatch_keeps_the_order_of_its_rows() -> None:
    assert balanced_order(np.array([1, 9, 2, 8]), 2) == [0, 1, 2, 3]
    assert balanced_order(np.array([9, 8, 1, 2]), 2) == [0, 2, 1, 3]
    assert balanced_order(np.array([5, 5, 5, 5]), 1) == [0, 1, 2, 3]
