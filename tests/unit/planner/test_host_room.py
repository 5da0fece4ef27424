"""Where the host's memory is short, plans leave more on the GPUs, and a refusal names the option that is to blame."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
import torch
from harness.plan_requests import request_of
from transformers import LlamaConfig

from mobius.config.cli import parse_args
from mobius.config.config import ActivationOffloading
from mobius.errors import GpuMemoryError, HostMemoryError
from mobius.models.blocks import ModelParts
from mobius.planner.fit import fit_plan, fits_host, least_host_bytes
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import (
    check_host_memory,
    estimate_gpu_memory_of_ranks,
    estimate_host_memory,
    estimated_layer,
)
from mobius.planner.memory_remedies import host_remedies
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.search import choose_candidate, resolve_auto
from mobius.planner.solver import PlanResult, solve
from mobius.schedule.partition import ModelShape
from mobius.units import GIB

MACHINE = Machine(2, GPU_SPECS["RTX4090"])
USUAL_OFFLOADING = {"activation_offloading": ActivationOffloading.AUTO}
LLAMA = LlamaConfig(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=16, num_attention_heads=32, vocab_size=32000
)
"""The configuration of the model that `shape` is of."""


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
    unlimited, *limited = [planned(request_for(shape, limit)) for limit in (None, 46, 35, 24)]
    assert limited[0].plan == unlimited.plan
    for found in limited:
        assert fits_host(found.request, found.plan)
        assert (
            max(need.total for need in estimate_gpu_memory_of_ranks(found.request, found.plan, found.layer)) <= 24 * GIB
        )
    assert [len(found.plan.resident) for found in limited] == sorted({len(found.plan.resident) for found in limited})
    assert unlimited.step_seconds < limited[1].step_seconds < limited[2].step_seconds < 1.1 * unlimited.step_seconds


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
    ample, short = planned(request_for(shape, 60, **options)), planned(request_for(shape, 28, **options))
    assert ample.plan.accumulation_rounds == 1
    assert short.plan.accumulation_rounds > 1
    assert short.host_estimate.total <= 28 * GIB
    fewer = planned(request_for(shape, 28, num_rounds=short.plan.accumulation_rounds // 2, **options))
    assert fewer.host_estimate.total > 28 * GIB


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
    explicit = asked.trying(num_stages=6, num_chunks=64, accumulation_rounds=1)
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
    ("options", "advice"),
    [({"resident_stages": "0"}, "--resident_stages auto"), ({"num_rounds": 1}, "--num_rounds auto")],
)
def test_a_refusal_names_the_option_without_which_it_fits(
    shape: ModelShape, options: dict[str, object], advice: str
) -> None:
    usual = {"seq_length": 2048, "activation_offloading": ActivationOffloading.AUTO}
    found = planned(request_for(shape, 28, **usual, **options))
    remedies = list(host_remedies(found, 28 * GIB, LLAMA))
    with pytest.raises(HostMemoryError, match=rf"{advice} +\d\d\.\d GiB of host memory"):
        check_host_memory(found.host_estimate, available_bytes=28 * GIB, remedies=remedies)
    assert planned(request_for(shape, 28, **usual)).host_estimate.total <= 28 * GIB


def test_a_refusal_lists_changes_that_were_solved_and_fit(shape: ModelShape) -> None:
    """Each option as it is listed, typed into a request of its own, needs what the list says and fits."""
    settled = resolve_auto(request_for(shape, 13))
    found = solve(settled, layer=estimated_layer(settled), is_preliminary=True)
    assert found.host_estimate.total > 13 * GIB
    remedies = {each.options: each for each in host_remedies(found, 13 * GIB, LLAMA)}
    frozen = next(options for options in remedies if options.startswith("--freeze"))
    larger = next(options for options in remedies if "--host_memory_limit" in options)
    assert "--use_lora" in remedies

    words = ["--num_stages", "16", "--num_chunks", "16", "--batch_size", "64", "--host_memory_limit", "13"]
    words += ["--activation_offloading", "off"]
    for options in (frozen, "--use_lora", larger):
        config = parse_args([*words, *options.split()])
        parts = ModelParts(LLAMA, torch.device("cpu"), adapters=config.adapters)
        again = resolve_auto(PlanRequest.of(config, parts.shape(), MACHINE))
        plan = fit_plan(again, layer=estimated_layer(again))
        assert fits_host(again, plan)
        assert estimate_host_memory(again, plan).total == remedies[options].num_bytes

    number = int(frozen.removeprefix("--freeze embedding,layers.0-"))  # one layer less does not fit
    config = parse_args([*words, "--freeze", f"embedding,layers.0-{number - 1}"])
    fewer = ModelParts(LLAMA, torch.device("cpu"), adapters=config.adapters).shape()
    assert not planned_fits(PlanRequest.of(config, fewer, MACHINE))


def planned_fits(request: PlanRequest) -> bool:
    """Whether a request fits the host by the plan that is made for it."""
    settled = resolve_auto(request)
    return fits_host(settled, fit_plan(settled, layer=estimated_layer(settled)))
