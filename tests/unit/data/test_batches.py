from itertools import islice

import numpy as np
import pytest

from mobius.data.batches import Batches
from mobius.data.mixture import WeightedSamples
from mobius.data.store import TokenizedDataset

PAD = 99


def dataset(*rows: tuple[list[int], list[int]]) -> TokenizedDataset:
    return TokenizedDataset.from_rows(
        [(np.array(ids, dtype=np.int32), np.array(is_target, dtype=np.bool_)) for ids, is_target in rows]
    )


def numbered(num_samples: int) -> TokenizedDataset:
    """Sample i is the tokens [i, i], the second a target."""
    return dataset(*(([index, index], [0, 1]) for index in range(num_samples)))


def batches(tokenized: TokenizedDataset, batch_size: int, seq_length: int = 4, seed: int = 42) -> Batches:
    return Batches(
        [WeightedSamples(tokenized)],
        batch_size=batch_size,
        seq_length=seq_length,
        pad_token_id=PAD,
        seed=seed,
        is_packed=False,
    )


def order(stream: Batches, num_batches: int) -> list[list[int]]:
    return [batch.input_ids[:, 0].tolist() for batch in islice(stream, num_batches)]


def test_rows_are_padded_on_the_right_and_labelled_by_the_mask() -> None:
    batch = next(batches(dataset(([5, 6, 7], [0, 1, 1])), 1, seq_length=5))
    assert batch.input_ids.tolist() == [[5, 6, 7, PAD, PAD]]
    assert batch.labels.tolist() == [[-100, 6, 7, -100, -100]]
    assert (batch.num_targets, batch.num_tokens) == (2, 3)
    assert (batch.input_ids.dtype, batch.labels.dtype) == (np.int64, np.int64)


def test_the_first_token_of_a_row_is_never_a_target() -> None:
    batch = next(batches(dataset(([5, 6, 7], [1, 1, 1])), 1))
    assert batch.labels.tolist() == [[-100, 6, 7, -100]]
    assert batch.num_targets == 2


def test_a_target_that_equals_the_padding_token_counts() -> None:
    batch = next(batches(dataset(([5, 6, PAD], [0, 1, 1])), 1))
    assert batch.labels.tolist() == [[-100, 6, PAD, -100]]
    assert (batch.num_targets, batch.num_tokens) == (2, 3)


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


@pytest.mark.parametrize("step", [0, 1, 3, 7, 12])
def test_seek_reaches_any_step_forwards_and_backwards(step: int) -> None:
    expected = order(batches(numbered(10), 4), 16)
    fresh = batches(numbered(10), 4)
    fresh.seek(step)
    assert fresh.state == step
    assert order(fresh, 3) == expected[step : step + 3]
    assert fresh.state == step + 3
    used = batches(numbered(10), 4)
    order(used, 9)
    used.seek(step)
    assert order(used, 3) == expected[step : step + 3]
