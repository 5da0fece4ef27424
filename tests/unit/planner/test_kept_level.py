"""Stages may keep their products alone: what that takes and costs, when a plan has them do so, and where it says it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.live_bytes import count_layer
from harness.pipelines import CPU
from harness.plan_requests import request_of
from transformers import LlamaConfig

from mobius.config.config import Compile, Dtype, Recompute
from mobius.errors import GpuMemoryError, PlanError
from mobius.models.blocks import ModelParts
from mobius.planner.fit import fit_plan, levels_to_try, may_keep_products
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
        find_peak(replace(plan, recompute_level=level), 0, size)
        for level in (RecomputeLevel.NONE, RecomputeLevel.ELEMENTWISE)
    )
    # Seven stages of four layers hold three microbatches, the last one's layers one; then comes the work of one.
    assert (everything.saved_activations, everything.work) == ((7 * 3 + 1) * 4 * 100, 50)
    assert (products.saved_activations, products.work) == ((7 * 3 + 1) * 4 * 70, 80)


def test_a_backward_from_products_takes_the_memory_traffic_longer_that_is_counted_by_hand(llama_7b: ModelShape) -> None:
    request = request_of(llama_7b, RTX4090)
    profile = estimated_profile(request)
    assert profile is not None
    plan = request.plan.with_memory_uses([MemoryUse(8, 4, 0)] * 4)
    costs = {level: stage_costs(replace(plan, recompute_level=level), llama_7b, profile) for level in RecomputeLevel}
    keeping, recomputing = 20, 4
    extra = costs[RecomputeLevel.ELEMENTWISE][keeping].backward - costs[RecomputeLevel.NONE][keeping].backward
    # Norms 5 x 4096, queries and keys read and written 4 x 4096, gate and up read and their product written.
    assert extra == pytest.approx(2 * (9 * 4096 + 3 * 11008) * 4096 / profile.gpu_bandwidth, rel=1e-3)
    layer = profile.of_layer(keeping)
    assert extra < 0.1 * (layer.recomputed_backward - layer.backward)
    assert costs[RecomputeLevel.ELEMENTWISE][recomputing] == costs[RecomputeLevel.NONE][recomputing]


def test_auto_keeps_products_where_the_step_gets_shorter_by_them(llama_7b: ModelShape) -> None:
    request = request_of(llama_7b, RTX4090, batch_size=128, max_grad_norm=1.0)
    layer = estimated_layer(request)
    found, before = (solve(request, layer=each) for each in (layer, replace(layer, saved_products=None)))
    assert found.plan.recompute_level is RecomputeLevel.ELEMENTWISE
    assert before.plan.recompute_level is RecomputeLevel.NONE
    assert len(found.plan.saved_activation_stages) > len(before.plan.saved_activation_stages)
    assert found.step_seconds is not None
    assert before.step_seconds is not None
    assert found.step_seconds < 0.999 * before.step_seconds
    assert all(need.total <= 0.97 * (request.gpu_bytes or 0) for need in found.gpu_estimates)


def test_nothing_changes_where_everything_fits_or_nothing_is_kept(llama_7b: ModelShape) -> None:
    for limit in (100.0, 12.0):
        request = request_of(llama_7b, num_stages=16, gpu_memory_limit=limit, max_grad_norm=1.0)
        layer = estimated_layer(request)
        found, before = (solve(request, layer=each).plan for each in (layer, replace(layer, saved_products=None)))
        assert found == before


def test_auto_has_the_choice_for_compiled_layers_alone(llama_7b: ModelShape) -> None:
    for options, levels in (
        ({}, tuple(RecomputeLevel)),
        ({"compile": Compile.OFF}, (RecomputeLevel.NONE,)),
        ({"recompute": Recompute.FULL}, (RecomputeLevel.NONE,)),
        (ON_GPUS | {"recompute": Recompute.NONE}, (RecomputeLevel.NONE,)),
        (ON_GPUS | {"recompute": Recompute.ELEMENTWISE}, (RecomputeLevel.ELEMENTWISE,)),
        (ON_GPUS | {"recompute": Recompute.ELEMENTWISE, "compile": Compile.OFF}, (RecomputeLevel.ELEMENTWISE,)),
    ):
        request = request_of(llama_7b, **options)
        assert levels_to_try(request, estimated_layer(request)) == levels, options
        assert may_keep_products(request) == (RecomputeLevel.ELEMENTWISE in levels), options
        assert levels_to_try(request, LayerBytes(1, 1)) == levels[:1], "of which products nothing is known"


def test_what_is_asked_for_is_kept_in_all_stages_or_refused_with_the_arithmetic(llama_7b: ModelShape) -> None:
    def plan(limit: float, recompute: Recompute) -> tuple[int, RecomputeLevel]:
        request = request_of(llama_7b, num_stages=4, recompute=recompute, gpu_memory_limit=limit, **ON_GPUS)
        found = fit_plan(request, layer=estimated_layer(request))
        return len(found.saved_activation_stages), found.recompute_level

    assert plan(70.0, Recompute.NONE) == (4, RecomputeLevel.NONE)
    assert plan(70.0, Recompute.ELEMENTWISE) == (4, RecomputeLevel.ELEMENTWISE)
    limit = next(number for number in range(70, 20, -1) if not _fits(llama_7b, float(number)))
    assert plan(limit, Recompute.ELEMENTWISE) == (4, RecomputeLevel.ELEMENTWISE)
    with pytest.raises(GpuMemoryError, match="Any of these alone fits: .*--recompute elementwise"):
        plan(limit, Recompute.NONE)


def _fits(shape: ModelShape, limit: float) -> bool:
    request = request_of(shape, num_stages=4, recompute=Recompute.NONE, gpu_memory_limit=limit, **ON_GPUS)
    try:
        fit_plan(request, layer=estimated_layer(request))
    except GpuMemoryError:
        return False
    return True


def test_a_file_and_a_table_name_the_level(llama_7b: ModelShape, tmp_path: Path) -> None:
    plan = make_plan(llama_7b, num_ranks=1, num_stages=4, num_microbatches=2, num_slots=2)
    plan = replace(plan.with_memory_uses([MemoryUse(1, 2, 2)]), recompute_level=RecomputeLevel.ELEMENTWISE)
    saved = SavedPlan(ModelDigest.of(llama_7b, Dtype.BF16), plan, batch_size=8, seq_length=16)
    path = tmp_path / "plan.json"
    path.write_text(saved.to_json())
    assert read_plan(path) == saved

    fields = json.loads(saved.to_json())
    assert fields.pop("kept_level") == "products"
    path.write_text(json.dumps(fields))
    assert read_plan(path).plan == replace(plan, recompute_level=RecomputeLevel.NONE), "files from before levels"

    for wrong in ("some", 3, None, ["products"]):
        path.write_text(json.dumps(fields | {"kept_level": wrong}))
        with pytest.raises(PlanError, match="`kept_level` is .*, not one of everything, products"):
            read_plan(path)

    lines = describe_stages(plan, llama_7b).splitlines()[2:]
    assert [line.split()[5:] for line in lines[1:3]] == [["recomputed"], ["products", "kept"]]
