"""Rounds that nobody asked for fit and cost no time, and what they take is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from harness.plan_requests import estimate_gpu_memory, refusal_by

from mobius.config.cli import parse_args
from mobius.config.config import Dtype
from mobius.errors import ConfigError
from mobius.planner.fit import fit_plan
from mobius.planner.gpu_specs import find_gpu_spec
from mobius.planner.memory_estimates import estimate_host_memory, estimated_layer
from mobius.planner.plan_file import ModelDigest, SavedPlan, read_plan
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import ALIKE, resolve_auto, solve
from mobius.planner.step_prediction import predict_step_seconds
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import MemoryUse, Plan
from mobius.units import GIB

SHAPE = ModelShape(
    layer_parameters=(202_383_360,) * 16,
    embedding_parameters=131_072_000,
    head_parameters=131_072_000,
    hidden_size=4096,
    intermediate_size=11008,
    vocab_size=32000,
    is_tied=False,
    num_heads=32,
)
BATCH = ["--bf16", "--batch_size", "256", "--seq_length", "512", "--num_stages", "16", "--num_chunks", "32"]
BATCH += ["--activation_offloading", "off", "--compute_order", "breadth_first"]


def request_for(*words: str, free_bytes: int | None = None) -> PlanRequest:
    config = parse_args([*BATCH, *words])
    machine = Machine(2, find_gpu_spec("H200"), free_bytes=free_bytes)
    return resolve_auto(PlanRequest.of(config, SHAPE, machine))


def least(request: PlanRequest) -> int:
    plan = request.plan.with_memory_uses([MemoryUse(0, 0, 2)] * 2)
    layer = estimated_layer(request)
    return max(estimate_gpu_memory(request, plan, rank=rank, layer=layer).total for rank in range(2))


@pytest.mark.parametrize("limit", [6.8, 14, *(pytest.param(limit, marks=pytest.mark.extended) for limit in (9, 30))])
def test_auto_takes_rounds_that_fit_and_more_than_the_fewest_only_for_time_or_to_spare_the_host(limit: float) -> None:
    request = request_for("--gpu_memory_limit", str(limit))
    rounds = request.candidate.num_rounds
    assert rounds is not None
    found = solve(request, layer=estimated_layer(request))
    assert found.plan.num_rounds == rounds
    numbers = [number for number in (1, 2, 4, 8, 16, 32) if number <= rounds]
    fitting = [number for number in numbers if least(request.trying(num_rounds=number)) <= 0.97 * limit * GIB]
    assert (fitting[0] == 1) == (limit >= 14)
    if fitting[0] < rounds:
        fewest = request.trying(num_rounds=fitting[0])
        other = solve(fewest, layer=estimated_layer(fewest))
        assert found.step_seconds <= other.step_seconds * (1 + ALIKE)
        is_faster = found.step_seconds < other.step_seconds
        assert is_faster or found.host_estimate.total <= other.host_estimate.total


def test_all_ranks_find_the_same_number_whatever_is_free_on_their_gpu() -> None:
    free = (None, 20 * GIB, 100 * GIB)
    assert len({request_for("--gpu_memory_limit", "9", free_bytes=number).candidate.num_rounds for number in free}) == 1


def test_a_number_that_is_given_is_taken_or_refused_with_one_that_fits() -> None:
    request = request_for("--gpu_memory_limit", "9", "--num_rounds", "32")
    assert fit_plan(request, layer=estimated_layer(request)).num_rounds == 32

    message = refusal_by(lambda: request_for("--gpu_memory_limit", "9", "--num_rounds", "1"))
    assert "  --num_rounds auto " in message


@pytest.mark.extended  # searches for seconds
def test_chunks_that_are_chosen_are_a_multiple_of_the_rounds_that_are_given() -> None:
    config = parse_args([*BATCH[:-4], "--num_chunks", "auto", "--num_rounds", "4", "--gpu_memory_limit", "40"])
    request = resolve_auto(PlanRequest.of(config, SHAPE, Machine(2, find_gpu_spec("H200"))))
    assert (request.candidate.num_rounds, request.num_chunks % 4) == (4, 0)


def test_sums_that_wait_take_two_bytes_more_per_streamed_parameter_and_four_per_resident_one() -> None:
    one, two = (request_for("--num_rounds", str(number), "--max_grad_norm", "0") for number in (1, 2))
    plans = [request.plan.with_memory_uses([MemoryUse(3, 0, 2)] * 2) for request in (one, two)]
    hosts = [estimate_host_memory(request, plan) for request, plan in zip((one, two), plans, strict=True)]
    needs = [estimate_gpu_memory(request, plan, rank=0) for request, plan in zip((one, two), plans, strict=True)]

    assert hosts[1].total - hosts[0].total == 2 * hosts[0].streamed_parameters
    resident = sum(two.plan.cuts[stage].num_parameters(SHAPE) for stage in (0, 2, 4))
    streamed = SHAPE.layer_parameters[0]
    assert needs[0].gradients == 4 * two.plan.cuts[0].num_parameters(SHAPE)
    assert needs[1].gradients == 4 * resident + 2 * 4 * streamed
    assert needs[1].inputs == needs[0].inputs / 2


def test_a_single_streamed_stage_of_a_rank_keeps_its_sums() -> None:
    request = request_for("--num_rounds", "2")
    plan = request.plan.with_memory_uses([MemoryUse(7, 0, 1)] * 2)
    assert not plan.offloads_gradient_sums(0)
    assert estimate_host_memory(request, plan).streamed == 14 * estimate_host_memory(request, plan).streamed_parameters


def test_a_round_more_costs_time_for_its_copies_where_compute_does_not_hide_them() -> None:
    request = request_for("--num_rounds", "1")
    profile = solve(request).profile
    assert profile is not None
    plan = request.plan.with_memory_uses([MemoryUse(0, 0, 2)] * 2)
    seconds = [predict_step_seconds(replace(plan, num_rounds=number), request, profile) for number in (1, 2, 32)]
    assert seconds[0] < seconds[1] < 1.1 * seconds[0]
    assert seconds[2] > 1.3 * seconds[0]


def test_a_plan_file_keeps_the_rounds(tmp_path: Path) -> None:
    plan: Plan = request_for("--num_rounds", "4").plan.with_memory_uses([MemoryUse(0, 0, 2)] * 2)
    saved = SavedPlan(ModelDigest.of(SHAPE, Dtype.BF16), plan, 256, 512)
    (tmp_path / "plan.json").write_text(saved.to_json())
    assert read_plan(tmp_path / "plan.json") == saved
    assert "32 microbatches in 4 rounds" in plan.describe()


@pytest.mark.parametrize("on_cpu", [False, True])
def test_chunks_left_to_auto_go_by_rounds_of_any_number_that_divides_the_batch(on_cpu: bool) -> None:
    words = [*BATCH[:-4], "--num_chunks", "auto", "--num_rounds"]
    machine = Machine(2) if on_cpu else Machine(2, find_gpu_spec("H200"))
    request = resolve_auto(PlanRequest.of(parse_args([*words, "16"]), SHAPE, machine))
    assert (request.num_chunks % 16, 256 % request.num_chunks) == (0, 0)

    expected = r"`--batch_size` 256 .* 12 equal rounds; use --num_rounds 8 or 16, or --batch_size 25"
    with pytest.raises(ConfigError, match=expected):
        parse_args([*words, "12"])
