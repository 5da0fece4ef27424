"""Where the host's memory is short, plans leave more on the GPUs, and a refusal names the option that is to blame."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
from harness.plan_requests import request_of

from mobius.config.config import ActivationOffloading, Order
from mobius.errors import GpuMemoryError, HostMemoryError
from mobius.planner.fit import fit_plan, fits_host, least_host_bytes
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import (
    estimate_gpu_memory_of_ranks,
    estimate_host_memory,
    estimated_layer,
)
from mobius.planner.remedies import check_least_host_memory
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import PlanResult, choose_candidate, least_host_need, resolve_auto, solve
from mobius.schedule.partition import ModelShape
from mobius.units import GIB, format_bytes

MACHINE = Machine(2, GPU_SPECS["RTX4090"])
USUAL_OFFLOADING = {"activation_offloading": ActivationOffloading.AUTO}


@pytest.fixture
def shape(llama_7b: ModelShape) -> ModelShape:
    return replace(llama_7b, layer_parameters=llama_7b.layer_parameters[:16])


def request_for(shape: ModelShape, limit: float | None, **options: object) -> PlanRequest:
    usual: dict[str, object] = {"num_stages": 16, "num_chunks": 16, "host_memory_limit": limit}
    return request_of(shape, MACHINE, **(usual | options))


@cache
def planned(request: PlanRequest) -> PlanResult:
    settled = resolve_auto(request)
    return solve(settled, layer=estimated_layer(settled))


def test_less_host_memory_leaves_more_stages_on_the_gpus(shape: ModelShape) -> None:
    unlimited, *limited = [planned(request_for(shape, limit)) for limit in (None, 52, 35, 24)]
    assert limited[0].plan == unlimited.plan
    for found in limited:
        assert fits_host(found.request, found.plan)
        assert (
            max(need.total for need in estimate_gpu_memory_of_ranks(found.request, found.plan, found.layer)) <= 24 * GIB
        )
    assert [len(found.plan.resident) for found in limited] == sorted({len(found.plan.resident) for found in limited})
    assert unlimited.step_seconds < limited[1].step_seconds < limited[2].step_seconds < 1.1 * limited[1].step_seconds


@pytest.mark.extended  # searches for seconds
def test_where_nothing_fits_the_least_is_told(shape: ModelShape) -> None:
    found = planned(request_for(shape, 16))
    alike = []
    for number in (0, 4, 5):  # six are allowed if asked for, but leave less than plans must
        with suppress(GpuMemoryError):
            alike.append(planned(request_for(shape, 16, resident_stages=str(number))).host_estimate.total)
    assert 16 * GIB < found.host_estimate.total <= min(alike)


@pytest.mark.extended  # a quarter of a minute of searches
def test_rounds_make_room_for_stages_that_the_host_cannot_hold(shape: ModelShape) -> None:
    options: dict[str, object] = {"seq_length": 2048, "activation_offloading": ActivationOffloading.AUTO}
    short = planned(request_for(shape, 28, **options))
    assert short.plan.num_rounds > 1
    assert short.host_estimate.total <= 28 * GIB
    options["num_rounds"] = short.plan.num_rounds // 2
    ample, fewer = (planned(request_for(shape, limit, **options)).host_estimate.total for limit in (60, 28))
    assert fewer > 28 * GIB
    assert ample <= 60 * GIB


def test_numbers_of_stages_and_chunks_are_chosen_among_what_fits_the_host(shape: ModelShape) -> None:
    few = replace(shape, layer_parameters=shape.layer_parameters[:6])
    open_numbers: dict[str, object] = {"num_stages": None, "num_chunks": None, "batch_size": 16}
    best = choose_candidate(request_for(few, 8, **open_numbers))
    assert fits_host(best.request, best.plan)
    assert best.seconds > choose_candidate(request_for(few, None, **open_numbers)).seconds


def test_auto_finds_numbers_that_fit_the_host_where_none_of_the_usual_do(shape: ModelShape) -> None:
    """Explicit numbers fit: six stages, 64 chunks. Auto tries 8 chunks at most where memory is ample."""
    few = replace(shape, layer_parameters=shape.layer_parameters[:4])
    options: dict[str, object] = {"num_stages": None, "num_chunks": None, "seq_length": 2048, "gpu_memory_limit": 8}
    asked, short = (
        request_of(few, Machine(1, GPU_SPECS["RTX4090"]), **USUAL_OFFLOADING, **options, host_memory_limit=limit)
        for limit in (17.5, 15.5)
    )
    explicit = asked.trying(num_stages=6, num_chunks=64, num_rounds=1)
    assert least_host_bytes(explicit) == estimate_host_memory(explicit, fit_plan(explicit)).total <= 17.5 * GIB

    best = choose_candidate(asked)
    assert fits_host(best.request, best.plan)
    assert best.plan.num_chunks > 8

    refused = choose_candidate(short)  # nothing fits: what is told is the least that there is
    assert (
        15.5 * GIB
        < estimate_host_memory(refused.request, refused.plan).total
        <= estimate_host_memory(best.request, best.plan).total
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_stages": 8, "num_chunks": 4},
        {"compute_order": Order.DEPTH_FIRST},
        {"activation_offloading": ActivationOffloading.AUTO, "seq_length": 2048},
        {"num_rounds": 2, "gpu_memory_limit": 12.0},
    ],
)
def test_the_bound_of_host_memory_is_what_the_plan_of_least_memory_takes(
    shape: ModelShape, options: dict[str, object]
) -> None:
    """So a run that is refused by the bound would be refused with a plan, too, and by the same number."""
    request = request_for(shape, 1, **options)
    need = solve(request, layer=estimated_layer).host_estimate.total
    assert least_host_need(request) == need
    with pytest.raises(HostMemoryError, match=re.escape(f"needs {format_bytes(need)} of host memory (")):
        check_least_host_memory(request, need - 1)
    check_least_host_memory(request, need)


def test_numbers_that_are_searched_for_have_no_bound(shape: ModelShape) -> None:
    assert least_host_need(request_for(shape, 1, num_stages=None)) == 0
