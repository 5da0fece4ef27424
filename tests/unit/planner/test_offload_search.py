"""Products that wait on the host: what they take and spare, when a plan has them do so, and where it says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.plan_requests import H200, estimate_gpu_memory, find_published_shape, request_of

from mobius.config.config import ActivationOffloading, Compile, Recompute
from mobius.errors import PlanError
from mobius.planner import solver
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import estimate_host_memory, estimated_layer
from mobius.planner.plan_file import ModelDigest, SavedPlan, read_plan
from mobius.planner.plan_table import describe_stages
from mobius.planner.rates import estimated_profile
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import fit_by_simulation, solve
from mobius.planner.stage_costs import ACTION_GAP, stage_costs
from mobius.planner.step_prediction import predict_step_seconds
from mobius.schedule.plan import MemoryUse, Plan

RTX4090 = Machine(4, GPU_SPECS["RTX4090"])
AUTO = {"activation_offloading": ActivationOffloading.AUTO, "num_stages": 16, "num_slices": 1, "num_rounds": 1}
INPUT, PRODUCTS = 4096 * 4096 * 2, 4096 * (6 * 4096 + 2 * 11008) * 2
"""Bytes of a layer and a microbatch of 4096 tokens, by widths."""


def ask(machine: Machine = RTX4090, **options: Any) -> PlanRequest:
    return request_of(find_published_shape("7b"), machine, **AUTO | options)


def planned(machine: Machine = RTX4090, **options: Any) -> Plan:
    request = ask(machine, **{"gpu_memory_limit": 24.0, "max_grad_norm": 1.0} | options)
    return solve(request, layer=estimated_layer(request)).plan


def test_the_host_has_room_for_products_of_some_and_inputs_of_the_others() -> None:
    request = ask()
    offloading = request.plan.with_memory_uses([MemoryUse(0, 0, 2, 4)] * 4)

    needs = [
        estimate_host_memory(request, replace(offloading, num_offloaded_microbatches=number)).offloaded_activations
        for number in (0, 3, 8)
    ]

    # Two layers in each of 15 stages, eight microbatches.
    assert needs[0] == 30 * 8 * INPUT
    more = request.product_bytes - INPUT
    assert [need - needs[0] for need in needs] == [0, 30 * 3 * more, 30 * 8 * more]
    assert request.product_bytes == pytest.approx(PRODUCTS, rel=0.02)
    assert replace(request, measured_products=2**30).product_bytes == pytest.approx(2**30, rel=0.02)


def test_the_gpu_has_room_for_those_on_their_way() -> None:
    request = ask()
    layer, offloading = estimated_layer(request), request.plan.with_memory_uses([MemoryUse(0, 0, 2, 4)] * 4)

    needs = [
        estimate_gpu_memory(request, replace(offloading, num_offloaded_microbatches=n), rank=0, layer=layer)
        for n in (0, 1, 8)
    ]

    # Of two layers, two microbatches that have come back; with one in eight, nine of which two may be such.
    assert layer.saved_products is not None
    assert needs[0].inputs == 2 * 2 * INPUT
    assert needs[1].inputs == 2 * (7 * INPUT + 2 * layer.saved_products)
    assert needs[2].inputs == 3 * 2 * layer.saved_products, "two leave and a third is made"


def test_a_backward_from_products_is_spared_their_forward() -> None:
    request = ask()
    profile = estimated_profile(request)
    assert profile is not None
    plan = replace(request.plan.with_memory_uses([MemoryUse(0, 0, 2, 4)] * 4), num_offloaded_microbatches=2)

    costs = stage_costs(plan, request.shape, profile)

    layer, elementwise = profile.of_layer(0), profile.elementwise_seconds(0, request.shape)
    assert costs[4].backward_from_saved is not None
    assert costs[4].backward_from_saved[0] == pytest.approx(2 * (layer.backward + elementwise) + ACTION_GAP)
    assert costs[4].backward_from_saved[0] < costs[4].backward
    assert costs[15].backward_from_saved is None
    assert (
        stage_costs(replace(plan, num_offloaded_microbatches=0), request.shape, profile)[4].backward_from_saved is None
    )


def test_on_a_card_slow_beside_its_link_products_go_home_and_a_step_is_shorter() -> None:
    request = ask(gpu_memory_limit=24.0, max_grad_norm=1.0)
    profile = estimated_profile(request)
    assert profile is not None

    with_home = planned()
    without = planned(recompute=Recompute.AUTO, activation_offloading=ActivationOffloading.OFF)

    assert with_home.num_offloaded_microbatches > 4
    assert without.num_offloaded_microbatches == 0
    seconds = [predict_step_seconds(plan, request, profile) for plan in (with_home, without)]
    assert seconds[0] < seconds[1] * (1 - solver.ALIKE)
    for need in solve(request, layer=estimated_layer(request)).gpu_estimates:
        assert need.total <= 24 * 2**30


def test_where_copies_take_thrice_as_long_as_a_forward_nothing_goes_home() -> None:
    assert planned(H200).num_offloaded_microbatches == 0


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": Recompute.FULL},
        {"compile": Compile.OFF},
        {"activation_offloading": ActivationOffloading.OFF},
    ],
)
def test_only_where_it_is_left_open_and_layers_are_compiled(options: dict[str, Any]) -> None:
    assert planned(**options).num_offloaded_microbatches == 0


@pytest.mark.extended  # searches for seconds
def test_the_hosts_memory_bounds_how_many_go() -> None:
    request = ask(gpu_memory_limit=24.0, max_grad_norm=1.0)
    free = planned()
    limit = estimate_host_memory(request, free).total / 2**30 - 20

    bounded = planned(host_memory_limit=limit)

    assert 0 < bounded.num_offloaded_microbatches < free.num_offloaded_microbatches
    assert estimate_host_memory(request, bounded).total <= limit * 2**30


@pytest.mark.extended  # searches for seconds
def test_where_nobody_says_how_much_there_is_it_takes_no_more_than_so_many_times_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = ask(gpu_memory_limit=24.0, max_grad_norm=1.0)
    free, without = planned(), planned(activation_offloading=ActivationOffloading.OFF)
    monkeypatch.setattr(solver, "MOST_IF_UNKNOWN", 1.2)
    caches = fit_by_simulation, solver.bounded_plans, solver._bounded
    for cache in caches:
        cache.cache_clear()

    bounded = planned()

    for cache in caches:
        cache.cache_clear()
    assert 0 < bounded.num_offloaded_microbatches < free.num_offloaded_microbatches
    assert estimate_host_memory(request, bounded).total <= 1.5 * estimate_host_memory(request, without).total


def test_a_plan_tells_it_and_keeps_it_in_its_file(tmp_path: Path) -> None:
    request = ask()
    plan = replace(request.plan.with_memory_uses([MemoryUse(0, 0, 2, 3)] * 4), num_offloaded_microbatches=3)
    digest = ModelDigest.of(request.shape, request.config.model.dtype)
    path = tmp_path / "plan.json"
    path.write_text(SavedPlan(digest, plan, 64, 512).to_json())

    assert read_plan(path).plan == plan
    assert "products from the host (3 of 8), else recomputed" in describe_stages(plan, request.shape)
    for changed in (
        replace(plan, num_offloaded_microbatches=9),
        replace(plan, offloaded_activation_stages=frozenset()),
    ):
        path.write_text(SavedPlan(digest, changed, 64, 512).to_json())
        with pytest.raises(
            PlanError,
            match="9 microbatches of a round offload|products of 3 microbatches are offloaded, but no stage offloads",
        ):
            read_plan(path)
