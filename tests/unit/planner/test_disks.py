"""Optimizer states on disks in the plan: seconds of reads and writes, and what hides under the rest of a step."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from harness.plan_requests import find_published_shape, request_of

from mobius.config.config import Dtype, DurableSteps, OptimizerStates
from mobius.planner import solver
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.plan_table import describe_disks
from mobius.planner.profile import DiskRates
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import PlanResult, solve
from mobius.planner.step_prediction import Resource, predict_min_step_seconds, predict_step_seconds

SHAPE = find_published_shape("7b")
MACHINE = Machine(4, GPU_SPECS["RTX4090"])
STREAMED: dict[str, Any] = {"resident_stages": "0", "batch_size": 64, "seq_length": 512, "dtype": Dtype.BF16}
STREAMED |= {"durable_steps": DurableSteps.OFF, "num_stages": 12}  # no more stages of a GPU than buffers


def planned(**options: Any) -> PlanResult:
    return solve(request_of(SHAPE, MACHINE, **(STREAMED | options)), layer=estimated_layer)


def seconds(request: PlanRequest, found: PlanResult) -> float:
    assert found.profile is not None
    return predict_step_seconds(found.plan, request, found.profile)


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_slow_disks_bound_a_step_and_fast_ones_take_the_hosts_memory_alone(clipping: float) -> None:
    memory = planned(max_grad_norm=clipping)
    fast = planned(max_grad_norm=clipping, offload_states_to="/a,/b", disk_rate="500,500")
    slow = planned(max_grad_norm=clipping, offload_states_to="/a,/b", disk_rate="1.5,0.5")
    assert memory.profile is not None
    through_memory = 2 * fast.host_estimate.disk / memory.profile.host_bandwidth
    assert memory.step_seconds <= fast.step_seconds < memory.step_seconds + through_memory
    assert slow.host_estimate.disk == pytest.approx(10 * SHAPE.num_parameters, rel=0.001)
    alone = slow.host_estimate.disk / 1e9
    assert alone < slow.step_seconds < 1.25 * alone
    assert slow.step_time_prediction is not None
    assert slow.step_time_prediction.bottleneck is Resource.DISKS
    compact = planned(
        max_grad_norm=clipping,
        offload_states_to="/a,/b",
        disk_rate="1.5,0.5",
        optimizer_states=OptimizerStates.COMPACT,
    )
    assert compact.step_seconds < 0.45 * slow.step_seconds


def test_what_disks_move_both_ways_at_once_bounds_a_step_too() -> None:
    options: dict[str, Any] = {"offload_states_to": "/a", "weights_on_disks": True}
    own = DiskRates(2e9, 2e9), DiskRates(2e9, 2e9, at_once=2.5e9)
    apart, shared = (
        solve(request_of(SHAPE, replace(MACHINE, disks=disks), **STREAMED, **options), layer=estimated_layer)
        for disks in own
    )
    host = shared.host_estimate
    both = (host.disk_reads + host.disk_writes) / 2.5e9
    assert apart.step_seconds < both < shared.step_seconds < 1.2 * both
    assert f"both in at least {both:.2f} s" in describe_disks(shared)


def test_durable_steps_write_weights_and_resident_stages_too_and_take_the_space_twice() -> None:
    options: dict[str, Any] = {"offload_states_to": "/a,/b", "disk_rate": "7,0.5"}
    without, durable = (planned(**options, durable_steps=steps) for steps in (DurableSteps.OFF, DurableSteps.AUTO))
    count = SHAPE.num_parameters
    assert without.host_estimate.disk_writes == pytest.approx(10 * count, rel=0.001)
    assert durable.host_estimate.disk_writes == pytest.approx(12 * count, rel=0.001)
    assert durable.host_estimate.disk_reads == without.host_estimate.disk_reads
    assert durable.host_estimate.disk == pytest.approx(24 * count, rel=0.001)
    assert durable.step_seconds == pytest.approx(1.2 * without.step_seconds, rel=0.03)
    assert "weights and optimizer states of two steps (--durable_steps)" in describe_disks(durable)


def test_resident_stages_are_copied_to_host_memory_on_their_way_to_the_disks() -> None:
    options: dict[str, Any] = {"offload_states_to": "/a", "disk_rate": "7,2", "num_stages": 16, "resident_stages": "1"}
    without, durable = (planned(**options, durable_steps=steps) for steps in (DurableSteps.OFF, DurableSteps.ON))
    cuts, shape = durable.plan.cuts, durable.request.shape
    resident = sum(cuts[stage].num_parameters(shape) for stage in durable.plan.resident)
    assert durable.plan.resident == without.plan.resident
    assert resident > 0
    copies = durable.host_estimate.state_buffers - without.host_estimate.state_buffers
    assert copies == 12 * resident
    assert durable.host_estimate.disk_writes == 12 * SHAPE.num_parameters


def test_fewer_stages_are_in_host_memory_at_once_where_it_is_short(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"offload_states_to": "/a", "disk_rate": "7,2", "num_stages": 32, "num_chunks": 4}
    options["durable_steps"] = DurableSteps.ON  # with which no stage's states stay in memory
    usual = planned(**options)
    buffers = usual.host_estimate.state_buffers
    less = usual.host_estimate.total - buffers // 4
    short = planned(**options, host_memory_limit=less / 2**30)
    assert short.request.num_state_buffers == 2
    assert short.host_estimate.state_buffers == pytest.approx(2 / 3 * buffers, rel=0.01)
    assert short.host_estimate.total <= less
    options["host_memory_limit"] = (less - buffers // 3) / 2**30
    shortest = planned(**options)
    assert shortest.request.num_state_buffers == 1
    with caplog.at_level(logging.INFO):
        assert planned(**options | {"num_chunks": None}).request.num_state_buffers < 3
    assert [text.startswith("chosen: ") for text in caplog.messages].count(True) == 1, "other tries are told, too"
    shorter = planned(**options | {"host_memory_limit": 0.8 * options["host_memory_limit"]})
    assert shorter.request.num_state_buffers == 3, "what does not fit is told as usual"


def test_fewer_stages_are_in_host_memory_at_once_where_other_things_use_it_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"batch_size": 16, "seq_length": 2048, "num_stages": 32, "num_chunks": None}
    options |= {"resident_stages": "auto", "max_grad_norm": 0.0, "optimizer_states": OptimizerStates.COMPACT}
    options |= {"offload_states_to": "/a,/b,/c,/d", "disk_rate": "7,2", "host_memory_limit": 32.0}
    fewer = planned(**options)
    monkeypatch.setattr(solver, "FEWEST_STATE_BUFFERS", 3)
    usual = planned(**options)

    assert usual.fits_host
    assert (usual.request.num_state_buffers, fewer.request.num_state_buffers) == (3, 2)
    assert fewer.step_seconds < 0.99 * usual.step_seconds


def test_weights_on_disks_take_host_memory_for_the_buffers_alone_and_two_reads_more() -> None:
    options: dict[str, Any] = {"offload_states_to": "/a,/b", "max_grad_norm": 0.0}
    options["disk_rate"] = "0.5,5"
    memory, disks = (planned(**options, weights_on_disks=there) for there in (False, True))
    count = SHAPE.num_parameters
    largest = sum(max(cut.num_parameters(SHAPE) for cut in disks.plan.cuts[rank::4]) for rank in range(4))
    assert disks.host_estimate.streamed == 0
    assert disks.host_estimate.load_buffers == 2 * 2 * largest
    assert disks.host_estimate.state_buffers - memory.host_estimate.state_buffers == 3 * 2 * largest
    assert memory.host_estimate.total - disks.host_estimate.total == 2 * count - 5 * 2 * largest
    assert disks.host_estimate.disk == pytest.approx(12 * count, rel=0.001)
    assert disks.host_estimate.disk_writes == pytest.approx(12 * count, rel=0.001)
    # Once for the update, and for forward and backward; between these a rank's last stages stay in its slots.
    slots = disks.plan.slots[0]
    assert disks.plan.slots == (slots,) * 4
    staying = sum(cut.num_parameters(SHAPE) for cut in disks.plan.cuts[-4 * slots :])
    assert disks.host_estimate.disk_reads == pytest.approx(12 * count + 2 * (2 * count - staying), rel=0.001)
    alone = disks.host_estimate.disk_reads / 1e9
    assert alone < disks.step_seconds < 1.25 * alone
    assert "GiB of weights and optimizer states are in /a,/b" in describe_disks(disks)


@pytest.mark.parametrize("weights", [False, True])
def test_durable_steps_have_the_weights_in_any_case(weights: bool) -> None:
    options: dict[str, Any] = {"offload_states_to": "/a,/b", "durable_steps": DurableSteps.ON}
    found = planned(**options, weights_on_disks=weights).host_estimate
    assert found.disk == pytest.approx(24 * SHAPE.num_parameters, rel=0.001)
    assert found.disk_writes == pytest.approx(12 * SHAPE.num_parameters, rel=0.001)


@pytest.mark.grid
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("steps", [DurableSteps.ON, DurableSteps.OFF])
@pytest.mark.parametrize("rate", ["0.5,0.5", "4,1", "7,5"])
@pytest.mark.parametrize("rounds", [1, 8])
def test_no_step_is_shorter_than_the_bound(rate: str, rounds: int, steps: DurableSteps, weights: bool) -> None:
    options: dict[str, Any] = {"offload_states_to": "/a", "disk_rate": rate, "weights_on_disks": weights}
    found = planned(**options, num_chunks=8, num_rounds=rounds, durable_steps=steps)
    assert found.profile is not None
    bound = predict_min_step_seconds(found.plan, found.request, found.profile)
    assert bound <= seconds(found.request, found) * (1 + 1e-9)


def test_a_line_tells_the_bytes_and_what_is_left_out() -> None:
    found = planned(offload_states_to="/a,/b", disk_rate="7,2")
    assert (
        "1,000 steps write 67.4 TB, the run's 2 steps 0.135 TB; a step reads them in 4.81 s and writes them in 16.85 s"
        in describe_disks(found)
    )
    unknown = planned(offload_states_to="/a")
    assert unknown.profile is not None
    assert unknown.profile.disks is None
    assert "the predicted seconds leave the disks out (--disk_rate)" in describe_disks(unknown)
    nodes = Machine(4, GPU_SPECS["RTX4090"], num_replicas=2)
    request = request_of(SHAPE, nodes, **STREAMED, offload_states_to="/a", disk_rate="7,2")
    shared = solve(request, layer=estimated_layer).profile
    assert shared is not None
    assert shared.disks is not None
    assert (shared.disks.read, shared.disks.write) == (3.5e9, 1e9)


def test_gradients_take_memory_for_three_stages_of_a_gpu_where_no_update_waits_for_the_norm() -> None:
    folders: dict[str, Any] = {"offload_states_to": "/a"}
    waiting, begun = (planned(max_grad_norm=limit, **folders).host_estimate for limit in (1.0, 0.0))
    sizes = [cut.num_trained(SHAPE) for cut in planned(**folders).plan.cuts]
    saved = 2 * SHAPE.num_parameters - 3 * 2 * sum(max(sizes[rank::4]) for rank in range(4))
    assert waiting.total - begun.total == pytest.approx(saved, rel=0.02)
    on_disks = planned(max_grad_norm=1.0, gradients_on_disks=True, **folders).host_estimate
    assert on_disks.total == begun.total
    assert on_disks.disk - waiting.disk == 2 * SHAPE.num_parameters
    one_by_one = planned(max_grad_norm=0.0, overlap_optimizer=False, **folders).host_estimate
    assert one_by_one.total == pytest.approx(waiting.total, rel=0.02), "all updates wait for the end of the step"
