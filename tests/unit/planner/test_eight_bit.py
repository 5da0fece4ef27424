"""Plans of runs with products in eight bits: bytes of copies, seconds by format, cards that lack a format."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from harness.plan_requests import estimate_gpu_memory, refusal_by, request_of

from mobius.config.cli import parse_args
from mobius.config.config import AdapterConfig, FinetuningType, MatmulDtype, ModelConfig
from mobius.errors import PlanError
from mobius.models.blocks import ModelParts
from mobius.models.families import load_planned_config
from mobius.planner.fit import fit_plan
from mobius.planner.forecast import run_dry
from mobius.planner.gpu_specs import GPU_SPECS, QUANTIZING_BYTES
from mobius.planner.layer_bench import MicrobatchShape
from mobius.planner.measured_plan import profile_path
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.profile import LayerSeconds, Profile
from mobius.planner.rates import estimated_profile
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.stage_costs import stage_costs
from mobius.planner.step_prediction import simulate_steps
from mobius.process.ranks import Ranks
from mobius.schedule.action import ActionKind
from mobius.schedule.build import build_schedule
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import MemoryUse
from mobius.units import GIB

BF16, FP8, INT8 = MatmulDtype
ONE, FOUR = (Machine(number, GPU_SPECS["H200"]) for number in (1, 4))
WEIGHTS = 4 * 4096 * 4096 + 3 * 4096 * 11008
"""Weights of a layer of 7B in linears."""
DRY = ["--dry_run", "--model_path", "7b", "--num_ranks", "2", "--num_stages", "32", "--num_chunks", "8"]
DRY += ["--num_rounds", "1", "--compute_order", "breadth_first", "--resident_stages", "2", "--recompute", "full"]


@cache
def shape_of_7b(matmul_dtype: MatmulDtype, adapters: AdapterConfig = AdapterConfig()) -> ModelShape:
    config = load_planned_config(ModelConfig(model_path="7b"))[0]
    return ModelParts(config, torch.device("cpu"), adapters=adapters, matmul_dtype=matmul_dtype).shape()


def asked(
    matmul_dtype: MatmulDtype, machine: Machine = FOUR, adapters: AdapterConfig = AdapterConfig(), **options: object
) -> PlanRequest:
    return request_of(shape_of_7b(matmul_dtype, adapters), machine, matmul_dtype=matmul_dtype, **options)


def profile_of(request: PlanRequest) -> Profile:
    profile = estimated_profile(request)
    assert profile is not None
    return profile


def test_a_shape_counts_the_matrices_of_layers_in_eight_bits() -> None:
    assert shape_of_7b(BF16).quantized is None
    quantized = shape_of_7b(FP8).quantized
    assert quantized is not None
    assert {*quantized.layers} == {WEIGHTS}
    assert {*quantized.scales} == {4 * (4096 + 4096) + 3 * (4096 + 11008)}
    assert (quantized.largest, quantized.widest) == (4096 * 11008, 11008)
    lora = AdapterConfig(finetuning_type=FinetuningType.LORA)
    assert shape_of_7b(FP8, lora).quantized == quantized, "adapters are not quantized"


def test_a_matrix_is_copied_aside_in_a_slot_only() -> None:
    request = asked(FP8, batch_size=8, seq_length=8)
    plan = request.plan

    def working_set(resident: int) -> int:
        own = plan.with_same_use(MemoryUse(resident, 0, min(2, 8 - resident)))
        return estimate_gpu_memory(request, own, rank=1).working_set

    assert working_set(0) == 2 * 4096 * 11008 > working_set(8)


def test_the_quantized_input_of_a_product_takes_a_byte_per_element() -> None:
    plain, quantized = (estimated_layer(asked(each)) for each in (BF16, FP8))
    assert quantized.peak - plain.peak == 4096 * 11008
    assert quantized.saved_activations == plain.saved_activations


@pytest.mark.parametrize("rows", [8, 32])
def test_layers_on_an_h200_are_as_much_faster_as_was_measured(rows: int) -> None:
    """4,096 and 16,384 tokens of 7B in fp8, 2026-11-24."""
    plain, quantized = (
        profile_of(asked(each, ONE, batch_size=8 * rows, num_chunks=8)).of_layer(0) for each in (BF16, FP8)
    )
    assert 1.6 <= plain.forward / quantized.forward <= 1.7
    assert 1.29 <= (plain.forward + plain.backward) / (quantized.forward + quantized.backward) <= 1.36
    recomputing = [each.forward + each.recomputed_backward for each in (plain, quantized)]
    assert 1.35 <= recomputing[0] / recomputing[1] <= 1.43


def changes(adapters: AdapterConfig) -> list[LayerSeconds]:
    """Change of each layer's seconds by fp8."""
    plain, quantized = (profile_of(asked(each, adapters=adapters)) for each in (BF16, FP8))
    return [quantized.of_layer(layer) + plain.of_layer(layer).times(-1) for layer in range(32)]


