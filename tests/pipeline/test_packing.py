"""Rows of several documents: no document sees another one, and together they give what each gives alone."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

import harness.pipelines
import pytest
import torch
from harness.block_case import FAMILIES_OF_LAYERS
from harness.packed_rows import LENGTH, ROWS, assert_no_leaks, documents_alone, make_packed_batch
from harness.pipelines import FAMILIES, Pipeline, Step, assert_near, make_model
from harness.rounding import assert_as_exact, reordered
from torch.fx import GraphModule
from transformers import PreTrainedModel

from mobius.engine.step_inputs import StepBatch

CASES = {  # number of slots, whether everything is saved
    "resident": (None, False),
    "resident, everything saved": (None, True),
    "streamed, prefetched": (2, False),
    "streamed, everything saved at last": (2, True),
}
MICROBATCHES = (1, 2, 4)
NUM_RANKS = (1, 2, 3)


def pairs_of(family: str, num_ranks: int) -> list[tuple[str, int]]:
    """A third of the pairs of a case and a number of microbatches, another one with each number of ranks.

    What differs between families is within a layer, which knows nothing of ranks and microbatches.
    """
    pairs, first = [*product(CASES, MICROBATCHES)], sorted(FAMILIES).index(family) + num_ranks
    # The three of a case follow one another: without its number they would go to the same families.
    return [pair for turn, pair in enumerate(pairs) if (turn + turn // len(MICROBATCHES) + first) % 3 == 0]


def test_each_pair_meets_each_family_and_each_number_of_ranks() -> None:
    pairs = {*product(CASES, MICROBATCHES)}
    for family in FAMILIES:
        assert {pair for num_ranks in NUM_RANKS for pair in pairs_of(family, num_ranks)} == pairs
    for num_ranks in NUM_RANKS:
        assert {pair for family in FAMILIES for pair in pairs_of(family, num_ranks)} == pairs
        for family in FAMILIES:
            assert {case for case, _ in pairs_of(family, num_ranks)} == CASES.keys()
            assert {number for _, number in pairs_of(family, num_ranks)} == {*MICROBATCHES}


@lru_cache(maxsize=4)
def alone(family: str, num_microbatches: int) -> tuple[PreTrainedModel, StepBatch, Step, Step]:
    """Model and batch, and the step of its documents alone, for many pipelines; last in fp64."""
    model, batch = make_model(family, 6), make_packed_batch(ROWS, LENGTH, num_microbatches)
    exact = documents_alone(copy.deepcopy(model).double(), ROWS, batch)
    return model, batch, documents_alone(model, ROWS, batch), exact


@pytest.mark.grid
@pytest.mark.parametrize("keeps_graphs", [False, True])
@pytest.mark.parametrize("family", FAMILIES_OF_LAYERS)
def test_no_document_sees_another_one(family: str, keeps_graphs: bool) -> None:
    """Not a bit of their outputs, losses and gradients of inputs, whichever token of a document changes."""
    assert_no_leaks(make_model(family, 6), keeps_graphs=keeps_graphs)


@pytest.mark.grid
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_rows_give_what_each_document_gives_alone(family: str, num_ranks: int) -> None:
    for case, num_microbatches in pairs_of(family, num_ranks):
        model, batch, expected, exact = alone(family, num_microbatches)
        num_slots, keeps_graphs = CASES[case]
        pipeline = Pipeline(model, num_ranks, 1 + [*CASES].index(case) % 2, num_microbatches, num_slots, keeps_graphs)
        found = pipeline.step(batch)
        assert_as_exact(found, expected, exact, share=reordered(batch.num_tokens))


def test_rows_taken_for_one_document_give_another_loss() -> None:
    """The comparison can fail."""
    model = make_model("llama", 2)
    batch = make_packed_batch(ROWS, LENGTH, 2)
    expected, _ = documents_alone(model, ROWS, batch)
    leaking = Pipeline(model, 1, 1, 2, None).run(replace(batch, documents=None))
    assert abs(float(leaking - expected)) > 1e-3 * float(expected)


def test_compiled_parts_take_other_documents_with_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps make the graphs of the first: of layers and norm, and of the loss; all run as they are."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = make_model("llama", 2)
    pipeline = Pipeline(model, 1, 1, 2, None, compiled=True)
    num_compiled = Counter[str]()

    def counting(graph: GraphModule, examples: object) -> GraphModule:
        num_compiled["own"] += 1
        return graph

    monkeypatch.setattr(torch._inductor, "compile", counting)
    monkeypatch.setattr(harness.pipelines, "_PARTS", {})
    torch._dynamo.utils.counters.clear()
    after_first = None
    for rows in (ROWS, [row[::-1] for row in ROWS], [[2, 2, 2], [5, 15], [19], [1, 18]], ROWS[::-1], [[], [2], [], []]):
        batch = make_packed_batch(rows, LENGTH, 2, max_documents=4)
        assert_near(pipeline.step(batch), documents_alone(model, rows, batch), loss=1e-5, gradients=1e-5)
        compiled = num_compiled["own"], torch._dynamo.utils.counters["stats"]["unique_graphs"]
        after_first = after_first or compiled
        assert compiled == after_first
    assert min(after_first or (0,)) > 0, "graphs were made at all"
