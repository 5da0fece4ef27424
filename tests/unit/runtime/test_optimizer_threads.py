"""How many threads update: no more than use up the host's memory bandwidth, and some cores are left."""

from __future__ import annotations

import pytest
import torch

from mobius.runtime.devices import optimizer_threads


@pytest.mark.parametrize(
    ("threads", "num_ranks", "expected"),
    [
        (1, 4, 1),
        (4, 4, 4),
        (7, 8, 7),
        (8, 4, 6),  # two are for what feeds the GPU
        (16, 4, 8),  # 32 of all ranks
        (16, 2, 14),
        (16, 1, 14),
        (64, 1, 32),
        (64, 8, 6),
    ],
)
def test_threads_of_a_rank(monkeypatch: pytest.MonkeyPatch, threads: int, num_ranks: int, expected: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert optimizer_threads(num_ranks) == expected
