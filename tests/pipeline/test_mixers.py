"""Layers that carry a state from token to token: documents of packed rows begin anew."""

from __future__ import annotations

import copy

import pytest
from harness.packed_rows import LENGTH, ROWS, assert_no_leaks, documents_alone, make_packed_batch
from harness.pipelines import Pipeline, model_of
from harness.rounding import assert_as_exact, reordered
from harness.tiny_families import tiny_config

from mobius.models.family_support import unpackable_reason
from mobius.models.mixers import MIXERS

FAMILIES = ("qwen3_5_text", "olmo_hybrid", "lfm2")
CASES = {  # ranks, stages per rank, microbatches, slots, whether everything is saved
    "resident": (1, 1, 2, None, False),
    "everything saved": (1, 2, 1, None, True),
    "streamed": (2, 2, 4, 1, False),
}


@pytest.mark.parametrize("keeps_graphs", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_document_sees_another_one(family: str, keeps_graphs: bool) -> None:
    assert_no_leaks(model_of(tiny_config(family)), keeps_graphs=keeps_graphs)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_give_what_each_document_gives_alone(family: str) -> None:
    model = model_of(tiny_config(family))
    batch = make_packed_batch(ROWS, LENGTH, 4)
    expected = documents_alone(model, ROWS, batch)
    exact = documents_alone(copy.deepcopy(model).double(), ROWS, batch)
    for case, (num_ranks, per_rank, microbatches, slots, keeps_graphs) in CASES.items():
        batch = make_packed_batch(ROWS, LENGTH, microbatches)
        found = Pipeline(model, num_ranks, per_rank, microbatches, slots, keeps_graphs).step(batch)
        assert_as_exact(found, expected, exact, share=reordered(batch.num_tokens)), case


@pytest.mark.parametrize("family", MIXERS)
def test_on_gpus_such_rows_are_refused(family: str) -> None:
    config = tiny_config(family)
    assert unpackable_reason(config) is None
    assert "separate samples on CPUs only" in str(unpackable_reason(config, on_gpu=True))
