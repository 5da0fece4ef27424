"""MoE: experts and the loss over routers in a pipeline are those of the plain model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.adapted_models import GivenValues, adapt_by_peft, gradients_of, parameters_of
from harness.packed_rows import LENGTH, ROWS, documents_alone, make_packed_batch
from harness.pipelines import (
    Pipeline,
    Step,
    assert_near,
    assert_same_bits,
    make_batch,
    model_of,
    plain_step,
)
from harness.tiny_families import tiny_config
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from mobius.config.config import AdapterConfig, FinetuningType
from mobius.engine.step_inputs import StepBatch
from mobius.errors import PlanError
from mobius.schedule.plan import RecomputeLevel

CASES = {  # number of slots, whether everything is saved, resident stages of N = 2, v = 2
    "resident": (None, False, frozenset[int]()),
    "resident, everything saved": (None, True, frozenset[int]()),
    "streamed": (1, False, frozenset[int]()),
    "streamed, everything saved at last": (2, True, frozenset[int]()),
    "some resident": (1, True, frozenset({1, 2})),
}
NEAR = {"loss": 2e-6, "gradients": 2e-6}
"""Sums have another order."""
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
            assert_same_bits(pipeline.step(batch), expected)
        for num_ranks, stages_per_rank in ((1, 1), (1, 4), (3, 1)):
            pipeline = Pipeline(model, num_ranks, stages_per_rank, num_microbatches, 1)
            assert_same_bits(pipeline.step(batch), expected)


def test_rows_of_several_samples_have_the_gradients_of_each_alone() -> None:
    model, batch = model_of(tiny_config("qwen3_moe")), make_packed_batch(ROWS, LENGTH, 2)
    expected = documents_alone(model, ROWS, batch)
    pipeline = Pipeline(model, 2, 2, 2, 1)
    assert_near(pipeline.step(batch), expected, **NEAR)


@pytest.mark.parametrize("options", [{"tile_tokens": 5}, {"num_slices": 3}, {"num_rounds": 2}], ids=str)
def test_tiles_slices_and_rounds_leave_the_gradients(options: dict[str, int]) -> None:
    model, batch = model_of(tiny_config("qwen3_moe")), make_batch(2)
    pipeline = Pipeline(model, 2, 2, 2 * options.get("num_slices", 1), 1, **options)
    assert_near(pipeline.step(batch), plain_step(model, batch, 2), **NEAR)


def test_adapters_next_to_experts_are_those_of_peft_bit_by_bit() -> None:
    config = AdapterConfig(FinetuningType.LORA, lora_rank=4, lora_target="q_proj,o_proj")
    model, batch = adapt_by_peft(model_of(tiny_config("qwen3_moe")), config), make_batch(2)
    loss, _ = plain_step(model, batch, 2)
    source = GivenValues(parameters_of(model))
    pipeline = Pipeline(model.base_model.model, 2, 2, 2, 1, adapters=config, source=source)
    assert_same_bits(pipeline.step(batch), (loss, gradients_of(model)))


ADAPTED = AdapterConfig(
    FinetuningType.LORA,
    lora_rank=4,
    lora_target="q_proj",
    lora_rank_pattern=(("down_proj", "2"),),
    lora_alpha_pattern=(("gate_up_proj", "5.5"),),
    lora_target_parameters="mlp.experts.gate_up_proj,mlp.experts.down_proj",
)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3_moe", "mlp.experts.gate_up_proj,mlp.experts.down_proj"),
        ("mixtral", "mlp.experts.gate_up_proj,mlp.experts.down_proj"),
        ("aria_text", "mlp.experts.gate_up_proj,mlp.experts.down_proj"),
        ("qwen2_moe", "experts.down_proj"),
    ],
)
def test_adapters_of_experts_are_those_of_peft(family: str, targets: str) -> None:
    patterns = ADAPTED.lora_alpha_pattern if "gate" in targets else None
    config = replace(ADAPTED, lora_target_parameters=targets, lora_alpha_pattern=patterns)
    if family == "mixtral":
        config = replace(config, lora_target="none")
    model, batch = adapt_by_peft(model_of(tiny_config(family)), config), make_batch(2)
    loss, _ = plain_step(model, batch, 2)
    expected, source = (loss, gradients_of(model)), GivenValues(parameters_of(model))

    def step(*sizes: Any, **options: Any) -> Step:
        return Pipeline(model.base_model.model, *sizes, adapters=config, source=source, **options).step(batch)

    found = step(2, 2, 2, 1)
    assert found[1].keys() == expected[1].keys()
    assert_near(found, expected, **NEAR)
    for slots, keeps_graphs, resident in CASES.values():
        assert_same_bits(step(2, 2, 2, slots, keeps_graphs, resident=resident), found)
    for options in ({"tile_tokens": 5}, {"num_rounds": 2}):
        assert_near(step(2, 2, 2, 1, **options), expected, **NEAR)


def test_packed_rows_give_adapters_of_experts_what_each_sample_gives_alone() -> None:
    model, batch = adapt_by_peft(model_of(tiny_config("qwen3_moe")), ADAPTED), make_packed_batch(ROWS, LENGTH, 2)
    loss, _ = documents_alone(model, ROWS, batch)
    source = GivenValues(parameters_of(model))
    pipeline = Pipeline(model.base_model.model, 2, 2, 2, 1, adapters=ADAPTED, source=source)
    assert_near(pipeline.step(batch), (loss, gradients_of(model)), **NEAR)


COEFFICIENT = 0.5


def model_with_loss(family: str, **more: Any) -> PreTrainedModel:
    return model_of(tiny_config(family, output_router_logits=True, router_aux_loss_coef=COEFFICIENT, **more))


def plain(model: PreTrainedModel, batch: StepBatch, num_microbatches: int) -> Step:
    """The step by transformers alone, which adds the loss of each microbatch whole: here their mean."""
    inner = model.base_model.model if isinstance(model, PeftModel) else model
    inner.router_aux_loss_coef = COEFFICIENT / num_microbatches
    return plain_step(model, batch, num_microbatches)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_the_plain_model_bit_by_bit(family: str) -> None:
    model = model_with_loss(family)
    for num_microbatches, rows in ((1, 2), (3, 3)):
        batch = make_batch(rows)
        expected = plain(model, batch, num_microbatches)
        for num_ranks, stages_per_rank, slots, keeps_graphs, resident in (
            (2, 2, None, False, ()),
            (2, 2, 1, False, ()),
            (2, 2, 2, True, (1,)),
            (1, 1, 1, False, ()),
            (3, 1, None, True, ()),
        ):
            settings = num_ranks, stages_per_rank, num_microbatches, slots, keeps_graphs
            pipeline = Pipeline(model, *settings, resident=frozenset(resident))
            assert_same_bits(pipeline.step(batch), expected)


def test_the_loss_moves_the_gradients_of_layers_before() -> None:
    model, batch = model_with_loss("qwen3_moe"), make_batch(2)
    with_loss = plain(model, batch, 2)
    model.router_aux_loss_coef = 0.0
    without = plain_step(model, batch, 2)
    name = "model.layers.0.self_attn.q_proj.weight"
    share = (with_loss[1][name] - without[1][name]).norm() / without[1][name].norm()
    assert share > 0.01, "or what is compared above would say nothing"


@pytest.mark.parametrize(
    "options",
    [
        {"tile_tokens": 5},
        {"num_rounds": 2},
        {"offloaded_activation_stages": frozenset({0, 1})},
        {"keeps_graphs": True, "recompute_level": RecomputeLevel.ELEMENTWISE},
    ],
    ids=str,
)
def test_tiles_rounds_and_offloading_leave_the_gradients(options: dict[str, Any]) -> None:
    model, batch = model_with_loss("qwen3_moe"), make_batch(4)
    pipeline = Pipeline(model, 2, 2, 2, 1, **options)
    assert_near(pipeline.step(batch), plain(model, batch, 2), **NEAR)


def test_padding_does_not_count() -> None:
    model, batch = model_with_loss("mixtral"), make_batch(4)
    lengths = torch.tensor([12, 7, 9, 12])
    is_token = torch.arange(batch.input_ids.shape[1]) < lengths[:, None]
    labels = batch.labels.where(is_token, -100)
    batch = replace(batch, labels=labels, num_targets=int((labels[:, 1:] != -100).sum()), lengths=lengths)
    model.router_aux_loss_coef = COEFFICIENT / 2
    model.zero_grad()
    total = torch.zeros(())
    for tokens, own, mask in zip(batch.input_ids.chunk(2), labels.chunk(2), is_token.long().chunk(2), strict=True):
        loss = model(input_ids=tokens, labels=own, attention_mask=mask, num_items_in_batch=batch.num_targets).loss
        loss.backward()
        total += loss.detach()

    pipeline = Pipeline(model, 2, 2, 2, 1)

    assert_near(pipeline.step(batch), (total, gradients_of(model)), **NEAR)


def test_rows_of_several_samples_have_the_loss_of_their_microbatch() -> None:
    model, batch = model_with_loss("qwen3_moe"), make_packed_batch(ROWS, LENGTH, 2)
    batch = replace(batch, lengths=torch.tensor([sum(row) for row in ROWS]))
    expected = _documents_together(model, batch)

    pipeline = Pipeline(model, 2, 2, 2, 1)

    assert_near(pipeline.step(batch), expected, **NEAR)


def _documents_together(model: PreTrainedModel, batch: StepBatch) -> Step:
    """Documents one after the other; the routers' logits of those of a microbatch are one loss."""
    model.zero_grad()
    total = torch.zeros(())
    for numbers in ((0, 1), (2, 3)):
        losses, logits = [], []
        for number, place in ((row, place) for row in numbers for place in range(len(ROWS[row]))):
            own = slice(start := sum(ROWS[number][:place]), start + ROWS[number][place])
            given = batch.input_ids[number : number + 1, own], batch.labels[number : number + 1, own]
            made = model(input_ids=given[0], labels=given[1], num_items_in_batch=batch.num_targets)
            losses.append(made.loss - COEFFICIENT * made.aux_loss)
            logits.append(made.router_logits)
        routers = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
        loss = torch.stack(losses).sum() + COEFFICIENT / 2 * load_balancing_loss_func(routers, 6, 3)
        loss.backward()
        total += loss.detach()
    return total, gradients_of(model)


