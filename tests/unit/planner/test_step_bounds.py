"""A step's lower bound is one for every plan, and tight where compute decides; many rounds go on as the first do."""

from __future__ import annotations

from itertools import product

import pytest
from harness.plan_requests import find_published_shape, request_of

from mobius.config.config import ActivationOffloading, Recompute
from mobius.errors import GpuMemoryError
from mobius.planner.fit import fit_plan
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
from mobius.schedule.partition import ModelShape
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
}


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return find_published_shape("7b")


def planned(shape: ModelShape, machine: Machine, **options: object) -> tuple[Plan, PlanRequest, Profile]:
    request = request_of(shape, machine, **(USUAL | options))
    profile = estimated_profile(request)
    assert profile is not None
    return fit_plan(request, layer=estimated_layer(request)), request, profile


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


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_many_rounds_are_predicted_from_the_first(shape: ModelShape, num_ranks: int) -> None:
    machine = Machine(num_ranks, GPU_SPECS["RTX4090"])
    plan, request, profile = planned(shape, machine, num_chunks=32, num_rounds=16, gpu_memory_limit=20)
    assert plan.accumulation_rounds > SIMULATED_ROUNDS
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
