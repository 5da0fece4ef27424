"""An embedding that no product file knows, with positions of its own, trains in stages, slices and packed rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import pipelines
from harness.packed_rows import LENGTH, ROWS, make_packed_batch
from harness.pipelines import Pipeline, Step, make_batch, make_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from mobius.engine.step_inputs import StepBatch
from mobius.models.block_autograd import Block
from mobius.models.blocks import ModelParts

TABLE = "model.positions.weight"


class PlacedEmbedding(nn.Module):
    """Embeddings of tokens, plus a trained vector for each position in a document."""

    takes_positions = True

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embed_tokens, self.positions = embedding, nn.Embedding(LENGTH, embedding.embedding_dim, device="meta")

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        result: Tensor = self.embed_tokens(tokens) + self.positions(position_ids)
        return result


class Given:
    def __init__(self, model: PreTrainedModel, table: Tensor) -> None:
        self._values = {**model.state_dict(), TABLE: table}

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._values[name].detach()


def expected_step(model: PreTrainedModel, table: Tensor, batch: StepBatch, rows: Any) -> Step:
    """The step by transformers, one document after the other."""
    model.zero_grad()
    table = table.clone().requires_grad_()
    total = torch.zeros(())
    for number, row in enumerate(rows):
        for place, length in enumerate(row):
            own = slice(sum(row[:place]), sum(row[:place]) + length)
            tokens, labels = batch.input_ids[number : number + 1, own], batch.labels[number : number + 1, own]
            hidden = model.get_input_embeddings()(tokens) + table[:length]
            loss = model(inputs_embeds=hidden, labels=labels, num_items_in_batch=batch.num_targets).loss
            loss.backward()
            total += loss.detach()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return total, {**gradients, TABLE: table.grad}


@pytest.mark.parametrize(("is_packed", "num_slices"), [(False, 1), (True, 1), (True, 2)])
def test_an_embedding_with_positions_trains_like_its_plain_model(
    monkeypatch: pytest.MonkeyPatch, is_packed: bool, num_slices: int
) -> None:
    monkeypatch.setattr(pipelines, "_PARTS", {})
    monkeypatch.setattr(
        ModelParts,
        "_embedding_block",
        lambda parts: Block.of("model.", PlacedEmbedding(parts.model.get_input_embeddings())),
    )
    model = make_model("llama", 4)
    rows = ROWS if is_packed else [[12], [12]]
    batch = make_packed_batch(ROWS, LENGTH, 2) if is_packed else make_batch(2)
    table = torch.randn(LENGTH, 32, generator=torch.Generator().manual_seed(3)) * 0.1
    expected = expected_step(model, table, batch, rows)
    number = 2 * num_slices
    found = Pipeline(model, 2, 2, number, 1, num_slices=num_slices, source=Given(model, table)).step(batch)
    assert found[0] == pytest.approx(float(expected[0]), rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).abs().max() <= 5e-6 * gradient.abs().max(), name
