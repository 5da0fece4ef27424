"""A step whose stages keep products alone computes the step of the plain transformers model, bit by bit in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from harness.packed_rows import LENGTH, ROWS, make_packed_batch
from harness.pipelines import FAMILIES, Pipeline, make_batch, make_model, plain_step
from torch import Tensor
from transformers import PreTrainedModel

from mobius.engine.executor import StepBatch
from mobius.schedule.plan import RecomputeLevel

SIZES = [(1, 1), (1, 3), (2, 2), (3, 1), (4, 2)]
"""Ranks, and stages of each."""
MICROBATCHES = (1, 2, 3)
SLOTS = (None, 1, 2)
"""All resident; or streamed, and the stages that stay in a slot from forward to backward keep their products."""


def run(model: PreTrainedModel, batch: StepBatch, *given: Any, **options: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    pipeline = Pipeline(model, *given, keeps_graphs=True, **options)
    return pipeline.run(batch), pipeline.gradients


@pytest.mark.grid
@pytest.mark.parametrize(
    ("family", "num_ranks", "stages_per_rank"),
    [
        (family, *size)
        for turn, family in enumerate(sorted(FAMILIES))
        for number, size in enumerate(SIZES)
        if (turn + number) % 2 == 0  # each family meets half of the sizes, each size half of the families
    ],
)
def test_pipeline_equals_the_plain_model_bit_by_bit(family: str, num_ranks: int, stages_per_rank: int) -> None:
    model = make_model(family, max(6, num_ranks * stages_per_rank))
    tied = {"model.embed_tokens.weight", "lm_head.weight"} if model.config.tie_word_embeddings else set()
    for num_microbatches in MICROBATCHES:
        batch = make_batch(num_microbatches)
        expected_loss, expected = plain_step(model, batch, num_microbatches)
        for num_slots in SLOTS:
            given = num_ranks, stages_per_rank, num_microbatches, num_slots
            loss, gradients = run(model, batch, *given, recompute_level=RecomputeLevel.ELEMENTWISE)
            assert torch.equal(loss, expected_loss), given
            assert gradients.keys() == expected.keys(), given
            for name, gradient in expected.items():
                if name in tied and num_microbatches > 1:  # both halves' microbatches are added apart
                    assert (gradients[name] - gradient).abs().max() <= 1e-6 * gradient.abs().max(), (given, name)
                else:
                    assert torch.equal(gradients[name], gradient), (given, name)


def assert_levels_agree(model: PreTrainedModel, batch: StepBatch, *given: Any, **options: Any) -> None:
    (loss, gradients), (expected_loss, expected) = (
        run(model, batch, *given, recompute_level=level, **options)
        for level in (RecomputeLevel.ELEMENTWISE, RecomputeLevel.NONE)
    )
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name


@pytest.mark.grid
@pytest.mark.parametrize("num_slots", SLOTS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_in_bf16_it_has_the_bits_of_everything_kept(family: str, num_slots: int | None) -> None:
    assert_levels_agree(make_model(family, 6), make_batch(4), 2, 2, 2, num_slots, dtype=torch.bfloat16)


def test_rounds_and_mixed_residency_have_the_bits_of_everything_kept() -> None:
    model, batch = make_model("llama-tied", 6), make_batch(4)
    assert_levels_agree(model, batch, 2, 3, 4, 2, accumulation_rounds=2)
    assert_levels_agree(model, batch, 2, 3, 4, 1, resident=frozenset({0, 3, 5}))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_packed_rows_have_the_bits_of_everything_kept(family: str) -> None:
    assert_levels_agree(make_model(family, 6), make_packed_batch(ROWS, LENGTH, 2), 2, 1, 2, 2)


@pytest.mark.extended  # compiling them takes a minute; tests/unit/models/test_recompute_policy.py compiles a layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_have_the_bits_of_everything_kept(dtype: torch.dtype) -> None:
    assert_levels_agree(make_model("llama-tied", 2), make_batch(2), 1, 2, 2, 1, compiled=True, dtype=dtype)
