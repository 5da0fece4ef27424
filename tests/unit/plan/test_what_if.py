"""Questions about machines one does not have: sensible orders of answers, and clear refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mobius.config.config import Recompute
from mobius.errors import GpuMemoryError, PlanError
from mobius.plan.cards import CARDS, Host
from mobius.plan.sensitivity import Resource
from mobius.plan.shape import ModelShape
from mobius.plan.what_if import Answer, Machine, Run, answer
from mobius.units import GIB


def ask(
    shape: ModelShape,
    card: str = "H200",
    *,
    gpus: int = 4,
    pcie: int | None = None,
    nodes: int = 1,
    host: Host | None = None,
    **changes: object,
) -> Answer:
    run = Run(shape, batch_size=64, seq_length=512, num_stages=32, num_chunks=8)
    machine = Machine(CARDS[card], gpus, host or Host(), pcie, nodes)
    return answer(machine, replace(run, **changes))  # type: ignore[arg-type]


def seconds(found: Answer) -> float:
    return found.candidate.prediction.step_seconds


def test_more_gpus_newer_links_and_more_memory_are_not_slower(llama_7b: ModelShape) -> None:
    assert seconds(ask(llama_7b, "RTX4090", gpus=8)) < seconds(ask(llama_7b, "RTX4090"))
    assert seconds(ask(llama_7b, "L40S", pcie=4)) <= seconds(ask(llama_7b, "L40S", pcie=3))
    assert seconds(ask(llama_7b, "RTX4090")) <= seconds(ask(llama_7b, "RTX4090", gpu_memory_limit=8.0)) * 1.01


def test_a_slow_host_is_what_limits_fast_cards_and_compute_what_limits_slow_ones(llama_7b: ModelShape) -> None:
    assert ask(llama_7b, "H200", num_resident=0, host=Host(bandwidth=80e9)).limit is Resource.HOST_MEMORY
    assert ask(llama_7b, "L20").limit is Resource.COMPUTE


def test_mfu_counts_the_models_own_operations(llama_7b: ModelShape) -> None:
    found = ask(llama_7b, use_offload=False, recompute=Recompute.NONE)
    # By hand: 6 x 6.607e9 parameters without the embedding, and attention's 6 x 32 x 4096 x 512, per token.
    operations = (6 * 6.607e9 + 6 * 32 * 4096 * 512) * 64 * 512
    assert found.mfu == pytest.approx(operations / seconds(found) / (4 * 989e12), rel=1e-3)
    assert 0.3 < found.mfu < 0.6


def test_memory_is_told_for_gpu_and_host(llama_7b: ModelShape) -> None:
    streamed = ask(llama_7b, gpu_memory_limit=12.0, num_resident=0)
    assert streamed.gpu_bytes < 12 * GIB
    # 14 bytes for each of 6.74e9 parameters and four processes.
    assert streamed.host_bytes == pytest.approx(6.738e9 * 14 + 4 * 2.38 * GIB, rel=1e-3)
    assert ask(llama_7b, use_offload=False).host_bytes < 10 * GIB


def test_resident_stages_save_time_and_host_memory_and_cost_gpu_memory(llama_7b: ModelShape) -> None:
    streamed, mixed = (ask(llama_7b, recompute=Recompute.FULL, num_resident=number) for number in (0, 3))
    assert seconds(mixed) < seconds(streamed)
    assert mixed.host_bytes < streamed.host_bytes
    assert mixed.gpu_bytes > streamed.gpu_bytes


def test_what_cannot_be_is_refused_with_what_to_change(llama_7b: ModelShape) -> None:
    with pytest.raises(GpuMemoryError, match="To fit"):
        ask(llama_7b, gpu_memory_limit=2.0)
    with pytest.raises(GpuMemoryError, match="At most --resident_stages 1 fits"):
        ask(llama_7b, gpu_memory_limit=12.0, num_resident=6)
    with pytest.raises(PlanError, match="not a multiple"):
        ask(llama_7b, num_stages=30)
    with pytest.raises(PlanError, match="num_chunks 7"):
        ask(llama_7b, num_chunks=7)
    with pytest.raises(PlanError, match="no meaning"):
        ask(llama_7b, use_offload=False, num_resident=1)


def test_two_nodes_share_the_work_and_say_that_they_are_on_paper(llama_7b: ModelShape) -> None:
    two = ask(llama_7b, "L20", nodes=2)
    assert seconds(two) < seconds(ask(llama_7b, "L20"))
    assert "on paper" in two.candidate.profile.basis
    assert two.machine.num_ranks == 8