def test_a_microbatch_of_padding_alone_has_no_loss() -> None:
    model, batch = model_with_loss("mixtral"), make_batch(2)
    full = plain(model, replace(batch, input_ids=batch.input_ids[:1], labels=batch.labels[:1]), 1)
    labels = batch.labels.clone()
    labels[1] = -100
    pipeline = Pipeline(model, 1, 2, 2, 1)

    loss = pipeline.run(replace(batch, labels=labels, lengths=torch.tensor([12, 0])))

    model.router_aux_loss_coef = COEFFICIENT / 2
    expected = plain_step(model, replace(batch, input_ids=batch.input_ids[:1], labels=labels[:1]), 1)
    assert full[0] > expected[0], "the mean is over both microbatches"
    assert_near((loss, pipeline.gradients), expected, **NEAR)


def test_replicas_share_the_mean_over_all_microbatches() -> None:
    model, batch = model_with_loss("mixtral"), make_batch(4)
    expected = plain(model, batch, 4)
    losses, gradients = [], []
    for own in (slice(0, 2), slice(2, 4)):
        pipeline = Pipeline(model, 1, 2, 2, 1)
        share = replace(batch, input_ids=batch.input_ids[own], labels=batch.labels[own], num_replicas=2)
        losses.append(pipeline.run(share))
        gradients.append(pipeline.gradients)
    summed = {name: gradients[0][name] + gradients[1][name] for name in expected[1]}
    assert_near((losses[0] + losses[1], summed), expected, **NEAR)


