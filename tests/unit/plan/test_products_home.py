"""Products that wait on the host: what they take and spare, when a plan has them do so, and where it says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.plan_requests import H200, known_shape, request_of

from mobius.config.config import ActivationOffloading, Compile, Recompute
from mobius.errors import PlanError
from mobius.plan.budget import estimated_layer, gpu_need, host_need
from mobius.plan.cards import CARDS
from mobius.plan.choice import answer, estimated_profile
from mobius.plan.plan import MemoryUse, Plan
from mobius.plan.plan_file import ModelDigest, SavedPlan, read_plan
from mobius.plan.plan_table import describe_stages
from mobius.plan.request import Machine, PlanRequest
from mobius.plan.search import products_home
from mobius.plan.search.levels import fit_by_simulation
from mobius.plan.search.products_home import WORTH
from mobius.plan.seconds.stage_costs import ACTION_GAP, stage_costs
from mobius.plan.simulation import plan_seconds

RTX4090 = Machine(4, CARDS["RTX4090"])
AUTO = {"activation_offloading": ActivationOffloading.AUTO, "num_stages": 16, "num_slices": 1, "num_rounds": 1}
INPUT, PRODUCTS = 4096 * 4096 * 2, 4096 * (6 * 4096 + 2 * 11008) * 2
"""Bytes of a layer and a microbatch of 4096 tokens, by widths."""


def ask(machine: Machine = RTX4090, **options: Any) -> PlanRequest:
    return request_of(known_shape("7b"), machine, **AUTO | options)


def planned(machine: Machine = RTX4090, **options: Any) -> Plan:
    request = ask(machine, **{"gpu_memory_limit": 24.0, "max_grad_norm": 1.0} | options)
    return answer(request, layer=estimated_layer(request)).plan


def test_the_host_has_room_for_products_of_some_and_inputs_of_the_others() -> None:
    request = ask()
    stashing = request.plan.using([MemoryUse(0, 0, 2, 4)] * 4)

    needs = [host_need(request, replace(stashing, num_products_home=number)).stash for number in (0, 3, 8)]

    # Two layers in each of 15 stages, eight microbatches.
    assert needs[0] == 30 * 8 * INPUT
    more = request.product_bytes - INPUT
    assert [need - needs[0] for need in needs] == [0, 30 * 3 * more, 30 * 8 * more]
    assert request.product_bytes == pytest.approx(PRODUCTS, rel=0.02)
    assert replace(request, measured_products=2**30).product_bytes == pytest.approx(2**30, rel=0.02)


def test_the_gpu_has_room_for_those_on_their_way() -> None:
    request = ask()
    layer, stashing = estimated_layer(request), request.plan.using([MemoryUse(0, 0, 2, 4)] * 4)

    needs = [gpu_need(request, replace(stashing, num_products_home=n), rank=0, layer=layer) for n in (0, 1, 8)]

    # Of two layers, two microbatches that have come back; with one in eight, nine of which two may be such.
    assert layer.products is not None
    assert needs[0].inputs == 2 * 2 * INPUT
    assert needs[1].inputs == 2 * (7 * INPUT + 2 * layer.products)
    assert needs[2].inputs == 3 * 2 * layer.products, "two leave and a third is made"


def test_a_backward_from_products_is_spared_their_forward() -> None:
    request = ask()
    profile = estimated_profile(request)
    assert profile is not None
    plan = replace(request.plan.using([MemoryUse(0, 0, 2, 4)] * 4), num_products_home=2)

    costs = stage_costs(plan, request.shape, profile)

    layer, elementwise = profile.of_layer(0), profile.elementwise_seconds(0, request.shape)
    assert costs[4].from_products is not None
    assert costs[4].from_products[0] == pytest.approx(2 * (layer.backward + elementwise) + ACTION_GAP)
    assert costs[4].from_products[0] < costs[4].backward
    assert costs[15].from_products is None
    assert stage_costs(replace(plan, num_products_home=0), request.shape, profile)[4].from_products is None


def test_on_a_card_slow_beside_its_link_products_go_home_and_a_step_is_shorter() -> None:
    request = ask(gpu_memory_limit=24.0, max_grad_norm=1.0)
    profile = estimated_profile(request)
    assert profile is not None

    with_home = planned()
    without = planned(recompute=Recompute.AUTO, activation_offloading=ActivationOffloading.OFF)

    assert with_home.num_products_home > 4
    assert without.num_products_home == 0
    seconds = [plan_seconds(plan, request, profile) for plan in (with_home, without)]
    assert seconds[0] < seconds[1] * (1 - WORTH)
    for need in answer(request, layer=estimated_layer(request)).needs:
        assert need.total <= 24 * 2**30


def test_where_copies_take_thrice_as_long_as_a_forward_nothing_goes_home() -> None:
    assert planned(H200).num_products_home == 0


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": Recompute.FULL},
        {"compile": Compile.OFF},
        {"activation_offloading": ActivationOffloading.OFF},
    ],
)
def test_only_where_it_is_left_open_and_layers_are_compiled(options: dict[str, Any]) -> None:
    assert planned(**options).num_products_home == 0


@pytest.mark.extended  # searches for seconds
def test_the_hosts_memory_bounds_how_many_go() -> None:
    request = ask(gpu_memory_limit=24.0, max_grad_norm=1.0)
    free = planned()
    limit = host_need(request, free).total / 2**30 - 20

    bounded = planned(host_memory_limit=limit)

    assert 0 < bounded.num_products_home < free.num_products_home
    assert host_need(request, bounded).total <= limit * 2**30


@pytest.mark.extended  # searches for seconds
def test_where_nobody_says_how_much_there_is_it_takes_no_more_than_so_many_times_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = ask(gpu_memory_limit=24.0, max_grad_norm=1.0)
    free, without = planned(), planned(activation_offloading=ActivationOffloading.OFF)
    monkeypatch.setattr(products_home, "MOST_IF_UNKNOWN", 1.4)
    fit_by_simulation.cache_clear()

    bounded = planned()

    fit_by_simulation.cache_clear()
    assert 0 < bounded.num_products_home < free.num_products_home
    assert host_need(request, bounded).total <= 1.5 * host_need(request, without).total


def test_a_plan_tells_it_and_keeps_it_in_its_file(tmp_path: Path) -> None:
    request = ask()
    plan = replace(request.plan.using([MemoryUse(0, 0, 2, 3)] * 4), num_products_home=3)
    digest = ModelDigest.of(request.shape, request.config.model.dtype)
    path = tmp_path / "plan.json"
    path.write_text(SavedPlan(digest, plan, 64, 512).to_json())

    assert read_plan(path).plan == plan
    assert "products from the host (3 of 8), else recomputed" in describe_stages(plan, request.shape)
    for changed in (replace(plan, num_products_home=9), replace(plan, stashed=frozenset())):
        path.write_text(SavedPlan(digest, changed, 64, 512).to_json())
        with pytest.raises(PlanError, match="microbatches of a round go home, which has 8"):
            read_plan(path)