def test_only_products_that_are_computed_are_faster() -> None:
    """Weight gradients, which frozen parameters do not have, are bf16's; frozen first layers have no backward."""
    (full, *_), (lora, *_) = changes(AdapterConfig()), changes(AdapterConfig(finetuning_type=FinetuningType.LORA))
    assert full.forward < 0
    assert full.recomputed_backward == pytest.approx(2 * full.backward)
    assert lora.forward == pytest.approx(full.forward)
    assert lora.backward == pytest.approx(full.backward)
    frozen = changes(AdapterConfig(freeze="embedding,layers.0-3"))
    assert [change.backward < 0 for change in frozen[2:6]] == [False, False, True, True]
    assert frozen[0].forward == pytest.approx(full.forward)


@pytest.mark.parametrize("resident", [0, 8])
def test_each_load_and_each_update_of_a_resident_stage_is_quantized_once(resident: int) -> None:
    request = asked(FP8)
    plan = request.plan.with_same_use(MemoryUse(resident, 0, 2 if resident == 0 else 0))
    profile, schedule = profile_of(request), build_schedule(plan)

    def busy(shape: ModelShape) -> float:
        costs = stage_costs(plan, shape, profile)
        return sum(simulate_steps(schedule, costs, profile, request.rules).busy_seconds)

    spent = busy(request.shape) - busy(replace(request.shape, quantized=None))
    loads = sum(action.kind is ActionKind.LOAD for actions in schedule.actions for action in actions)
    assert (loads > 32) == (resident == 0)
    assert spent == pytest.approx((loads or 32) * QUANTIZING_BYTES * WEIGHTS / profile.gpu_bandwidth)


def test_a_refusal_names_the_copies_and_the_format_without_them() -> None:
    options = {"num_stages": 1, "num_chunks": 8, "use_offload": False}
    fits = estimate_gpu_memory(asked(BF16, ONE, **options), asked(BF16, ONE, **options).plan, rank=0).total / GIB
    text = refusal_by(lambda: fit_plan(asked(FP8, ONE, **options, gpu_memory_limit=fits + 5)))
    assert "quantized copies 12.07" in text  # 2 bytes of 6.48e9 weights, and scales
    assert re.search(r"^  --matmul_dtype bf16  ", text, re.MULTILINE)


def dry(card: str, *words: str) -> bool:
    return run_dry(parse_args([*DRY, "--card", card, *words], num_ranks=1), Ranks(0, 1, 0))


def test_a_format_that_the_card_lacks_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(PlanError, match=r"fp8: the card RTX3090 has no fp8 products .*8\.9.* Use bf16 or int8\."):
        dry("RTX3090", "--matmul_dtype", "fp8")
    with pytest.raises(PlanError, match=r"int8: the card V100 has no int8 products .*8\.0.* Use bf16\."):
        dry("V100", "--matmul_dtype", "int8")


def test_profiles_of_other_formats_are_measured_anew(tmp_path: Path) -> None:
    microbatch = MicrobatchShape(8, 512, torch.bfloat16, 2048)
    paths = {
        profile_path(tmp_path, shape_of_7b(each), microbatch, device=torch.device("cpu"), num_ranks=1, is_compiled=True)
        for each in MatmulDtype
    }
    assert len(paths) == 3
