"""A step whose layers run in tiles of tokens computes the step of the plain transformers model."""

from __future__ import annotations

import copy

import pytest
from harness.block_case import FAMILIES_OF_LAYERS
from harness.packed_rows import LENGTH, ROWS, assert_no_leaks, documents_alone, make_packed_batch
from harness.pipelines import Pipeline, make_batch, make_model, plain_step
from harness.rounding import assert_as_exact, reordered

TILES = (5, 8)
"""Tokens of a tile. Microbatches of one and two rows of 12 are cut within rows and across them."""


@pytest.mark.grid
@pytest.mark.parametrize(("num_ranks", "num_slots"), [(1, None), (2, 1)])
@pytest.mark.parametrize("family", FAMILIES_OF_LAYERS)
def test_a_step_in_tiles_gives_the_loss_and_gradients_of_the_plain_model(
    family: str, num_ranks: int, num_slots: int | None
) -> None:
    model, batch = make_model(family, 6), make_batch(2)
    for number, tile_tokens in ((2, TILES[0]), (1, TILES[1])):
        pipeline = Pipeline(model, num_ranks, 2, number, num_slots, tile_tokens=tile_tokens)
        plain, exact = (plain_step(each, batch, number) for each in (model, copy.deepcopy(model).double()))
        assert_as_exact(pipeline.step(batch), plain, exact, share=reordered(batch.num_tokens))


def test_stages_that_save_everything_next_to_tiled_ones_give_the_plain_models_gradients() -> None:
    model, batch = make_model("llama", 6), make_batch(4)
    pipeline = Pipeline(model, 1, 3, 2, 2, keeps_graphs=True, tile_tokens=TILES[0])
    plain, exact = (plain_step(each, batch, 2) for each in (model, copy.deepcopy(model).double()))
    assert_as_exact(pipeline.step(batch), plain, exact, share=reordered(batch.num_tokens))


@pytest.mark.grid
@pytest.mark.parametrize("tile_tokens", TILES)
@pytest.mark.parametrize("family", FAMILIES_OF_LAYERS)
def test_packed_rows_in_tiles_give_what_each_document_gives_alone(family: str, tile_tokens: int) -> None:
    model, batch = make_model(family, 6), make_packed_batch(ROWS, LENGTH, 2)
    pipeline = Pipeline(model, 2, 1, 2, 2, tile_tokens=tile_tokens)
    plain, exact = (documents_alone(each, ROWS, batch) for each in (model, copy.deepcopy(model).double()))
    assert_as_exact(pipeline.step(batch), plain, exact, share=reordered(batch.num_tokens))


@pytest.mark.extended
@pytest.mark.parametrize("family", ["gemma3"])
def test_no_document_sees_another_one_in_its_tile(family: str) -> None:
    """Not a bit of their outputs, losses and gradients of inputs, whichever token of a document changes."""
    assert_no_leaks(make_model(family, 6), keeps_graphs=False, tile_tokens=TILES[0])
