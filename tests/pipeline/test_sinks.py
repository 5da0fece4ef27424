"""Attention sinks in slices and tiles of packed rows."""

from __future__ import annotations

import pytest
from harness.packed_rows import LENGTH, ROWS, documents_alone, make_packed_batch
from harness.pipelines import Pipeline, assert_near, model_of
from harness.tiny_families import tiny_config


@pytest.mark.parametrize(("num_slices", "tile_tokens"), [(4, None), (2, 3), (1, 5)])
def test_documents_give_what_each_gives_alone(num_slices: int, tile_tokens: int | None) -> None:
    """Sinks of two kinds of layers, with windows and without; every gradient, those of the sinks among them."""
    model, batch = model_of(tiny_config("gpt_oss")), make_packed_batch(ROWS, LENGTH, 2)
    expected = documents_alone(model, ROWS, batch)
    assert sum(name.endswith("sinks") for name in expected[1]) == 4
    pipeline = Pipeline(model, 2, 2, 2 * num_slices, 1, num_slices=num_slices, tile_tokens=tile_tokens)
    assert_near(pipeline.step(batch), expected, loss=1e-6, gradients=2e-6)
