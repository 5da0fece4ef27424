"""Optimizer states that stay in host memory where those of other stages are on disks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from harness.plan_requests import find_published_shape, request_of

from mobius.config.config import ActivationOffloading, Dtype, DurableSteps, OptimizerStates
from mobius.planner.disk_use import DiskUse
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import estimate_host_memory, estimated_layer
from mobius.planner.plan_table import describe_disks
from mobius.planner.request import Machine
from mobius.planner.solver import PlanResult, solve
from mobius.schedule.plan import Plan
from mobius.units import GIB

SHAPE = find_published_shape("8b")
"""128,256 words: embedding and head have 5.3 GB of states each, a layer 1.1 GB of compact ones."""


def planned(**options: Any) -> PlanResult:
    usual: dict[str, Any] = {"resident_stages": "0", "dtype": Dtype.BF16, "num_stages": 32, "num_chunks": 16}
    usual |= {"batch_size": 16, "seq_length": 2048, "optimizer_states": OptimizerStates.COMPACT, "num_rounds": 1}
    usual |= {"offload_states_to": "/a", "disk_rate": "3,1", "durable_steps": DurableSteps.OFF, "max_grad_norm": 0.0}
    usual |= {"activation_offloading": ActivationOffloading.OFF}
    return solve(request_of(SHAPE, Machine(4, GPU_SPECS["RTX4090"]), **usual | options), layer=estimated_layer)


def states_of(found: PlanResult, stages: frozenset[int]) -> int:
    rules = found.request.memory_rules
    sizes = [rules.sizes_of(*SHAPE.sizes_of(found.plan.cuts[stage])) for stage in stages]
    return sum(rules.state_bytes(each.owned, each.reduced) for each in sizes)


def test_the_largest_stages_stay_where_buffers_of_their_size_would_take_more() -> None:
    found = planned()
    assert found.plan.states_in_memory == {0, 28, 31}, "embedding and head, and a stage of two layers"
    on_disks = estimate_host_memory(found.request, replace(found.plan, states_in_memory=frozenset()))
    spared = states_of(found, found.plan.states_in_memory)
    assert on_disks.disk - found.host_estimate.disk == spared
    assert on_disks.disk_writes - found.host_estimate.disk_writes == spared
    assert on_disks.disk_reads - found.host_estimate.disk_reads == spared
    assert on_disks.total - found.host_estimate.total > 12 * GIB, "two ranks had three buffers of 6.4 GB"


def test_as_many_as_fit_the_memory_that_a_run_may_take_stay() -> None:
    usual = planned()
    limit = usual.host_estimate.total / GIB + 10
    more = planned(host_memory_limit=limit)
    assert more.plan.states_in_memory > usual.plan.states_in_memory
    assert f"; states of {len(more.plan.states_in_memory)} stages stay in memory" in describe_disks(more)
    assert 0.85 * limit < more.host_estimate.total / GIB <= limit
    left = [states_of(more, frozenset(own) - more.plan.states_in_memory) for own in stages_of_ranks(more.plan)]
    assert max(left) - min(left) < 1.2e9, "no rank has more than a layer's states on disks than another"
    assert more.step_seconds < 0.85 * usual.step_seconds
    assert more.host_estimate.disk_writes < 0.8 * usual.host_estimate.disk_writes


def test_nothing_is_on_disks_where_all_fits() -> None:
    found = planned(host_memory_limit=200.0)
    assert found.plan.states_in_memory == frozenset(range(32))
    assert found.host_estimate.disk == found.host_estimate.disk_writes == found.host_estimate.state_buffers == 0
    assert DiskUse.of(found) is None
    assert describe_disks(found) == "optimizer states of all 32 streamed stages stay in memory"
    again = solve(found.request, layer=estimated_layer, given=replace(found.plan, states_in_memory=frozenset()))
    assert again.plan == found.plan, "read from a file, which does not say it"
    in_memory = planned(offload_states_to=None, disk_rate=None, host_memory_limit=200.0)
    assert found.host_estimate.total == in_memory.host_estimate.total
    assert found.step_seconds == pytest.approx(in_memory.step_seconds, rel=0.001)


@pytest.mark.parametrize("options", [{"durable_steps": DurableSteps.ON}, {"weights_on_disks": True}])
def test_none_stays_where_all_are_written_or_memory_is_shortest(options: dict[str, Any]) -> None:
    assert not planned(**options, host_memory_limit=200.0).plan.states_in_memory


def stages_of_ranks(plan: Plan) -> list[list[int]]:
    return [list(plan.streamed_stages(rank)) for rank in range(plan.num_ranks)]
