"""The reference test: a pipeline of rank-threads computes loss and every gradient of the plain transformers model."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import pytest
import torch
from harness.pipelines import FAMILIES, NUM_LAYERS, Pipeline, make_batch, make_model, plain_step
from torch import Tensor
from transformers import PreTrainedModel

from mobius.engine.executor import StepBatch

Gradients = dict[str, Tensor]

STAGES_PER_RANK = (1, 2, 3)
MICROBATCHES = (1, 2, 3, 5, 8)
WITH_ALL_CASES = {"gemma3": (1, 2), "llama-tied": (1, 2)}
"""Families, and microbatches with which they take every case: both kinds of layers, and a tied matrix. Beyond that each
family takes a share of the pairs of a case and a number of microbatches, another one with each N and v. So all three
meet two by two: N and v with a pair, which some family takes; a family with a pair, with some N and v; and a family
with N and v. What differs between families is within a layer, which knows nothing of ranks, stages and microbatches."""
LIKE_LAYERS = {"llama", "llama-tied", "mistral"}
"""Families whose layers are all of one kind."""
NUM_RANKS = (1, 2, 3, 4)
CASES = {  # number of slots, whether graphs are kept
    "resident": (None, False),
    "resident, graphs kept": (None, True),
    "streamed": (1, False),
    "streamed, prefetched": (2, False),
    "streamed, last graphs kept": (2, True),
}
MIXED = {  # number of slots, whether graphs are kept, resident stages of the first rank's v, of all the other ranks'
    "first resident": (2, False, lambda v: {0}, lambda v: {0}),
    "all but the last resident, graphs kept": (1, True, lambda v: set(range(v - 1)), lambda v: set(range(v - 1))),
    "last resident, graphs kept": (2, True, lambda v: {v - 1}, lambda v: {v - 1}),
    "one rank resident, the others streamed": (1, False, lambda v: set(range(v)), lambda v: set()),
    "one rank streamed, the others mixed": (2, True, lambda v: set(), lambda v: {v // 2}),
}


@lru_cache(maxsize=32)
def plain(family: str, num_layers: int, num_microbatches: int) -> tuple[PreTrainedModel, StepBatch, Tensor, Gradients]:
    """Model and batch, and the loss and gradients of transformers alone, which many pipelines are compared with."""
    model, batch = make_model(family, num_layers), make_batch(num_microbatches)
    loss, gradients = plain_step(model, batch, num_microbatches)
    return model, batch, loss, gradients


def cases_of(family: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> list[str]:
    if num_microbatches in WITH_ALL_CASES.get(family, ()):
        return list(CASES)
    first = sorted(FAMILIES).index(family) + len(STAGES_PER_RANK) * num_ranks + stages_per_rank
    turns = enumerate(product(CASES, MICROBATCHES), start=first)
    return [case for turn, (case, number) in turns if turn % len(FAMILIES) == 0 and number == num_microbatches]


@pytest.mark.parametrize("num_microbatches", MICROBATCHES)
def test_each_case_meets_each_number_of_microbatches_in_each_pipeline_and_in_each_family(num_microbatches: int) -> None:
    sizes = [*product(NUM_RANKS, STAGES_PER_RANK)]
    for size in sizes:
        assert {case for family in FAMILIES for case in cases_of(family, *size, num_microbatches)} == CASES.keys()
    for family in FAMILIES:
        assert {case for size in sizes for case in cases_of(family, *size, num_microbatches)} == CASES.keys()


@pytest.mark.grid(strength=2)
@pytest.mark.parametrize("stages_per_rank", STAGES_PER_RANK)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_pipeline_equals_the_plain_model_bit_by_bit(family: str, num_ranks: int, stages_per_rank: int) -> None:
    # A layer or more in each stage; the families that have two kinds of layers have them from 6 on.
    num_layers = max(4 if family in LIKE_LAYERS else 6, num_ranks * stages_per_rank)
    for num_microbatches in MICROBATCHES:
        cases = cases_of(family, num_ranks, stages_per_rank, num_microbatches)
        if not cases:
            continue
        model, batch, expected_loss, expected = plain(family, num_layers, num_microbatches)
        for case in cases:
            num_slots, keeps_graphs = CASES[case]
            pipeline = Pipeline(model, num_ranks, stages_per_rank, num_microbatches, num_slots, keeps_graphs)
            where = f"N={num_ranks} v={stages_per_rank} M={num_microbatches} {case}"
            assert torch.equal(pipeline.run(batch), expected_loss), where
            assert pipeline.gradients.keys() == expected.keys(), where
            for name, gradient in expected.items():
                is_reordered = name in tied_of(model) and num_microbatches > 1
                _assert_equal(pipeline.gradients[name], gradient, is_reordered, f"{where} {name}")


@pytest.mark.grid
@pytest.mark.parametrize("case", sorted(MIXED))
@pytest.mark.parametrize("family", ["gemma3", "llama", "llama-tied"])
def test_a_mixture_of_resident_and_streamed_stages_equals_the_plain_model_bit_by_bit(family: str, case: str) -> None:
    num_slots, keeps_graphs, first, others = MIXED[case]
    for num_microbatches in (1, 2):
        model, batch, expected_loss, expected = plain(family, NUM_LAYERS, num_microbatches)
        for num_ranks, stages_per_rank in ((1, 2), (1, 4), (2, 2), (2, 3), (3, 2), (4, 3)):
            resident = frozenset(
                rank + position * num_ranks
                for rank in range(num_ranks)
                for position in (others if rank else first)(stages_per_rank)
            )
            pipeline = Pipeline(
                model, num_ranks, stages_per_rank, num_microbatches, num_slots, keeps_graphs, resident=resident
            )
            where = f"N={num_ranks} v={stages_per_rank} M={num_microbatches} {case}"
            assert torch.equal(pipeline.run(batch), expected_loss), where
            assert pipeline.gradients.keys() == expected.keys(), where
            for name, gradient in expected.items():
                is_reordered = name in tied_of(model) and num_microbatches > 1
                _assert_equal(pipeline.gradients[name], gradient, is_reordered, f"{where} {name}")


@pytest.mark.grid
@pytest.mark.parametrize("sizes", [(0, 4, 8, 0), (0, 6, 5, 1), (1, 5, 6, 0), (3, 1, 6, 2), (0, 0, 12, 0), (0, 7, 0, 5)])
@pytest.mark.parametrize("case", sorted(CASES))
def test_stages_of_unequal_size_and_some_without_layers_compute_the_same_bits(
    sizes: tuple[int, ...], case: str
) -> None:
    model, batch, expected_loss, expected = plain("llama", NUM_LAYERS, 3)
    num_slots, keeps_graphs = CASES[case]
    for num_ranks in (1, 2, 4):
        pipeline = Pipeline(model, num_ranks, 4 // num_ranks, 3, num_slots, keeps_graphs, sizes=sizes)
        assert torch.equal(pipeline.run(batch), expected_loss), num_ranks
        assert pipeline.gradients.keys() == expected.keys(), num_ranks
        for name, gradient in expected.items():
            assert torch.equal(pipeline.gradients[name], gradient), f"N={num_ranks} {name}"


def tied_of(model: PreTrainedModel) -> set[str]:
    return {"model.embed_tokens.weight", "lm_head.weight"} if model.config.tie_word_embeddings else set()


def _assert_equal(actual: torch.Tensor, expected: torch.Tensor, is_reordered: bool, where: str) -> None:
    """Bit-equal, but for a tied matrix under several microbatches.

    Autograd adds head and embedding gradient within a microbatch, (h0 + e0) + (h1 + e1); in a pipeline the two are
    made by different stages and meet at the end of the step, (h0 + h1) + (e0 + e1). The bits differ, by 1e-6 of the
    largest at most.
    """
    if is_reordered:
        assert (actual - expected).abs().max() <= 1e-6 * expected.abs().max(), where
    else:
        assert torch.equal(actual, expected), where


def test_two_sequences_in_a_microbatch_and_loss_chunks_change_rounding_only() -> None:
    model = make_model("llama")
    batch = make_batch(4)
    expected_loss, expected = plain_step(model, batch, 2)
    pipeline = Pipeline(model, 2, 2, 2, 2, loss_chunk_tokens=5)
    assert torch.allclose(pipeline.run(batch), expected_loss, rtol=1e-6)
    for name, gradient in expected.items():
        assert (pipeline.gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_a_missing_microbatch_would_be_seen() -> None:
    """The comparison can fail: gradients of another split of the targets are not equal."""
    model = make_model("llama")
    batch = make_batch(2)
    _, expected = plain_step(model, make_batch(3), 3)
    pipeline = Pipeline(model, 2, 2, 2, 2)
    pipeline.run(batch)
    assert not torch.equal(pipeline.gradients["lm_head.weight"], expected["lm_head.weight"])
