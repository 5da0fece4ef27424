"""Places of documents, by hand: positions restart at each, bounds go through the rows of a microbatch."""

from __future__ import annotations

import pytest

from mobius.engine.documents import position_ids_and_cu_seqlens

ROWS = [[3, 2], [6], [], [1, 1]]


def test_positions_restart_at_each_document_and_at_the_padding() -> None:
    position_ids, _ = position_ids_and_cu_seqlens(ROWS, seq_length=6, num_microbatches=2, max_documents=3)
    assert position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("num_microbatches", "expected"),
    [
        (1, [[0, 3, 5, 6, 12, 18, 19, 20, 24, 24, 24, 24, 24]]),
        (2, [[0, 3, 5, 6, 12, 12, 12], [0, 6, 7, 8, 12, 12, 12]]),
        (4, [[0, 3, 5, 6], [0, 6, 6, 6], [0, 6, 6, 6], [0, 1, 2, 6]]),
    ],
)
def test_bounds_are_of_one_size_whatever_the_rows_hold(num_microbatches: int, expected: list[list[int]]) -> None:
    _, cu_seqlens = position_ids_and_cu_seqlens(ROWS, seq_length=6, num_microbatches=num_microbatches, max_documents=3)
    assert cu_seqlens.tolist() == expected


@pytest.mark.parametrize(("row", "told"), [([1, 1, 1], "4 documents"), ([4, 3], "in a row of 6")])
def test_a_row_with_more_than_it_can_hold_is_a_bug(row: list[int], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        position_ids_and_cu_seqlens([row], seq_length=6, num_microbatches=1, max_documents=3)
