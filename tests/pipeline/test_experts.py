"""Layers of experts: streamed and resident stages compute loss and every gradient of transformers bit by bit."""

from __future__ import annotations

import pytest
import torch
from harness.pipelines import Pipeline, make_batch, model_of, plain_step
from harness.tiny_families import tiny_config
from torch import Tensor

CASES = {  # number of slots, whether graphs are kept, resident stages of N = 2, v = 2
    "resident": (None, False, frozenset[int]()),
    "resident, graphs kept": (None, True, frozenset[int]()),
    "streamed": (1, False, frozenset[int]()),
    "streamed, last graphs kept": (2, True, frozenset[int]()),
    "some resident": (1, True, frozenset({1, 2})),
}
FAMILIES = {
    "mixtral": "experts in each layer",
    "qwen2_moe": "a shared expert with a gate, a dense layer among sparse ones",
    "qwen3_moe": "every second layer is dense, shares are normed",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_a_pipeline_equal_the_plain_model_bit_by_bit(family: str) -> None:
    model = model_of(tiny_config(family))
    for num_microbatches in (1, 3):
        batch = make_batch(num_microbatches)
        expected = plain_step(model, batch, num_microbatches)
        for slots, keeps_graphs, resident in CASES.values():
            pipeline = Pipeline(model, 2, 2, num_microbatches, slots, keeps_graphs, resident=resident)
            assert_equal((pipeline.run(batch), pipeline.gradients), expected)
        for num_ranks, stages_per_rank in ((1, 1), (1, 4), (3, 1)):
            pipeline = Pipeline(model, num_ranks, stages_per_rank, num_microbatches, 1)
            assert_equal((pipeline.run(batch), pipeline.gradients), expected)


def assert_equal(actual: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(actual[0], expected[0])
    assert actual[1].keys() == expected[1].keys()
    assert [name for name, gradient in expected[1].items() if not torch.equal(actual[1][name], gradient)] == []
