"""A head on all ranks: what it takes of each GPU, and that a step is shorter by what the last rank computes less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.plan_requests import find_published_shape, request_of

from mobius.config.config import Order
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.memory_estimates import state_bytes as bytes_that_stay
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import PlanResult, solve
from mobius.planner.stage_costs import stage_costs
from mobius.schedule.partition import ModelShape, TrainedParameters

USUAL: dict[str, object] = {
    "num_stages": 32,
    "num_chunks": 32,
    "num_rounds": 8,
    "batch_size": 128,
    "seq_length": 1024,
    "compute_order": Order.DEPTH_FIRST,
    "max_grad_norm": 1.0,
}
MACHINE = Machine(4, GPU_SPECS["H100"])


def requests(shape: ModelShape) -> tuple[PlanRequest, PlanRequest]:
    alone = request_of(shape, MACHINE, **USUAL)
    return alone, alone.with_pipeline(spread_head=True)


@pytest.fixture(scope="module")
def found() -> list[PlanResult]:
    return [solve(request, layer=estimated_layer) for request in requests(find_published_shape("7b"))]


def test_each_other_rank_holds_weights_and_sums_of_norm_and_head(llama_7b: ModelShape) -> None:
    trained = TrainedParameters(0, llama_7b.layer_parameters, 4096, is_on_gpu=False)
    for shape, number in ((llama_7b, llama_7b.head_parameters), (replace(llama_7b, trained=trained), 4096)):
        alone, shared = requests(shape)
        for rank in range(4):
            more = {
                name: value - bytes_that_stay(alone, alone.plan, rank)[name]
                for name, value in bytes_that_stay(shared, replace(alone.plan, spreads_head=True), rank).items()
                if value
            }
            is_owner = rank == 3
            assert more["weights"] == (0 if is_owner else 2 * llama_7b.head_parameters)
            assert more["gradients"] == (0 if is_owner else 4 * number)


def test_a_step_is_shorter_by_three_quarters_of_the_heads_seconds(found: list[PlanResult]) -> None:
    """Of the last rank's; a hundredth of a step more goes into the way to the head and back, at both ends of it."""
    alone, shared = found
    assert shared.profile is not None
    spared = 0.75 * 32 * shared.profile.loss
    assert alone.step_seconds - shared.step_seconds == pytest.approx(spared, abs=0.012 * alone.step_seconds)
    assert spared > 0.04 * alone.step_seconds


def test_all_ranks_compute_as_long(found: list[PlanResult]) -> None:
    steps = found[1].step_time_prediction
    assert steps is not None
    assert min(steps.busy_seconds) > 0.98 * max(steps.busy_seconds)
    costs = stage_costs(found[1].plan, found[1].request.shape, found[1].profile)  # type: ignore[arg-type]
    assert len(costs) == 33
    assert costs[31].backward == pytest.approx(costs[30].backward)
