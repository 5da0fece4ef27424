"""Answers for machines one does not have: sensible orders of answers, and clear refusals."""

from __future__ import annotations

import pytest
from harness.plan_requests import find_published_shape, refusal_by, request_of

from mobius.config.config import Compile, Dtype, Recompute
from mobius.errors import PlanError
from mobius.planner.gpu_specs import GPU_SPECS, Host
from mobius.planner.memory_estimates import estimated_layer, largest_gpu_estimate
from mobius.planner.request import Machine
from mobius.planner.solver import PlanResult, solve
from mobius.planner.step_prediction import Resource
from mobius.schedule.partition import ModelShape
from mobius.units import GIB


def ask(
    shape: ModelShape,
    card: str = "H200",
    *,
    gpus: int = 4,
    pcie: int | None = None,
    replicas: int = 1,
    host: Host | None = None,
    **options: object,
) -> PlanResult:
    host = host or Host(pcie=pcie)
    machine = Machine(gpus, GPU_SPECS[card], host=host, num_replicas=replicas, num_nodes=replicas)
    request = request_of(shape, machine, **options)
    return solve(request, layer=estimated_layer(request))


def seconds(found: PlanResult) -> float:
    return found.step_seconds


@pytest.mark.extended  # a quarter of a minute of searches
def test_more_gpus_newer_links_and_more_memory_are_not_slower(llama_7b: ModelShape) -> None:
    assert seconds(ask(llama_7b, "RTX4090", gpus=8)) < seconds(ask(llama_7b, "RTX4090"))
    assert seconds(ask(llama_7b, "L40S", pcie=4)) <= seconds(ask(llama_7b, "L40S", pcie=3))
    assert seconds(ask(llama_7b, "RTX4090")) <= seconds(ask(llama_7b, "RTX4090", gpu_memory_limit=8.0)) * 1.01


def test_a_slow_host_is_what_limits_fast_cards_and_compute_what_limits_slow_ones(llama_7b: ModelShape) -> None:
    slow_host = ask(llama_7b, "H200", resident_stages="0", host=Host(bandwidth=80e9))
    for found, bottleneck in ((slow_host, Resource.HOST_MEMORY), (ask(llama_7b, "L20"), Resource.COMPUTE)):
        assert found.step_time_prediction is not None
        assert found.step_time_prediction.bottleneck is bottleneck


def test_mfu_counts_the_models_own_operations(llama_7b: ModelShape) -> None:
    found = ask(llama_7b, use_offload=False, recompute=Recompute.NONE)
    # By hand: 6 x 6.607e9 parameters without the embedding, and attention's 6 x 32 x 4096 x 512, per token.
    operations = (6 * 6.607e9 + 6 * 32 * 4096 * 512) * 64 * 512
    assert found.mfu == pytest.approx(operations / seconds(found) / (4 * 989e12), rel=1e-3)
    assert 0.3 < found.mfu < 0.6


def test_memory_is_told_for_gpu_and_host(llama_7b: ModelShape) -> None:
    streamed = ask(llama_7b, gpu_memory_limit=12.0, resident_stages="0")
    assert largest_gpu_estimate(streamed.gpu_estimates).total < 12 * GIB
    # 14 bytes for each of 6.74e9 parameters and four processes.
    assert streamed.host_estimate.total == pytest.approx(6.738e9 * 14 + 4 * 2.38 * GIB, rel=1e-3)
    assert ask(llama_7b, use_offload=False).host_estimate.total < 10 * GIB


def test_resident_stages_save_time_and_host_memory_and_cost_gpu_memory(llama_7b: ModelShape) -> None:
    streamed, mixed = (ask(llama_7b, recompute=Recompute.FULL, resident_stages=number) for number in ("0", "3"))
    assert seconds(mixed) < seconds(streamed)
    assert mixed.host_estimate.total < streamed.host_estimate.total
    assert largest_gpu_estimate(mixed.gpu_estimates).total > largest_gpu_estimate(streamed.gpu_estimates).total


def test_what_cannot_be_is_refused_with_what_to_change(llama_7b: ModelShape) -> None:
    assert "To fit: " in refusal_by(lambda: ask(llama_7b, gpu_memory_limit=2.0))
    too_many = refusal_by(lambda: ask(llama_7b, gpu_memory_limit=12.0, resident_stages="6", num_rounds=1))
    assert "  --resident_stages auto " in too_many


def test_layers_that_are_not_compiled_take_more_memory_and_time() -> None:
    shape = find_published_shape("7b")
    options: dict[str, object] = {
        "num_chunks": 4,
        "num_rounds": 1,
        "resident_stages": "0",
        "recompute": Recompute.FULL,
        "gpu_memory_limit": 7.3,
        "tile_tokens": "off",
    }
    compiled, eager = (ask(shape, compile=wanted, **options) for wanted in (Compile.AUTO, Compile.OFF))
    assert largest_gpu_estimate(compiled.gpu_estimates).total / GIB == pytest.approx(6.93, abs=0.005)
    assert largest_gpu_estimate(eager.gpu_estimates).total / GIB == pytest.approx(7.23, abs=0.005)
    assert seconds(eager) > 1.05 * seconds(compiled)


@pytest.mark.extended  # searches for seconds
def test_loss_scaling_waits_for_all_gradients_as_clipping_does(llama_7b: ModelShape) -> None:
    clipped, scaled = (
        ask(llama_7b, max_grad_norm=norm, dtype=dtype).request for norm, dtype in ((1.0, Dtype.BF16), (0.0, Dtype.FP16))
    )
    assert scaled.memory_rules.waiting_stages(32) == clipped.memory_rules.waiting_stages(32) == frozenset(range(32))
    assert scaled.memory_rules.waits_for_norm
    assert not ask(llama_7b, max_grad_norm=0.0).request.memory_rules.waits_for_norm


def test_no_step_is_predicted_without_rates(llama_7b: ModelShape) -> None:
    found = ask(llama_7b, dtype=Dtype.FP32)
    assert (found.profile, found.step_time_prediction) == (None, None)
    with pytest.raises(PlanError, match="no step is predicted"):
        seconds(found)


@pytest.mark.extended  # searches for seconds
def test_replicas_share_a_step_and_tokens_are_those_of_all(llama_7b: ModelShape) -> None:
    one, two = ask(llama_7b, "L20"), ask(llama_7b, "L20", replicas=2)
    assert 0.5 * seconds(one) < seconds(two) < seconds(one)
    assert two.tokens_per_second == pytest.approx(64 * 512 / seconds(two))
    assert two.mfu == pytest.approx(one.mfu * seconds(one) / seconds(two) / 2)
