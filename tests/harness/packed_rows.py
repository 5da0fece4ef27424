"""Rows of several documents, what each document gives alone, and whether one sees another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from harness.pipelines import CPU, VOCAB, ModelWeights
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from mobius.engine.documents import Rows, position_ids_and_cu_seqlens
from mobius.engine.stage import StageModule
from mobius.engine.stage_layers import MicrobatchContext
from mobius.engine.step_inputs import StepBatch
from mobius.models.attention import DocumentLayout
from mobius.models.block_autograd import run_without_graph
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.models.loss import TargetRows, shift_labels
from mobius.objectives.cross_entropy import SUPERVISED
from mobius.objectives.objective import StepScale
from mobius.schedule.partition import StageCut

LENGTH = 20
ROWS = [[7, 2, 5], [20], [3, 11, 6], [9, 9]]
"""With and without padding; documents shorter and longer than the families' windows of 4 and 5."""


def make_packed_batch(
    rows: Rows, seq_length: int, num_microbatches: int, *, max_documents: int | None = None
) -> StepBatch:
    """Random tokens in documents of these lengths, of which the first tokens are prompts.

    `max_documents` of a row, its padding counted as one; None: as many as there are.
    """
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, VOCAB, (len(rows), seq_length), generator=generator)
    labels = torch.full_like(tokens, -100)
    for number, row in enumerate(rows):
        for place, length in enumerate(row):
            start, end = sum(row[:place]), sum(row[: place + 1])
            prompt = min(1 + (number + place) % 3, length - 1)
            labels[number, start + prompt : end] = tokens[number, start + prompt : end]
        tokens[number, sum(row) :] = 0
    most = max_documents or max(len(row) for row in rows) + 1
    places = position_ids_and_cu_seqlens(
        rows, seq_length=seq_length, num_microbatches=num_microbatches, max_documents=most
    )
    position_ids, cu_seqlens = (torch.from_numpy(each) for each in places)
    num_tokens, num_samples = sum(map(sum, rows)), sum(map(len, rows))
    return StepBatch(
        tokens,
        labels,
        int((labels != -100).sum()),
        num_tokens,
        num_samples,
        documents=(position_ids, cu_seqlens),
        document_lengths=rows,
    )


def documents_alone(model: PreTrainedModel, rows: Rows, batch: StepBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The same step by transformers alone, one document after the other, each without padding.

    Rotary factors that depend on length forget the documents before, as in a model that has just been loaded.
    """
    model.zero_grad()
    total = torch.zeros(())
    for number, row in enumerate(rows):
        for place, length in enumerate(row):
            decoder = model.get_decoder()  # below adapters, if there are any
            for name, module in [*decoder.named_children()]:
                if "Rotary" in type(module).__name__:
                    setattr(decoder, name, type(module)(model.config).to(model.device))
            own = slice(start := sum(row[:place]), start + length)
            given = batch.input_ids[number : number + 1, own], batch.labels[number : number + 1, own]
            loss = model(input_ids=given[0], labels=given[1], num_items_in_batch=batch.num_targets).loss
            loss.backward()
            total += loss.detach().cpu()
    named = model.named_parameters(remove_duplicate=False)
    return total, {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def assert_no_leaks(
    model: PreTrainedModel,
    *,
    keeps_graphs: bool,
    compiled: bool = False,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    tile_tokens: int | None = None,
) -> None:
    """Change tokens of each document, and compare bits of all others: outputs, losses, gradients of inputs."""
    settings: dict[str, Any] = {"compiled": compiled, "device": device, "dtype": dtype, "tile_tokens": tile_tokens}
    stage = OneStage(model, keeps_graphs=keeps_graphs, **settings)
    batch = make_packed_batch(ROWS, LENGTH, 1)
    before = stage.by_token(batch)
    for row, lengths in enumerate(ROWS):
        for place, length in enumerate(lengths):
            own = slice(start := sum(lengths[:place]), start + length)
            for token in {own.start, own.start + length // 2, own.stop - 1}:
                changed = batch.input_ids.clone()
                changed[row, token] = 95 - changed[row, token]
                after = stage.by_token(replace(batch, input_ids=changed))
                for name, value in before.items():
                    differs = (value != after[name]).flatten(2).any(-1)
                    assert name != "outputs" or differs[row, own].any(), "the change does something"
                    differs[row, own] = False
                    assert not differs.any(), f"row {row}, token {token}: {name} at {differs.nonzero().tolist()}"


class OneStage:
    """A whole model as one stage."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        keeps_graphs: bool,
        compiled: bool,
        device: torch.device,
        dtype: torch.dtype,
        tile_tokens: int | None,
    ) -> None:
        self._parts = parts = ModelParts(model.config, device, compiled=compiled, packed_dtype=dtype)
        cut = StageCut(0, 0, len(parts.layers), True, True)
        self._stage = StageModule(parts, cut, loss_chunk_tokens=4096, tile_tokens=tile_tokens, keep_graphs=keeps_graphs)
        source, shapes = ModelWeights(model), self._stage.shapes
        self._weights = {name: source.read(name, shape).to(device, dtype) for name, shape in shapes.items()}
        self._inputs = LayerArgumentsBuilder(parts, device=device, dtype=dtype)
        self._device = device

    def by_token(self, batch: StepBatch) -> dict[str, Tensor]:
        """Outputs of the last layer, losses, and gradients of the input embeddings; [B, L, ...]."""
        stage, weights, parts, device = self._stage, self._weights, self._parts, self._device
        gradients = {name: torch.zeros(shape, device=device) for name, shape in stage.shapes.items()}
        assert batch.documents is not None
        position_ids, cu_seqlens = (each.to(device) for each in batch.documents)
        tokens, labels = batch.input_ids.to(device), batch.labels.to(device)
        context = MicrobatchContext(self._inputs(LENGTH, DocumentLayout(position_ids, cu_seqlens[0])))
        hidden, kept = stage.forward(weights, tokens, context)
        rows, scale = TargetRows(shift_labels(labels)), StepScale(batch.num_targets)
        _, gradient = stage.loss(weights, gradients, hidden, rows, SUPERVISED, scale)
        logits = run_without_graph(parts.head, weights, run_without_graph(parts.norm, weights, hidden, {}), {})
        losses = F.cross_entropy(logits.flatten(0, 1).float(), shift_labels(labels).flatten(), reduction="none")
        of_inputs = stage.backward(weights, gradients, kept, gradient, context)
        results = {"outputs": hidden, "losses": losses.view(-1, LENGTH, 1), "gradients": of_inputs}
        return {name: value.cpu() for name, value in results.items()}
