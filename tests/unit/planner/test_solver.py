"""The choice is the fastest of all that fit, by the simulation itself; what does not fit is never chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.plan_requests import request_of

from mobius.errors import GpuMemoryError
from mobius.planner import solver as choosing
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import candidates, choose_candidate
from mobius.planner.step_prediction import predict_step_seconds
from mobius.schedule.partition import ModelShape


@pytest.fixture
def shape(llama_7b: ModelShape) -> ModelShape:
    return replace(llama_7b, layer_parameters=llama_7b.layer_parameters[:8])


def open_request(shape: ModelShape, **options: object) -> PlanRequest:
    """Everything streamed and recomputed on two cards; stages and chunks are left open."""
    usual = {"num_stages": None, "num_chunks": None, "batch_size": 16, "resident_stages": "0"}
    return request_of(shape, Machine(2, GPU_SPECS["RTX4090"]), **(usual | options))


def test_nothing_that_was_tried_is_noticeably_faster_than_the_choice(shape: ModelShape) -> None:
    request = open_request(shape)
    tried = candidates(request)
    assert {(setting.plan.num_stages, setting.plan.num_microbatches) for setting in tried} == {
        (stages, chunks) for stages in (2, 4, 6, 8, 10) for chunks in (1, 2, 4, 8, 16)
    }
    seconds = [predict_step_seconds(setting.plan, setting.request, setting.profile) for setting in tried]
    assert all(setting.seconds <= simulated for setting, simulated in zip(tried, seconds, strict=True))
    assert choose_candidate(request).seconds <= min(seconds) * (1 + choosing.ALIKE)


def test_a_given_number_stays(shape: ModelShape) -> None:
    assert choose_candidate(open_request(shape, num_stages=4)).plan.num_stages == 4
    assert choose_candidate(open_request(shape, num_chunks=8)).plan.num_microbatches == 8


def test_what_does_not_fit_is_not_chosen(shape: ModelShape) -> None:
    request = open_request(shape, gpu_memory_limit=4.0)
    assert request.gpu_bytes is not None
    tried = candidates(request)
    assert 0 < len(tried) < len(candidates(open_request(shape)))
    for setting in [*tried, choose_candidate(request)]:
        needs = choosing.estimate_gpu_memory_of_ranks(setting.request, setting.plan)
        assert max(need.total for need in needs) <= request.gpu_bytes


def test_if_nothing_fits_the_reason_is_told(shape: ModelShape) -> None:
    with pytest.raises(GpuMemoryError, match="is available"):
        choose_candidate(open_request(shape, gpu_memory_limit=0.25))


def test_what_is_free_on_a_rank_is_no_part_of_the_choice(shape: ModelShape) -> None:
    request = open_request(shape)
    little = replace(request, machine=replace(request.machine, free_bytes=2**30))
    settled, other = choosing.resolve_auto(request), choosing.resolve_auto(little)
    assert (settled.candidate.num_stages, settled.num_chunks) == (other.candidate.num_stages, other.num_chunks)
    assert other.machine.free_bytes == 2**30
