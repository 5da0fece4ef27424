"""Evaluation through a pipeline of rank-threads gives loss and accuracy of the plain transformers model, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, product
from typing import Any

import pytest
import torch
from harness.packed_rows import LENGTH, ROWS, make_packed_batch
from harness.pipelines import FAMILIES, Pipeline, make_batch, make_model
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from mobius.engine.step_inputs import StepBatch
from mobius.models.attention import ATTENTION_IMPLEMENTATION, register_attention

CASES: dict[str, tuple[int | None, frozenset[int]]] = {  # number of slots, resident stages of those below 8
    "resident": (None, frozenset()),
    "streamed": (1, frozenset()),
    "streamed, prefetched": (2, frozenset()),
    "first and last resident": (2, frozenset({0, 1, 5, 6, 7})),
}
CUTS = [*product((1, 2, 3), (1, 2, 5), CASES)]  # v, M, and which case
PACKED_CUTS = [*product((1, 2, 3), (1, 2, 4), ((1, None), (2, 2)))]  # N, M, v and its slots


def plain(model: PreTrainedModel, batch: StepBatch, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """The same microbatches by transformers alone, with its own loss: summed losses, and targets that are hit."""
    losses, hits = [], []
    for tokens, labels in zip(
        batch.input_ids.chunk(num_microbatches), batch.labels.chunk(num_microbatches), strict=True
    ):
        with torch.no_grad():
            made = model(input_ids=tokens, labels=labels, num_items_in_batch=1)
        losses.append(made.loss)
        hits.append((made.logits[:, :-1].argmax(-1) == labels[:, 1:]).sum())
    return torch.stack(losses), torch.stack(hits)


def learned(batch: StepBatch, model: PreTrainedModel) -> StepBatch:
    """The batch with labels of which the model hits some: half of them are what it finds most probable."""
    with torch.no_grad():
        found = model(input_ids=batch.input_ids).logits.argmax(-1)
    labels = batch.labels.clone()
    hit = torch.arange(labels.shape[1] - 1) % 2 == 0
    is_target = (labels[:, 1:] != -100) & hit
    labels[:, 1:][is_target] = found[:, :-1][is_target]
    return StepBatch(batch.input_ids, labels, batch.num_targets, batch.num_tokens, batch.num_samples)


def share_of(family: str, cuts: Sequence[Any], num_shares: int) -> list[Any]:
    """Cuts that `family` is compared on: each of `cuts` is some family's."""
    return [*islice(cuts, sorted(FAMILIES).index(family) % num_shares, None, num_shares)]


def test_each_cut_is_met_by_a_family() -> None:
    for cuts, num_shares in ((CUTS, len(FAMILIES)), (PACKED_CUTS, 5)):
        assert {cut for family in FAMILIES for cut in share_of(family, cuts, num_shares)} == {*cuts}


@pytest.mark.grid
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_evaluation_equals_the_plain_model_bit_by_bit(family: str, num_ranks: int) -> None:
    """Each microbatch's loss and hits, over N, v, M, tied and not, streamed and resident."""
    model = make_model(family, max(6, 3 * num_ranks))
    own = share_of(family, CUTS, len(FAMILIES))
    met, every = ([{*kinds} for kinds in zip(*cuts, strict=True)] for cuts in (own, CUTS))
    assert met == every, "each family meets each v, each M and each case"
    for num_microbatches in (1, 2, 5):
        batch = learned(make_batch(num_microbatches), model)
        losses, hits = plain(model, batch, num_microbatches)
        assert 0 < int(hits.sum()) < batch.num_targets, "the comparison sees hits and misses"
        for stages_per_rank, number, name in own:
            if number == num_microbatches:
                slots, resident = CASES[name]
                own_stages = resident & {*range(num_ranks * stages_per_rank)}
                pipeline = Pipeline(model, num_ranks, stages_per_rank, number, slots, resident=own_stages)
                sums = pipeline.evaluate(batch)
                where = f"N={num_ranks} v={stages_per_rank} M={num_microbatches} {name}"
                assert torch.equal(sums.losses, losses), where
                assert torch.equal(sums.num_correct, hits), where


