"""Layers of experts: streamed and resident stages compute loss and every gradient of transformers bit by bit."""

from __future__ import annotations

import pytest
import torch
from harness.adapted_models import GivenValues, adapt_by_peft, gradients_of, parameters_of
from harness.packed_rows import LENGTH, ROWS, documents_alone, make_packed_batch
from harness.pipelines import Pipeline, make_batch, model_of, plain_step
from harness.tiny_families import tiny_config
from torch import Tensor

from mobius.config.config import AdapterConfig, FinetuningType

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


def test_rows_of_several_samples_have_the_gradients_of_each_alone() -> None:
    model, batch = model_of(tiny_config("qwen3_moe")), make_packed_batch(ROWS, LENGTH, 2)
    expected = documents_alone(model, ROWS, batch)
    pipeline = Pipeline(model, 2, 2, 2, 1)
    assert_near((pipeline.run(batch), pipeline.gradients), expected)


@pytest.mark.parametrize("options", [{"tile_tokens": 5}, {"num_slices": 3}, {"accumulation_rounds": 2}], ids=str)
def test_tiles_slices_and_rounds_leave_the_gradients(options: dict[str, int]) -> None:
    model, batch = model_of(tiny_config("qwen3_moe")), make_batch(2)
    pipeline = Pipeline(model, 2, 2, 2 * options.get("num_slices", 1), 1, **options)
    assert_near((pipeline.run(batch), pipeline.gradients), plain_step(model, batch, 2))


def test_adapters_beside_experts_are_those_of_peft_bit_by_bit() -> None:
    config = AdapterConfig(FinetuningType.LORA, lora_rank=4, lora_target="q_proj,o_proj")
    model, batch = adapt_by_peft(model_of(tiny_config("qwen3_moe")), config), make_batch(2)
    loss, _ = plain_step(model, batch, 2)
    source = GivenValues(parameters_of(model))
    pipeline = Pipeline(model.base_model.model, 2, 2, 2, 1, adapters=config, source=source)
    assert_equal((pipeline.run(batch), pipeline.gradients), (loss, gradients_of(model)))


def assert_near(actual: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Sums have another order: within 2e-6 of the norm of all gradients."""
    torch.testing.assert_close(actual[0], expected[0], rtol=2e-6, atol=0.0)
    assert actual[1].keys() == expected[1].keys()
    off = torch.stack([(actual[1][name] - value).double().norm() for name, value in expected[1].items()]).norm()
    assert off <= 2e-6 * torch.stack([value.double().norm() for value in expected[1].values()]).norm()


def assert_equal(actual: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(actual[0], expected[0])
    assert actual[1].keys() == expected[1].keys()
    assert [name for name, gradient in expected[1].items() if not torch.equal(actual[1][name], gradient)] == []
