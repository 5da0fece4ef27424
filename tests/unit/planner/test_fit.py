"""What is left of a GPU's memory goes to a further slot first and to activations then, and never beyond the limit."""

from typing import Any

import pytest

from mobius.config import Dtype
from mobius.errors import GpuMemoryError
from mobius.planner.budget import GIB, ByteSizes
from mobius.planner.fit import FittedPlan, StepTokens, fit_plan
from mobius.planner.plan import make_plan
from mobius.planner.shape import ModelShape

BF16 = ByteSizes.of(Dtype.BF16)
TOKENS = StepTokens(step=64 * 512, microbatch=16 * 512, loss_chunk=2048)


def fit(
    shape: ModelShape, gib: float | None, *, rank: int = 0, num_stages: int = 32, slots: int | None = 2, **options: Any
) -> FittedPlan:
    plan = make_plan(shape, num_ranks=4, num_stages=num_stages, num_microbatches=4, num_slots=slots)
    gpu_bytes = None if gib is None else int(gib * GIB)
    given = {"keeps_activations": False, **options}
    return fit_plan(plan, shape, BF16, rank=rank, tokens=TOKENS, gpu_bytes=gpu_bytes, **given)


def test_a_large_gpu_gets_a_third_slot_and_keeps_the_activations_of_each_ranks_last_stage(
    llama_7b: ModelShape,
) -> None:
    for rank in range(4):
        fitted = fit(llama_7b, 80, rank=rank)
        assert fitted.plan.num_slots == 3
        assert fitted.graph_stages == {28 + rank}


def test_a_gpu_with_little_left_gets_the_slot_only_and_one_without_neither(llama_7b: ModelShape) -> None:
    # Rank 0 by hand: 8 layers x 32768 tokens x 4096 x 2 bytes stashed = 2 GiB; two slots of a layer with embedding
    # 2 x 0.62, its fp32 gradients 1.24, one layer's work 1.34: 5.8 GiB; 5.4 more would keep one stage's activations.
    assert fit(llama_7b, 10).plan.num_slots == 3
    assert fit(llama_7b, 10).graph_stages == frozenset()
    assert fit(llama_7b, 7.5).plan.num_slots == 2
    assert fit(llama_7b, 15).graph_stages == {28}


def test_the_models_last_stage_of_one_layer_takes_no_more_when_it_keeps_its_activations(llama_7b: ModelShape) -> None:
    assert fit(llama_7b, 10, rank=3).graph_stages == {31}


def test_without_prefetch_or_with_two_stages_per_rank_there_is_no_third_slot(llama_7b: ModelShape) -> None:
    assert fit(llama_7b, 80, slots=1).plan.num_slots == 1
    assert fit(llama_7b, 80, num_stages=8).plan.num_slots == 2
    assert fit(llama_7b, 140, slots=None).plan.num_slots is None


def test_all_stages_keep_their_activations_if_asked_and_too_little_memory_is_refused(llama_7b: ModelShape) -> None:
    fitted = fit(llama_7b, 140, rank=1, slots=None, keeps_activations=True)
    assert fitted.graph_stages == set(range(1, 32, 4))
    with pytest.raises(GpuMemoryError, match="stashed activations"):
        fit(llama_7b, 60, slots=None, keeps_activations=True)


def test_where_memory_is_unknown_nothing_is_added(llama_7b: ModelShape) -> None:
    assert fit(llama_7b, None).plan.num_slots == 2
    assert fit(llama_7b, None).graph_stages == frozenset()
    assert fit(llama_7b, None, slots=None, keeps_activations=True).graph_stages == set(range(0, 32, 4))
