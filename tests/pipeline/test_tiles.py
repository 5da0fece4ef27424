"""A step whose layers run in tiles of tokens computes the step of the plain transformers model."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from harness.packed_rows import LENGTH, ROWS, assert_no_leaks, documents_alone, make_packed_batch
from harness.pipelines import FAMILIES, Pipeline, make_batch, make_model, plain_step
from torch import Tensor

TILES = (5, 8)
"""Tokens of a tile. Microbatches of one and two rows of 12 are cut within rows and across them."""


def share_of(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """L2 norm of all differences together, as a share of that of all gradients."""
    assert actual.keys() == expected.keys()
    off = torch.stack([(actual[name] - value).double().norm() for name, value in expected.items()]).norm()
    return float(off / torch.stack([value.double().norm() for value in expected.values()]).norm())


@pytest.mark.grid
@pytest.mark.parametrize(("num_ranks", "num_slots"), [(1, None), (2, 1)])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_step_in_tiles_gives_the_loss_and_gradients_of_the_plain_model(
    family: str, num_ranks: int, num_slots: int | None
) -> None:
    model = make_model(family, 6)
    batch = make_batch(4)
    for num_microbatches, tile_tokens in ((4, TILES[0]), (2, TILES[1])):
        expected_loss, expected = plain_step(model, batch, num_microbatches)
        pipeline = Pipeline(model, num_ranks, 2, num_microbatches, num_slots, tile_tokens=tile_tokens)
        assert torch.allclose(pipeline.run(batch), expected_loss, rtol=1e-6)
        assert share_of(pipeline.gradients, expected) <= 1e-6


@pytest.mark.grid
@pytest.mark.parametrize("tile_tokens", TILES)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_rows_in_tiles_give_what_each_document_gives_alone(family: str, tile_tokens: int) -> None:
    model = make_model(family, 6)
    batch = make_packed_batch(ROWS, LENGTH, 2)
    expected_loss, expected = documents_alone(model, ROWS, batch)
    pipeline = Pipeline(model, 2, 1, 2, 2, tile_tokens=tile_tokens)
    assert torch.allclose(pipeline.run(batch), expected_loss, rtol=1e-6)
    assert share_of(pipeline.gradients, expected) <= 1e-6


@pytest.mark.extended
@pytest.mark.parametrize("family", ["gemma3"])
def test_no_document_sees_another_one_in_its_tile(family: str) -> None:
    """Not a bit of their outputs, losses and gradients of inputs, whichever token of a document changes."""
    assert_no_leaks(make_model(family, 6), keeps_graphs=False, tile_tokens=TILES[0])


def test_kept_graphs_beside_tiles_give_the_plain_models_gradients() -> None:
    model = make_model("llama", 6)
    batch = make_batch(4)
    expected_loss, expected = plain_step(model, batch, 2)
    pipeline = Pipeline(model, 1, 3, 2, 2, keeps_graphs=True, tile_tokens=TILES[0])
    assert torch.allclose(pipeline.run(batch), expected_loss, rtol=1e-6)
    assert share_of(pipeline.gradients, expected) <= 1e-6