def test_several_rows_in_a_microbatch_and_stages_without_layers_make_the_same_bits() -> None:
    model = make_model("llama", 6)
    batch = learned(make_batch(6), model)
    losses, hits = plain(model, batch, 2)
    for sizes in ((0, 2, 4, 0), (2, 1, 2, 1)):
        sums = Pipeline(model, 2, 2, 2, 2, sizes=sizes).evaluate(batch)
        assert torch.equal(sums.losses, losses)
        assert torch.equal(sums.num_correct, hits)


def test_chunks_of_the_loss_change_rounding_only_and_no_hit() -> None:
    """The one thing that changes bits: a microbatch's losses are summed chunk by chunk."""
    model = make_model("llama", 4)
    batch = learned(make_batch(4), model)
    losses, hits = plain(model, batch, 2)
    sums = Pipeline(model, 2, 2, 2, 2, loss_chunk_tokens=5).evaluate(batch)
    assert torch.allclose(sums.losses, losses, rtol=1e-6)
    assert torch.equal(sums.num_correct, hits)


def test_other_microbatches_would_be_seen() -> None:
    """The comparison can fail."""
    model = make_model("llama", 4)
    losses, _ = plain(model, make_batch(3), 3)
    sums = Pipeline(model, 2, 2, 4, 2).evaluate(make_batch(4))
    assert torch.equal(sums.losses[:3], losses)
    assert not torch.isin(sums.losses[3], losses).any()


def packed_model(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a plain transformers model that attends within documents."""
    register_attention()
    made = AutoModelForCausalLM.from_config(
        model.config, dtype=torch.float32, attn_implementation=ATTENTION_IMPLEMENTATION, trust_remote_code=False
    )
    made.load_state_dict(model.state_dict())
    return made.eval()


def plain_packed(model: PreTrainedModel, batch: StepBatch, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """The packed rows by transformers' own forward, which hands our attention the documents' bounds."""
    losses, hits = [], []
    assert batch.documents is not None
    position_ids, cu_seqlens = batch.documents
    parts = (each.chunk(num_microbatches) for each in (batch.input_ids, batch.labels, position_ids))
    for tokens, labels, places, own in zip(*parts, cu_seqlens, strict=True):
        with torch.no_grad():
            given = {"position_ids": places, "attention_mask": None, "use_cache": False, "documents": own}
            logits = model(input_ids=tokens, **given).logits.float()
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
        losses.append(F.cross_entropy(logits.view(-1, logits.shape[-1]), targets, reduction="sum"))
        hits.append((logits.view(-1, logits.shape[-1]).argmax(-1) == targets).sum())
    return torch.stack(losses), torch.stack(hits)


def alone(model: PreTrainedModel, rows: Sequence[Sequence[int]], batch: StepBatch) -> float:
    """Summed loss of each document by itself."""
    total = 0.0
    for number, row in enumerate(rows):
        for place, length in enumerate(row):
            own = slice(start := sum(row[:place]), start + length)
            with torch.no_grad():
                given = batch.input_ids[number : number + 1, own], batch.labels[number : number + 1, own]
                total += float(model(input_ids=given[0], labels=given[1], num_items_in_batch=1).loss)
    return total


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_rows_equal_the_plain_model_with_the_same_attention_bit_by_bit(family: str) -> None:
    """Bit for bit by transformers' own forward, and within rounding what each document gives alone."""
    model = make_model(family, 6)
    reference = packed_model(model)
    total = alone(model, ROWS, make_packed_batch(ROWS, LENGTH, 1))
    for num_ranks, num_microbatches, (stages_per_rank, num_slots) in share_of(family, PACKED_CUTS, 5):
        batch = make_packed_batch(ROWS, LENGTH, num_microbatches)
        losses, hits = plain_packed(reference, batch, num_microbatches)
        sums = Pipeline(model, num_ranks, stages_per_rank, num_microbatches, num_slots).evaluate(batch)
        where = f"N={num_ranks} v={stages_per_rank} M={num_microbatches}"
        assert torch.equal(sums.losses, losses), where
        assert torch.equal(sums.num_correct, hits), where
        assert float(losses.sum()) == pytest.approx(total, rel=1e-5)
