"""Stages may keep their products alone: what that takes and costs, when a plan has them do so, and where it says it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.live_bytes import count_layer
from harness.pipelines import CPU
from harness.plan_requests import refusal_by, request_of
from transformers import LlamaConfig

from mobius.config.config import Compile, Dtype, Recompute
from mobius.errors import GpuMemoryError, PlanError
from mobius.models.blocks import ModelParts
from mobius.planner.fit import fit_plan, fitting_plans, may_save_products
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.peak_memory import LayerBytes, MicrobatchBytes, estimate_layer, find_peak
from mobius.planner.plan_file import ModelDigest, SavedPlan, read_plan
from mobius.planner.plan_table import describe_stages
from mobius.planner.rates import estimated_profile
from mobius.planner.request import Machine
from mobius.planner.solver import solve
from mobius.planner.stage_costs import stage_costs
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import MemoryUse, RecomputeLevel, make_plan

RTX4090 = Machine(4, GPU_SPECS["RTX4090"])
ON_GPUS = {"use_offload": False, "resident_stages": "auto"}


def test_a_compiled_layer_keeps_what_the_widths_say(llama_7b: ModelShape) -> None:
    layer = estimate_layer(2, llama_7b, 4096, compiled=True)
    # By hand: queries, keys, values, attention's result, the states behind it, the output; gate and up.
    assert layer.saved_products == pytest.approx(2 * 4096 * (6 * 4096 + 2 * 11008), rel=1e-3)
    assert layer.saved_for_backward(RecomputeLevel.ELEMENTWISE) == layer.saved_products
    assert layer.saved_for_backward(RecomputeLevel.NONE) == LayerBytes(
        layer.saved_activations, layer.peak
    ).saved_for_backward(RecomputeLevel.ELEMENTWISE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eager_layer_takes_what_its_widths_say(dtype: torch.dtype) -> None:
    config = LlamaConfig(hidden_size=192, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
    config._attn_implementation = "sdpa"
    counted = count_layer(config, shape=(2, 64), dtype=dtype, level=RecomputeLevel.ELEMENTWISE)
    estimate = estimate_layer(dtype.itemsize, ModelParts(config, CPU).shape(), 2 * 64, compiled=False)
    assert estimate.saved_products == pytest.approx(counted.saved_activations, rel=0.03)
    assert 0.97 * counted.peak <= estimate.peak <= 1.1 * counted.peak


def test_products_wait_for_backward_and_the_rest_is_work_of_one_layer(llama_7b: ModelShape) -> None:
    plan = make_plan(llama_7b, num_ranks=1, num_stages=8, num_microbatches=3, num_slots=None)
    plan = plan.with_memory_uses([MemoryUse(8, 8, 0)])
    size = MicrobatchBytes(
        activation=0, layer=LayerBytes(saved_activations=100, peak=150, saved_products=70), loss=0, embedding=0
    )
    everything, products = (
        find_peak(replace(plan, saved_product_stages=frozenset(stages)), 0, size) for stages in ((), range(8))
    )
    # Seven stages of four layers hold three microbatches, the last one's layers one; then comes the work of one.
    assert (everything.saved_activations, everything.work) == ((7 * 3 + 1) * 4 * 100, 50)
    assert (products.saved_activations, products.work) == ((7 * 3 + 1) * 4 * 70, 80)


def test_a_backward_from_products_takes_the_memory_traffic_longer_that_is_counted_by_hand(llama_7b: ModelShape) -> None:
    request = request_of(llama_7b, RTX4090)
    profile = estimated_profile(request)
    assert profile is not None
    plan = request.plan.with_memory_uses([MemoryUse(8, 4, 0)] * 4)
    keeping, other, recomputing = 20, 24, 4
    products = replace(plan, saved_product_stages=frozenset({keeping}))
    everything, products_only = (stage_costs(each, llama_7b, profile) for each in (plan, products))
    extra = products_only[keeping].backward - everything[keeping].backward
    # Norms 5 x 4096, queries and keys read and written 4 x 4096, gate and up read and their product written.
    assert extra == pytest.approx(2 * (9 * 4096 + 3 * 11008) * 4096 / profile.gpu_bandwidth, rel=1e-3)
    layer = profile.of_layer(keeping)
    assert extra < 0.1 * (layer.recomputed_backward - layer.backward)
    assert [products_only[stage] == everything[stage] for stage in (keeping, other, recomputing)] == [False, True, True]


def test_auto_keeps_products_where_the_step_gets_shorter_by_them(llama_7b: ModelShape) -> None:
    request = request_of(llama_7b, RTX4090, batch_size=128, max_grad_norm=1.0, resident_stages="0")
    layer = estimated_layer(request)
    found, before = (solve(request, layer=each) for each in (layer, replace(layer, saved_products=None)))
    assert found.plan.saved_product_stages
    assert not before.plan.saved_product_stages
    assert len(found.plan.saved_activation_stages) > len(before.plan.saved_activation_stages)
    assert found.step_seconds < 0.999 * before.step_seconds
    assert all(need.total <= 0.97 * (request.gpu_bytes or 0) for need in found.gpu_estimates)


def test_no_products_alone_are_kept_where_everything_fits_or_nothing_does(llama_7b: ModelShape) -> None:
    for limit in (100.0, 12.0):
        request = request_of(llama_7b, num_stages=16, gpu_memory_limit=limit, max_grad_norm=1.0)
        layer = estimated_layer(request)
        found, before = (solve(request, layer=each).plan for each in (layer, replace(layer, saved_products=None)))
        assert found.saved_activation_stages == before.saved_activation_stages
        assert found.saved_product_stages == frozenset()


def test_auto_has_the_choice_for_compiled_layers_alone(llama_7b: ModelShape) -> None:
    for options, may in (
        ({}, True),
        ({"compile": Compile.OFF}, False),
        ({"recompute": Recompute.FULL}, False),
        (ON_GPUS | {"recompute": Recompute.NONE}, False),
        (ON_GPUS | {"recompute": Recompute.ELEMENTWISE}, True),
        (ON_GPUS | {"recompute": Recompute.ELEMENTWISE, "compile": Compile.OFF}, True),
    ):
        request = request_of(llama_7b, gpu_memory_limit=70.0 if ON_GPUS.items() <= options.items() else 16.0, **options)
        assert may_save_products(request) is may, options
        plans = fitting_plans(request, estimated_layer(request))
        assert any(plan.saved_product_stages for plan in plans) is may, options


def test_the_first_of_a_ranks_stages_that_keep_something_keep_products(llama_7b: ModelShape) -> None:
    request = request_of(llama_7b, RTX4090, batch_size=128, gpu_memory_limit=22.0)
    mixed = set[int]()
    for plan in fitting_plans(request, estimated_layer(request)):
        for rank in range(4):
            own = [stage for stage in plan.local_stages(rank) if stage in plan.saved_activation_stages]
            products = [stage for stage in own if stage in plan.saved_product_stages]
            assert products == own[: len(products)]
            mixed |= {len(own) - len(products)} if products else set()
    assert len(mixed) > 1, "one level for all stages would leave memory unused"


def test_what_is_asked_for_is_kept_in_all_stages_or_refused_with_the_arithmetic(llama_7b: ModelShape) -> None:
    def plan(limit: float, recompute: Recompute) -> tuple[int, int]:
        request = request_of(llama_7b, num_stages=4, recompute=recompute, gpu_memory_limit=limit, **ON_GPUS)
        found = fit_plan(request, layer=estimated_layer(request))
        return len(found.saved_activation_stages), len(found.saved_product_stages)

    assert plan(70.0, Recompute.NONE) == (4, 0)
    assert plan(70.0, Recompute.ELEMENTWISE) == (4, 4)
    limit = next(number for number in range(70, 20, -1) if not _fits(llama_7b, float(number)))
    assert plan(limit, Recompute.ELEMENTWISE) == (4, 4)
    assert "--recompute auto" in refusal_by(lambda: plan(limit, Recompute.NONE))


def _fits(shape: ModelShape, limit: float) -> bool:
    request = request_of(shape, num_stages=4, recompute=Recompute.NONE, gpu_memory_limit=limit, **ON_GPUS)
    try:
        fit_plan(request, layer=estimated_layer(request))
    except GpuMemoryError:
        return False
    return True


def test_a_file_and_a_table_name_the_stages_that_keep_products(llama_7b: ModelShape, tmp_path: Path) -> None:
    plan = make_plan(llama_7b, num_ranks=1, num_stages=4, num_microbatches=2, num_slots=2)
    plan = plan.with_memory_uses([MemoryUse(1, 2, 2, num_saving_products=1)])
    assert (plan.saved_activation_stages, plan.saved_product_stages) == ({2, 3}, {2})
    saved = SavedPlan(ModelDigest.of(llama_7b, Dtype.BF16), plan, batch_size=8, seq_length=16)
    path = tmp_path / "plan.json"
    path.write_text(saved.to_json())
    assert read_plan(path) == saved

    fields = json.loads(saved.to_json())
    assert fields["saved_product_stages"] == [2]
    name = "saved_product_stages"
    for wrong, reason in (([1], rf"`{name}` is \[1\], and would be \[2\]"), ("products", f"`{name}`")):
        path.write_text(json.dumps(fields | {name: wrong}))
        with pytest.raises(PlanError, match=reason):
            read_plan(path)

    lines = describe_stages(plan, llama_7b).splitlines()[2:]
    assert [line.split()[5:] for line in lines[1:4]] == [["recomputed"], ["products", "kept"], ["streamed", "kept"]]
