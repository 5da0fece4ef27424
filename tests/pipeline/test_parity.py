"""The reference test: a pipeline of rank-threads computes loss and every gradient of the plain transformers model."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from harness.pipelines import FAMILIES, Pipeline, make_batch, make_model, plain_step

STAGES_PER_RANK = (1, 2, 3)
MICROBATCHES = (1, 2, 3, 5, 8)
WITH_ALL_CASES = (1, 2)
"""Microbatches with which each family takes every case. Of the pairs of a case and another number each family takes its
share, so that every pair is met by one family with each N and v."""
LIKE_LAYERS = {"llama", "llama-tied", "mistral"}
"""Families whose layers are all of one kind."""
CASES = {"llama", "llama-tied", "gemma3"}
"""The others differ from these within a layer, which knows nothing of ranks, stages and microbatches: they take all
cases with 1 and 3 microbatches, and one case, another one each time, with the other numbers."""
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


def cases_of(family: str, num_microbatches: int) -> list[str]:
    if num_microbatches in WITH_ALL_CASES:
        return list(CASES)
    shared = product(CASES, (number for number in MICROBATCHES if number not in WITH_ALL_CASES))
    turns = enumerate(shared, start=sorted(FAMILIES).index(family))
    return [case for turn, (case, number) in turns if turn % len(FAMILIES) == 0 and number == num_microbatches]


@pytest.mark.parametrize("num_microbatches", MICROBATCHES)
def test_each_case_meets_each_number_of_microbatches_in_a_family(num_microbatches: int) -> None:
    assert {case for family in FAMILIES for case in cases_of(family, num_microbatches)} == CASES.keys()


@pytest.mark.parametrize("stages_per_rank", STAGES_PER_RANK)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_pipeline_equals_the_plain_model_bit_by_bit(family: str, num_ranks: int, stages_per_rank: int) -> None:
    # A layer or more in each stage; the families that have two kinds of layers have them from 6 on.
    model = make_model(family, max(4 if family in LIKE_LAYERS else 6, num_ranks * stages_per_rank))
    tied = {"model.embed_tokens.weight", "lm_head.weight"} if model.config.tie_word_embeddings else set()
    for num_microbatches in MICROBATCHES:
        cases = cases_of(family, num_microbatches)
        batch = make_batch(num_microbatches)
        expected_loss, expected = plain_step(model, batch, num_microbatches)
        for case in cases:
            num_slots, keeps_graphs = CASES[case]
            pipeline = Pipeline(model, num_ranks, stages_per_rank, num_microbatches, num_slots, keeps_graphs)
            where = f"N={num_ranks} v={stages_per_rank} M={num_microbatches} {case}"
            assert torch.equal(pipeline.run(batch), expected_loss), where
            assert pipeline.gradients.keys() == expected.keys(), where
            for name, gradient in expected.items():
                is_reordered = name in tied and num_microbatches > 1
                _assert_equal(pipeline.gradients[name], gradient, is_reordered, f"{where} {name}")


@pytest.mark.parametrize("case", sorted(MIXED))
@pytest.mark.parametrize("family", ["gemma3", "llama", "llama-tied"])
def test_a_mixture_of_resident_and_streamed_stages_equals_the_plain_model_bit_by_bit(family: str, case: str) -> None:
    model = make_model(family)
    tied = {"model.embed_tokens.weight", "lm_head.weight"} if model.config.tie_word_embeddings else set()
    num_slots, keeps_graphs, first, others = MIXED[case]
    for num_microbatches in (1, 2):
        batch = make_batch(num_microbatches)
        expected_loss, expected = plain_step(model, batch, num_microbatches)
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
                is_reordered = name in tied and num_microbatches > 1
                _assert_equal(pipeline.gradients[name], gradient, is_reordered, f"{where} {name}")


@pytest.mark.parametrize("sizes", [(0, 4, 8, 0), (0, 6, 5, 1), (1, 5, 6, 0), (3, 1, 6, 2), (0, 0, 12, 0), (0, 7, 0, 5)])
@pytest.mark.parametrize("case", sorted(CASES))
def test_stages_of_unequal_size_and_some_without_layers_compute_the_same_bits(
    sizes: tuple[int, ...], case: str
) -> None:
    model = make_model("llama")
    batch = make_batch(3)
    expected_loss, expected = plain_step(model, batch, 3)
    num_slots, keeps_graphs = CASES[case]
    for num_ranks in (1, 2, 4):
        pipeline = Pipeline(model, num_ranks, 4 // num_ranks, 3, num_slots, keeps_graphs, sizes=sizes)
        assert torch.equal(pipeline.run(batch), expected_loss), num_ranks
        assert pipeline.gradients.keys() == expected.keys(), num_ranks
        for name, gradient in expected.items():
            assert torch.equal(pipeline.gradients[name], gradient), f"N={num_ranks} {name}"


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
