"""Rows of several documents: no document sees another one, and together they give what each gives alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from harness.packed_rows import LENGTH, ROWS, assert_no_leaks, documents_alone, make_packed_batch
from harness.pipelines import FAMILIES, Pipeline, make_model

CASES = {  # number of slots, whether graphs are kept
    "resident": (None, False),
    "resident, graphs kept": (None, True),
    "streamed, prefetched": (2, False),
    "streamed, last graphs kept": (2, True),
}


@pytest.mark.parametrize("keeps_graphs", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_document_sees_another_one(family: str, keeps_graphs: bool) -> None:
    """Not a bit of their outputs, losses and gradients of inputs, whichever token of a document changes."""
    assert_no_leaks(make_model(family, 6), keeps_graphs=keeps_graphs)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_rows_give_what_each_document_gives_alone(family: str, num_ranks: int) -> None:
    """Loss and every gradient within 1e-6 of the largest: lengths of sums differ, so the bits do."""
    model = make_model(family, 6)
    for (number, case), num_microbatches in product(enumerate(CASES), (1, 2, 4)):
        batch = make_packed_batch(ROWS, LENGTH, num_microbatches)
        expected_loss, expected = documents_alone(model, ROWS, batch)
        num_slots, keeps_graphs = CASES[case]
        pipeline = Pipeline(model, num_ranks, 1 + number % 2, num_microbatches, num_slots, keeps_graphs)
        where = f"N={num_ranks} M={num_microbatches} {case}"
        assert torch.allclose(pipeline.run(batch), expected_loss, rtol=1e-6), where
        assert pipeline.gradients.keys() == expected.keys(), where
        for name, gradient in expected.items():
            difference = (pipeline.gradients[name] - gradient).abs().max()
            assert difference <= 2e-6 * gradient.abs().max(), f"{where} {name}: {difference}"


def test_the_place_of_a_document_changes_nothing_but_the_order_of_sums() -> None:
    """The comparison can fail: rows that are taken for one document each give another loss."""
    model = make_model("llama", 2)
    batch = make_packed_batch(ROWS, LENGTH, 2)
    expected, _ = documents_alone(model, ROWS, batch)
    leaking = Pipeline(model, 1, 1, 2, None).run(replace(batch, documents=None))
    assert abs(float(leaking - expected)) > 1e-3 * float(expected)


def test_compiled_layers_take_other_documents_with_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", 2)
    pipeline, num_compiled = Pipeline(model, 1, 1, 2, None, compiled=True), list[int]()
    compiled = []
    compile_graph = torch._inductor.compile
    monkeypatch.setattr(torch._inductor, "compile", lambda *given: compiled.append(1) or compile_graph(*given))
    for rows in (ROWS, [row[::-1] for row in ROWS], [[2, 2, 2], [5, 15], [19], [1, 18]]):
        batch = make_packed_batch(rows, LENGTH, 2)
        expected_loss, expected = documents_alone(model, rows, batch)
        assert torch.allclose(pipeline.run(batch), expected_loss, rtol=1e-5)
        for name, gradient in expected.items():
            assert (pipeline.gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
        num_compiled.append(len(compiled))
    assert num_compiled[0] == num_compiled[-1] > 0