def test_adapters_get_the_gradient_of_routers_that_are_frozen() -> None:
    config = AdapterConfig(FinetuningType.LORA, lora_rank=4, lora_target="q_proj,o_proj")
    model, batch = adapt_by_peft(model_with_loss("qwen3_moe"), config), make_batch(2)
    loss, _ = plain(model, batch, 2)
    source = GivenValues(parameters_of(model))
    pipeline = Pipeline(model.base_model.model, 2, 2, 2, 1, adapters=config, source=source)
    assert_same_bits(pipeline.step(batch), (loss, gradients_of(model)))


def test_an_evaluation_leaves_the_loss_out() -> None:
    model, batch = model_with_loss("mixtral"), make_batch(2)
    model.config.output_router_logits = False
    with torch.no_grad():
        expected = [
            model(input_ids=tokens, labels=labels, num_items_in_batch=1).loss
            for tokens, labels in zip(batch.input_ids.chunk(2), batch.labels.chunk(2), strict=True)
        ]
    model.config.output_router_logits = True

    sums = Pipeline(model, 2, 2, 2, 1).evaluate(batch)

    assert sums.losses.tolist() == [float(loss) for loss in expected]


def test_slices_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"--num_slices 3: 'output_router_logits' is true.*Use --num_slices 1"):
        Pipeline(model_with_loss("qwen3_moe"), 1, 2, 6, 1, num_slices=3).run(make_batch(2))
