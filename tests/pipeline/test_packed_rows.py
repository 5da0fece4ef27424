"""Rows of several documents: no document sees another one, and together they give what each gives alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from harness.pipelines import (
    CPU,
    FAMILIES,
    ModelWeights,
    Pipeline,
    documents_alone,
    make_model,
    make_packed_batch,
)
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from mobius.models.attention import Documents
from mobius.models.blocks import LayerInputs, ModelParts
from mobius.models.graph import run
from mobius.models.loss import shift_labels
from mobius.plan.partition import StageCut
from mobius.runtime.executor import StepBatch
from mobius.runtime.stage import StageModule

LENGTH = 20
ROWS = [[7, 2, 5], [20], [3, 11, 6], [9, 9]]
"""With and without padding; documents shorter and longer than the families' windows of 4 and 5."""
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
    model = make_model(family, 6)
    batch = make_packed_batch(ROWS, LENGTH, 1)
    before = everything(model, batch, keeps_graphs=keeps_graphs)
    for row, lengths in enumerate(ROWS):
        for place, length in enumerate(lengths):
            own = slice(start := sum(lengths[:place]), start + length)
            for token in {own.start, own.start + length // 2, own.stop - 1}:
                changed = batch.input_ids.clone()
                changed[row, token] = 95 - changed[row, token]
                after = everything(model, replace(batch, input_ids=changed), keeps_graphs=keeps_graphs)
                for name, value in before.items():
                    differs = (value != after[name]).flatten(2).any(-1)
                    assert name != "outputs" or differs[row, own].any(), "the change does something"
                    differs[row, own] = False
                    assert not differs.any(), f"row {row}, token {token}: {name} at {differs.nonzero().tolist()}"


def everything(model: PreTrainedModel, batch: StepBatch, *, keeps_graphs: bool) -> dict[str, Tensor]:
    """By token: outputs of the last layer, loss, gradient of the input embedding; [B, L, ...]."""
    parts = ModelParts(model.config, CPU, packed=torch.float32)
    stage = StageModule(parts, StageCut(0, 0, len(parts.layers), True, True), loss_chunk_tokens=4096)
    weights = {name: ModelWeights(model).read(name, shape) for name, shape in stage.shapes.items()}
    gradients = {name: torch.zeros(shape) for name, shape in stage.shapes.items()}
    assert batch.documents is not None
    positions, bounds = batch.documents
    arguments = LayerInputs(parts, device=CPU, dtype=torch.float32)(LENGTH, Documents(positions, bounds[0]))
    hidden, kept = stage.forward(weights, batch.input_ids, arguments, keep_graphs=keeps_graphs)
    _, gradient = stage.loss(weights, gradients, hidden, batch.labels, num_targets=batch.num_targets, loss_scale=1.0)
    logits = run(parts.head, weights, run(parts.norm, weights, hidden, {}), {})
    losses = F.cross_entropy(logits.flatten(0, 1), shift_labels(batch.labels).flatten(), reduction="none")
    of_inputs = stage.backward(weights, gradients, kept, gradient, arguments)
    return {"outputs": hidden, "losses": losses.view(-1, LENGTH, 1), "gradients": of_inputs}


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
