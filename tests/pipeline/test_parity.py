"""The reference test: a pipeline of rank-threads computes loss and every gradient of the plain transformers model."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from harness.family_checks import check_text_part, parity_of
from harness.pipelines import (
    FAMILIES,
    Pipeline,
    Step,
    assert_same_bits,
    make_batch,
    make_model,
    plain_step,
    tied_names,
)
from transformers import PreTrainedModel

from mobius.engine.step_inputs import StepBatch
from mobius.schedule.plan import RecomputeLevel

STAGES_PER_RANK = (1, 2, 3)
MICROBATCHES = (1, 2, 3, 5)
WITH_ALL_CASES = {"gemma3": 2, "llama-tied": 1}
"""Families, and the number of microbatches with which they take every case: both kinds of layers, whose gradients are
summed, and a tied matrix, which is the same to the bit with one. Beyond that each
family takes a share of the pairs of a case and a number of microbatches, another one with each N and v. So all three
meet two by two: N and v with a pair, which some family takes; a family with a pair, with some N and v; and a family
with N and v. What differs between families is within a layer, which knows nothing of ranks, stages and microbatches."""
LIKE_LAYERS = {"llama", "llama-tied", "mistral"}
"""Families whose layers are all of one kind."""
NUM_RANKS = (1, 2, 3, 4)
PRODUCTS = RecomputeLevel.ELEMENTWISE
CASES: dict[str, dict[str, Any]] = {
    "resident": {"num_slots": None},
    "resident, everything saved": {"num_slots": None, "keeps_graphs": True},
    "resident, products saved": {"num_slots": None, "keeps_graphs": True, "recompute_level": PRODUCTS},
    "streamed": {"num_slots": 1},
    "streamed, prefetched": {"num_slots": 2},
    "streamed, everything saved at last": {"num_slots": 2, "keeps_graphs": True},
    "streamed, products saved at last": {"num_slots": 2, "keeps_graphs": True, "recompute_level": PRODUCTS},
}
MIXED = {  # number of slots, whether last stages save all, resident stages of the first rank's v, of all other ranks'
    "first resident": (2, False, lambda v: {0}, lambda v: {0}),
    "all but the last resident, all saved": (1, True, lambda v: set(range(v - 1)), lambda v: set(range(v - 1))),
    "last resident, all saved": (2, True, lambda v: {v - 1}, lambda v: {v - 1}),
    "one rank resident, the others streamed": (1, False, lambda v: set(range(v)), lambda v: set()),
    "one rank streamed, the others mixed": (2, True, lambda v: set(), lambda v: {v // 2}),
}


@lru_cache(maxsize=32)
def plain(family: str, num_layers: int, num_microbatches: int) -> tuple[PreTrainedModel, StepBatch, Step]:
    """Model and batch, and the step of transformers alone, which many pipelines are compared with."""
    model, batch = make_model(family, num_layers), make_batch(num_microbatches)
    return model, batch, plain_step(model, batch, num_microbatches)


def assert_parity(family: str, num_layers: int, *sizes: int, where: str, **options: Any) -> None:
    """Compare a pipeline of N ranks with v stages each and M microbatches with the plain model, bit by bit.

    With a tied matrix, autograd adds head and embedding gradient within a microbatch, (h0 + e0) + (h1 + e1). In a
    pipeline two stages make them, which meet at the end of the step: (h0 + h1) + (e0 + e1).
    """
    num_microbatches = sizes[2]
    model, batch, expected = plain(family, num_layers, num_microbatches)
    found = Pipeline(model, *sizes, **options).step(batch)
    reordered = tied_names(model) if num_microbatches > 1 else ()
    assert_same_bits(found, expected, (sizes, where), reordered=reordered)


def num_layers_of(family: str, num_stages: int) -> int:
    """A layer or more for each stage; the families that have two kinds of layers have them from 6 on."""
    return max(4 if family in LIKE_LAYERS else 6, num_stages)


def cases_of(family: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> list[str]:
    if num_microbatches == WITH_ALL_CASES.get(family):
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


@pytest.mark.grid
@pytest.mark.parametrize("sizes", [*product(NUM_RANKS, STAGES_PER_RANK)], ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_pipeline_equals_the_plain_model_bit_by_bit(family: str, sizes: tuple[int, int]) -> None:
    num_ranks, stages_per_rank = sizes
    num_layers = num_layers_of(family, num_ranks * stages_per_rank)
    for number in MICROBATCHES:
        for case in cases_of(family, num_ranks, stages_per_rank, number):
            assert_parity(family, num_layers, num_ranks, stages_per_rank, number, where=case, **CASES[case])


@pytest.mark.grid
@pytest.mark.parametrize("case", sorted(MIXED))
@pytest.mark.parametrize("family", ["gemma3", "llama", "llama-tied"])
def test_a_mixture_of_resident_and_streamed_stages_equals_the_plain_model_bit_by_bit(family: str, case: str) -> None:
    """One and two microbatches take turns over the sizes; what is one for a case or family is two for the next."""
    num_slots, saves_all, first, others = MIXED[case]
    turn = sorted(MIXED).index(case) + sorted(FAMILIES).index(family)
    sizes = ((1, 2), (1, 4), (2, 2), (2, 3), (3, 2), (4, 2))
    for number, (num_ranks, stages_per_rank) in enumerate(sizes, start=turn):
        resident = frozenset(
            rank + position * num_ranks
            for rank in range(num_ranks)
            for position in (others if rank else first)(stages_per_rank)
        )
        options = {"num_slots": num_slots, "keeps_graphs": saves_all, "resident": resident}
        num_layers = num_layers_of(family, num_ranks * stages_per_rank)
        assert_parity(family, num_layers, num_ranks, stages_per_rank, 1 + number % 2, where=case, **options)


@pytest.mark.grid
@pytest.mark.parametrize("sizes", [(0, 2, 4, 0), (0, 3, 2, 1), (1, 2, 3, 0), (2, 1, 2, 1), (0, 0, 6, 0), (0, 4, 0, 2)])
@pytest.mark.parametrize("case", sorted(CASES))
def test_stages_of_unequal_size_and_some_without_layers_compute_the_same_bits(
    sizes: tuple[int, ...], case: str
) -> None:
    for num_ranks in (1, 2, 4):
        assert_parity("llama", sum(sizes), num_ranks, 4 // num_ranks, 3, where=case, sizes=sizes, **CASES[case])


def test_two_sequences_in_a_microbatch_and_loss_chunks_change_rounding_only() -> None:
    model = make_model("llama", 4)
    batch = make_batch(4)
    expected_loss, expected = plain_step(model, batch, 2)
    loss, gradients = Pipeline(model, 2, 2, 2, 2, loss_chunk_tokens=5).step(batch)
    assert torch.allclose(loss, expected_loss, rtol=1e-6)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_a_missing_microbatch_would_be_seen() -> None:
    """The comparison can fail: gradients of another split of the targets are not equal."""
    model = make_model("llama", 4)
    _, expected = plain_step(model, make_batch(3), 3)
    _, gradients = Pipeline(model, 2, 2, 2, 2).step(make_batch(2))
    assert not torch.equal(gradients["lm_head.weight"], expected["lm_head.weight"])


FURTHER_FAMILIES = {
    "apertus": "constants among its weights",
    "cohere2": "attention parallel to the feed-forward part, scaled logits",
    "exaone4": "norms behind attention and feed-forward part, a kind of layer without rotary embeddings",
    "gemma2": "scores and logits with a cap",
    "glm4": "norms on both sides, rotary embeddings on half of each head",
    "gpt_oss": "attention sinks, experts with biases",
    "granite": "scaled embeddings, residuals, scores and logits",
    "gemma4_text": "heads of two widths, keys as values, a stored constant, a plain part beside experts",
    "minicpm3": "projections of low rank, values narrower than keys, scaled hidden states before the head",
    "olmo": "norms without weights, outputs changed in place",
    "phi": "a bias in the head, another name of the last norm",
    "phi3": "one linear for queries, keys and values",
    "qwen3_5_text": "layers with a state instead of attention",
}


@pytest.mark.grid
@pytest.mark.parametrize(("num_ranks", "stages_per_rank"), [(2, 2), (1, 3)])
@pytest.mark.parametrize("family", FURTHER_FAMILIES)
def test_families_with_other_features_equal_the_plain_model_bit_by_bit(
    family: str, num_ranks: int, stages_per_rank: int
) -> None:
    assert parity_of(family, num_ranks=num_ranks, stages_per_rank=stages_per_rank) == "bit-equal"


TEXT_PARTS = {
    "gemma3": "its head and embedding are one, two kinds of layers",
    "idefics3": "another name of the text part",
    "qwen3_vl": "positions on three axes",
    "voxtral": "sound; the head is never tied",
}


@pytest.mark.parametrize("family", TEXT_PARTS)
def test_a_text_part_equals_the_larger_model_bit_by_bit(family: str) -> None:
    assert check_text_part(family) == {"parity": "bit-equal"}
