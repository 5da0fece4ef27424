from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from harness.samples import dataset_of

from mobius.data.mixture import WeightedSamples, epoch_samples, epoch_size, hold_out, seeded_generator


def samples(number: int, weight: float = 1.0, indices: Sequence[int] | None = None) -> WeightedSamples:
    row = (np.zeros(2, dtype=np.int32), np.ones(2, dtype=np.bool_))
    chosen = None if indices is None else np.array(indices, dtype=np.int64)
    return WeightedSamples(dataset_of([row] * number), weight, chosen)


def drawn(parts: Sequence[WeightedSamples], epoch: int, seed: int = 42) -> list[tuple[int, int]]:
    numbers, indices = epoch_samples(parts, seed, epoch)
    return list(zip(numbers.tolist(), indices.tolist(), strict=True))


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_one_dataset_without_a_weight_is_a_permutation_by_seed_and_epoch(epoch: int) -> None:
    expected = np.random.Generator(np.random.PCG64([42, epoch])).permutation(100)
    assert drawn([samples(100)], epoch) == [(0, index) for index in expected]


@pytest.mark.parametrize("weight", [0.01, 0.3, 1.0, 2.0, 2.7])
def test_a_sample_appears_as_often_as_its_weight_rounded_down_or_up(weight: float) -> None:
    for epoch in range(5):
        counts = Counter(index for _, index in drawn([samples(1000, weight)], epoch))
        assert {counts[index] for index in range(1000)} <= {int(weight), int(np.ceil(weight))}
        assert abs(counts.total() - weight * 1000) < 1


@pytest.mark.parametrize("weight", [0.1, 0.3, 1.7])
def test_ten_epochs_have_every_sample_equally_often(weight: float) -> None:
    parts = [samples(37, weight)]
    counts = Counter(index for epoch in range(10) for _, index in drawn(parts, epoch))
    assert counts == dict.fromkeys(range(37), round(10 * weight))


def test_a_part_of_the_samples_is_another_in_every_epoch_and_not_the_first_ones() -> None:
    first, second = ({index for _, index in drawn([samples(100, 0.5)], epoch)} for epoch in (0, 1))
    assert first.isdisjoint(second)
    assert first not in (set(range(50)), set(range(50, 100)))


def test_datasets_are_mixed_by_weight_within_a_percent() -> None:
    parts = [samples(5000), samples(3000, 0.3), samples(700, 2.5)]
    order = drawn(parts, 3)
    counts = Counter(number for number, _ in order)
    for number, expected in enumerate((5000, 900, 1750)):
        assert counts[number] == pytest.approx(expected, rel=0.01)
    assert len(order) == epoch_size(parts, 3)
    halves = Counter(number for number, _ in order[: len(order) // 2])
    for number, expected in enumerate((2500, 450, 875)):
        assert halves[number] == pytest.approx(expected, rel=0.15), "datasets are not shuffled together"


def test_another_seed_is_another_order_and_another_choice() -> None:
    one, other = (drawn([samples(100, 0.5)], 0, seed) for seed in (42, 43))
    assert set(one) != set(other)
    assert drawn([samples(100)], 0, 42) != drawn([samples(100)], 0, 43)


def test_only_the_given_indices_are_drawn() -> None:
    counts = Counter(index for _, index in drawn([samples(10, 2.0, [1, 4, 9])], 0))
    assert counts == {1: 2, 4: 2, 9: 2}
    assert drawn([samples(10, 0.5, [])], 0) == []


def test_a_small_weight_on_one_sample_draws_it_in_one_epoch_of_a_thousand() -> None:
    parts = [samples(1, 0.001)]
    assert sum(epoch_size(parts, epoch) for epoch in range(1000)) == 1
    assert len(drawn(parts, 999)) == 1


def test_a_seed_of_more_words_is_another_one() -> None:
    draws = [seeded_generator(*words).random() for words in ((5, 1), (5, 1, 1), (5, 1, 0, 1), (5, 1, 0, 2))]
    assert len(set(draws)) == 4


@pytest.mark.parametrize(("val_size", "count"), [(0, 0), (1, 1), (50, 50), (0.1, 15), (0.001, 1), (149, 149)])
def test_so_many_samples_are_held_out_of_all_together(val_size: float, count: int) -> None:
    training, held_out = hold_out([100, 50], val_size, 42)
    assert sum(map(len, held_out)) == count
    for size, mine, others in zip((100, 50), training, held_out, strict=True):
        assert sorted([*mine, *others]) == list(range(size))
        assert list(mine) == sorted(mine)
        assert list(others) == sorted(others)


def test_the_seed_chooses_what_is_held_out() -> None:
    _, (one,) = hold_out([1000], 0.1, 42)
    _, (same,) = hold_out([1000], 0.1, 42)
    _, (other,) = hold_out([1000], 0.1, 43)
    assert one.tolist() == same.tolist() != other.tolist()
    assert 400 < one.mean() < 600
