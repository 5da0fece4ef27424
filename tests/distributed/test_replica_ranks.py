"""Processes that are replicas train what one does, whatever overlaps and in whatever format gradients travel."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.replica_ranks import CLIPPINGS, OTHERS, STREAMED, trained


@pytest.mark.extended  # half a minute
def test_overlaps_change_no_bit_and_rounding_on_the_way_little(tmp_path: Path) -> None:
    options = "--device cpu --bf16 --num_chunks 2"
    streamed = [f"{STREAMED} {clipping}" for clipping in CLIPPINGS]
    variants = [f"{where} {clipping}" for where in (STREAMED, *OTHERS) for clipping in CLIPPINGS]
    shared = trained(2, tmp_path, options, variants)
    rounded = trained(2, tmp_path, f"{options} --reduce_dtype bf16", streamed)
    alone = trained(1, tmp_path, "--device cpu --bf16 --num_chunks 4", streamed)
    for number, (single,) in enumerate(alone):
        first = shared[number][0]
        for replicas in shared[number :: len(CLIPPINGS)]:
            assert all(each.is_equal(first) for each in replicas)
        assert first.num_streamed > 0
        assert first.host_bytes == (2 + 12 / 2) * first.num_streamed
        assert rounded[number][0].is_equal(rounded[number][1])
        assert not rounded[number][0].is_equal(first), "what travels is rounded"
        for near in (first, rounded[number][0]):
            assert near.losses == pytest.approx(single.losses, rel=1e-3)
            assert near.norms == pytest.approx(single.norms, rel=1e-2)
