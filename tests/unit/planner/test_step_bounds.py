"""A step's lower bound is one for every plan, and tight where compute decides; many rounds go on as the first do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import cast

import pytest
from harness.plan_requests import find_published_shape, request_of

from mobius.config.config import ActivationOffloading, MatmulDtype, Order, Recompute
from mobius.errors import GpuMemoryError
from mobius.planner.fit import fit_plan, fitting_plans
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.profile import Profile
from mobius.planner.rates import estimated_profile
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.stage_costs import stage_costs
from mobius.planner.step_prediction import (
    SIMULATED_MICROBATCHES,
    SIMULATED_ROUNDS,
    predict_min_step_seconds,
    predict_step_seconds,
    simulated_seconds,
)
from mobius.schedule.build import build_unchecked
from mobius.schedule.partition import ModelShape, QuantizedWeights
from mobius.schedule.plan import Plan

USUAL: dict[str, object] = {"num_stages": 16, "num_chunks": 8, "batch_size": 32, "seq_length": 1024}
CHANGES: dict[str, dict[str, object]] = {
    "nothing": {},
    "clipping": {"max_grad_norm": 1.0},
    "rounds": {"num_rounds": 4},
    "a microbatch each round": {"num_rounds": 8, "max_grad_norm": 1.0},
    "all streamed": {"resident_stages": "0", "recompute": Recompute.FULL},
    "activations on the host": {"recompute": Recompute.FULL, "activation_offloading": ActivationOffloading.ON},
    "slices": {"num_slices": 4, "num_chunks": 2, "batch_size": 2, "seq_length": 16384},
    "fp8": {"matmul_dtype": MatmulDtype.FP8, "num_chunks": 32},
}


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return find_published_shape("7b")


def planned(shape: ModelShape, machine: Machine, **options: object) -> tuple[Plan, PlanRequest, Profile]:
    request = request_of(shape, machine, **(USUAL | options))
    if request.config.model.matmul_dtype is not MatmulDtype.BF16:
        quantized = QuantizedWeights("fp8", shape.layer_parameters, (0,) * 32, 0, 0)
        request = replace(request, shape=replace(shape, quantized=quantized))
    profile = estimated_profile(request)
    assert profile is not None
    return fit_plan(request, layer=estimated_layer(request)), request, profile


@pytest.mark.grid
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_no_plan_is_simulated_faster_than_its_bound(shape: ModelShape, num_ranks: int, change: str) -> None:
    checked = 0
    for card, limit in product(("RTX4090", "H200"), (12, 20)):
        try:
            planned_run = planned(shape, Machine(num_ranks, GPU_SPECS[card]), gpu_memory_limit=limit, **CHANGES[change])
        except GpuMemoryError:
            continue
        bound, seconds = predict_min_step_seconds(*planned_run), predict_step_seconds(*planned_run)
        assert 0.4 * seconds < bound <= seconds * (1 + 1e-9)
        checked += 1
    assert checked


DEPTH_FIRST: dict[str, dict[str, object]] = {
    "a microbatch per rank": {"num_chunks": 16},
    "clipping": {"num_chunks": 16, "max_grad_norm": 1.0},
    "two per rank": {"num_chunks": 16, "per_round": 2},
    "all streamed": {"num_chunks": 16, "resident_stages": "0", "max_grad_norm": 1.0},
    "all recomputed": {"num_chunks": 32, "recompute": Recompute.FULL},
    "one stage per rank": {"num_chunks": 8, "num_stages": 4},
    "one round": {"num_chunks": 8, "per_round": 99, "max_grad_norm": 1.0},
    "the head on all ranks": {"num_chunks": 16, "spread_head": True},
    "the head on all ranks, clipping, two per rank": {
        "num_chunks": 16,
        "spread_head": True,
        "per_round": 2,
        "max_grad_norm": 1.0,
    },
}


def depth_first(shape: ModelShape, machine: Machine, **options: object) -> Iterator[tuple[Plan, PlanRequest, Profile]]:
    """All ways to use the memory, with `per_round` microbatches per rank in a round."""
    options = USUAL | options
    chunks, per_round = cast(int, options["num_chunks"]), cast(int, options.pop("per_round", 1))
    size = min(chunks, per_round * machine.num_ranks)
    usual = {"compute_order": Order.DEPTH_FIRST, "num_rounds": chunks // size}
    for limit in (22, 30):
        request = request_of(shape, machine, **(usual | options), gpu_memory_limit=limit)
        profile = estimated_profile(request)
        assert profile is not None
        with suppress(GpuMemoryError):
            for plan in fitting_plans(request, estimated_layer(request)):
                yield plan, request, profile


@pytest.mark.grid
@pytest.mark.parametrize("change", DEPTH_FIRST)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_no_depth_first_plan_is_simulated_faster_than_its_bound(shape: ModelShape, num_ranks: int, change: str) -> None:
    options = DEPTH_FIRST[change] | ({"spread_head": False} if num_ranks == 1 else {})
    for card in ("RTX4090", "H200"):
        plans = [*depth_first(shape, Machine(num_ranks, GPU_SPECS[card]), **options)]
        assert plans or num_ranks == 1
        for plan in plans[:: max(1, len(plans) // 4)]:
            bound, seconds = predict_min_step_seconds(*plan), predict_step_seconds(*plan)
            assert 0.2 * seconds < bound <= seconds * (1 + 1e-9), plan[0]


@pytest.mark.grid
@pytest.mark.parametrize("change", ["a microbatch per rank", "clipping", "two per rank", "all streamed"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_many_depth_first_rounds_are_predicted_from_the_first(shape: ModelShape, num_ranks: int, change: str) -> None:
    options = DEPTH_FIRST[change] | {"num_chunks": 48, "batch_size": 48}
    for card in ("RTX4090", "H200"):
        plans = [*depth_first(shape, Machine(num_ranks, GPU_SPECS[card]), **options)]
        for plan, request, profile in plans[:: max(1, len(plans) // 2)]:
            assert plan.num_rounds > SIMULATED_ROUNDS
            costs = stage_costs(plan, request.shape, profile)
            whole = simulated_seconds(build_unchecked(plan), costs, profile, request.rules)
            assert predict_step_seconds(plan, request, profile) == pytest.approx(whole, rel=5e-3), plan


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_many_rounds_are_predicted_from_the_first(shape: ModelShape, num_ranks: int) -> None:
    machine = Machine(num_ranks, GPU_SPECS["RTX4090"])
    plan, request, profile = planned(shape, machine, num_chunks=32, num_rounds=16, gpu_memory_limit=20)
    assert plan.num_rounds > SIMULATED_ROUNDS
    costs = stage_costs(plan, request.shape, profile)
    whole = simulated_seconds(build_unchecked(plan), costs, profile, request.rules)
    assert predict_step_seconds(plan, request, profile) == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("resident_stages", ["0", "auto"])
def test_many_microbatches_are_predicted_from_fewer(shape: ModelShape, resident_stages: str) -> None:
    machine = Machine(2, GPU_SPECS["RTX4090"])
    sizes = {"num_chunks": 192, "batch_size": 192, "num_rounds": 1, "seq_length": 512, "gpu_memory_limit": 24}
    plan, request, profile = planned(shape, machine, resident_stages=resident_stages, **sizes)
    assert plan.microbatches_per_round > SIMULATED_MICROBATCHES
    costs = stage_costs(plan, request.shape, profile)
    whole = simulated_seconds(build_unchecked(plan), costs, profile, request.rules)
    assert predict_step_seconds(plan, request, profile) == pytest.approx(whole, rel=2e-3)
