"""Histograms hold every sample once, in bins that show where the lengths are."""

from itertools import pairwise

import numpy as np
import pytest

from mobius.reporting.data_report import added, bin_edges, binned, describe_lengths, histogram_lines


def counts_of(lengths: list[int]) -> np.ndarray:
    return np.bincount(lengths)


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_is_in_one_bin_and_bins_are_few(seed: int) -> None:
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = generator.lognormal(generator.uniform(1, 8), generator.uniform(0.1, 2), size=200)
    lengths = np.clip(drawn, 2, generator.integers(3, 5000)).astype(int).tolist()
    edges = bin_edges(counts_of(lengths))
    numbers = binned(counts_of(lengths), edges)
    assert edges == sorted(set(edges))
    assert edges[0] < min(lengths)
    assert edges[-1] == max(lengths)
    assert len(numbers) <= 17
    expected = [sum(first < n <= last for n in lengths) for first, last in pairwise(edges)]
    assert numbers == expected
    assert sum(numbers) == 200


def test_bins_double_where_most_samples_are_short_beside_the_longest() -> None:
    assert bin_edges(counts_of([30] * 100 + [4000])) == [16, 32, 64, 128, 256, 512, 1024, 2048, 4000]
    assert bin_edges(counts_of([300] * 100 + [512])) == [288, 320, 352, 384, 416, 448, 480, 512]


@pytest.mark.parametrize("length", [2, 3, 512, 4097])
def test_samples_of_one_length_are_one_bin(length: int) -> None:
    edges = bin_edges(counts_of([length] * 3))
    assert binned(counts_of([length] * 3), edges) == [3]


def test_bars_are_as_long_as_their_share_and_never_hide_a_sample() -> None:
    lines = histogram_lines(counts_of([5] * 100 + [6] * 50 + [7]), block="#")
    assert lines == [f"  5 | 100 {'#' * 50}", f"  6 |  50 {'#' * 25}", "  7 |   1 #"]


def test_lengths_in_words() -> None:
    assert describe_lengths(counts_of([2, 3, 10, 1000])) == "shortest 2, median 3, mean 253.8, longest 1,000"


def test_datasets_are_added_length_by_length() -> None:
    assert added([counts_of([1, 3]), counts_of([3])]).tolist() == [0, 1, 0, 2]
