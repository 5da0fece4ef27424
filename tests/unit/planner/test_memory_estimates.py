"""The bytes that a run needs, by hand for Llama-2-7B, and what a user is told when they are not there."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.plan_requests import estimate_gpu_memory, request_of
from harness.rank_memory import GivenRules, rules_of

from mobius.config.config import Dtype
from mobius.planner import memory_estimates
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import (
    GpuMemoryEstimate,
    estimate_gpu_memory_of_ranks,
    estimate_host_memory,
    largest_gpu_estimate,
    process_bytes,
)
from mobius.planner.request import Machine, PlanRequest
from mobius.schedule.memory_layout import Place, RankUse, StageRegions, lay_out_rank
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import MemoryUse, Plan
from mobius.units import GIB

BF16, FP16, FP32 = (rules_of(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32))
LAYER = 202_383_360  # of Llama-2-7B
EMBEDDING = 131_072_000
HEAD = 131_076_096
GPUS, CPUS = Machine(4, GPU_SPECS["H200"]), Machine(4)


def resident_bytes(rules: GivenRules, *, keeps_gradients: bool) -> int:
    """Bytes of a resident parameter of a layer: weight, optimizer state, and gradients or sums that it holds."""
    return regions_of(replace(rules, waiting=frozenset({0} if keeps_gradients else ())), {0}).num_bytes(Place.GPU)


def host_bytes(rules: GivenRules) -> int:
    """Bytes of a streamed parameter of a layer."""
    return regions_of(rules, set()).num_bytes(Place.HOST)


def regions_of(rules: GivenRules, resident: set[int]) -> StageRegions:
    return lay_out_rank({0: rules.sizes_of(1, 1, 1)}, RankUse(resident, 1), rules, num_stages=1).stages[0]


def node(shape: ModelShape, machine: Machine = GPUS, **options: Any) -> PlanRequest:
    """Four ranks with two stages of four layers each, two slots, 128 sequences of 512 tokens in 4 microbatches."""
    usual = {"num_stages": 8, "batch_size": 128, "num_chunks": 4, "loss_chunk_tokens": 2048}
    return request_of(shape, machine, **(usual | options))


def with_resident(request: PlanRequest, counts: tuple[int, ...], slots: int = 2) -> Plan:
    """The plan in which the first `counts[rank]` stages of each rank stay."""
    return request.plan.with_memory_uses([MemoryUse(count, 0, slots) for count in counts])


def need_of(
    shape: ModelShape, *, resident: tuple[int, ...] = (), rank: int | None = None, num_ranks: int = 4, **options: Any
) -> GpuMemoryEstimate:
    """The need of `rank`, or of the fullest; the first `resident[rank]` stages of each rank stay."""
    request = node(shape, Machine(num_ranks, GPU_SPECS["H200"]), **options)
    plan = with_resident(request, resident) if resident else request.plan
    return (
        largest_gpu_estimate(estimate_gpu_memory_of_ranks(request, plan))
        if rank is None
        else estimate_gpu_memory(request, plan, rank=rank)
    )


@pytest.fixture
def gib_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a GiB each."""
    monkeypatch.setattr(memory_estimates, "process_bytes", lambda request, plan: GIB)


def test_a_parameter_takes_14_bytes_of_host_memory_in_bf16_and_16_in_fp16_and_fp32() -> None:
    # bf16: weight 2, gradient 2, remainder 2, moments 8. fp16: a whole master of 4. fp32: weight and master in one 4.
    assert host_bytes(BF16) == 2 + 2 + 2 + 8
    assert host_bytes(FP16) == 2 + 2 + 4 + 8
    assert host_bytes(FP32) == 4 + 4 + 8


def test_gradients_that_travel_in_fp32_take_two_bytes_more_of_host_memory_and_none_of_the_gpu() -> None:
    for rules, num_bytes in ((BF16, 16), (FP16, 18), (FP32, 16)):
        wide = replace(rules, gradient=4)
        assert host_bytes(wide) == num_bytes
        assert resident_bytes(wide, keeps_gradients=False) == resident_bytes(rules, keeps_gradients=False)


def test_a_resident_parameter_takes_12_bytes_of_gpu_memory_in_bf16_and_14_where_gradients_are_kept() -> None:
    # bf16: weight 2, remainder 2, moments 8, kept gradient 2. fp16: a whole master of 4. fp32: weight and master in 4.
    assert [resident_bytes(BF16, keeps_gradients=keeps) for keeps in (False, True)] == [2 + 2 + 8, 2 + 2 + 8 + 2]
    assert resident_bytes(FP16, keeps_gradients=True) == 2 + 4 + 8 + 2
    assert [resident_bytes(FP32, keeps_gradients=keeps) for keeps in (False, True)] == [4 + 8, 4 + 8 + 4]
    assert resident_bytes(replace(BF16, gradient=4), keeps_gradients=True) == 2 + 2 + 8 + 4


def test_gradients_are_kept_where_an_update_waits(llama_7b: ModelShape) -> None:
    tied = replace(llama_7b, is_tied=True)
    nothing: dict[str, Any] = {"num_stages": 4, "max_grad_norm": 0.0}
    assert node(llama_7b, **nothing).memory_rules.waiting_stages(4) == set()
    assert node(tied, **nothing).memory_rules.waiting_stages(4) == {0, 3}
    for reason in ({"max_grad_norm": 1.0}, {"dtype": Dtype.FP16}):
        assert node(llama_7b, **(nothing | reason)).memory_rules.waiting_stages(4) == {0, 1, 2, 3}


@pytest.mark.usefixtures("gib_processes")
def test_llama_7b_on_four_ranks_needs_its_parameters_and_a_gib_per_process(llama_7b: ModelShape) -> None:
    request = node(llama_7b)
    assert estimate_host_memory(request, request.plan).total == 6_738_415_616 * 14 + 4 * 2**30


@pytest.mark.usefixtures("gib_processes")
def test_what_a_gpu_would_hold_takes_host_memory_of_a_rank_on_the_cpu(llama_7b: ModelShape) -> None:
    # Of eight stages of four layers the first of the first two ranks stay: embedding and eight layers.
    staying = EMBEDDING + 8 * LAYER
    request = node(llama_7b)
    plan = with_resident(request, (1, 1, 0, 0))
    on_gpus = estimate_host_memory(request, plan)

    assert on_gpus.total == (6_738_415_616 - staying) * 14 + 4 * 2**30
    sums = 4 * (4 * LAYER + EMBEDDING) + 4 * 4 * LAYER + 4 * 4 * LAYER + 4 * (4 * LAYER + HEAD)
    for norm, kept in ((1.0, 2), (0.0, 0)):
        request = node(llama_7b, CPUS, max_grad_norm=norm)
        on_cpu, held = estimate_host_memory(request, plan), estimate_gpu_memory_of_ranks(request, plan)
        assert sum(need.weights for need in held) == 6_738_415_616 * 2  # all stay, or have a slot of their own
        assert sum(need.optimizer for need in held) == staying * 10
        assert sum(need.gradients for need in held) == staying * kept + sums
        assert on_cpu.computing == int(1.2 * sum(need.total for need in held))
        assert on_cpu.total == on_gpus.total + on_cpu.computing


def test_a_rank_that_streams_or_has_measured_is_larger(llama_7b: ModelShape) -> None:
    for num_stages, more in ((8, 0), (None, 0.5)):
        request = node(llama_7b, num_stages=num_stages, use_offload=False)
        plan = node(llama_7b, use_offload=False).plan
        assert process_bytes(request, plan) == pytest.approx((2.15 + more) * GIB)
    for num_stages in (8, None):
        request = node(llama_7b, num_stages=num_stages)
        assert process_bytes(request, node(llama_7b).plan) == pytest.approx(2.38 * GIB)


def test_a_process_that_has_run_something_before_counts_as_it_is_but_on_a_cpu(llama_7b: ModelShape) -> None:
    for machine, larger in ((GPUS, 5 * GIB), (CPUS, GIB // 2)):
        request = node(llama_7b, machine)
        assert estimate_host_memory(request, request.plan, own_bytes=5 * GIB).process_bytes == larger


@pytest.mark.usefixtures("gib_processes")
def test_a_tied_matrix_is_budgeted_twice_because_both_ends_hold_it(small: ModelShape) -> None:
    request = node(small, Machine(1, GPU_SPECS["H200"]), num_stages=2)

    assert estimate_host_memory(request, request.plan).total == (240 + 500 + 244) * 14 + GIB


def test_streamed_llama_7b_by_hand(llama_7b: ModelShape) -> None:
    stage, activation = 4 * LAYER + EMBEDDING, (32 * 512) * 4096 * 2

    need = need_of(llama_7b)
    # A layer's parameters beside its feed-forward matrices are four times 4096 squared, and two norms.
    work = (32 * 512) * (11 * 4096 + 2 + 6 * 11008) * 2
    moment = (32 + 2 + 6) * activation + work
    assert need == GpuMemoryEstimate(
        rank=0,  # the last stage's rank keeps one microbatch of it only
        weights=(stage + 4 * LAYER) * 2,  # a slot for each of two stages
        gradients=stage * 4,  # one fp32 buffer
        optimizer=0,
        inputs=32 * activation,  # the inputs of eight layers for four microbatches
        messages=(2 + 6) * activation,  # two are received ahead; sent and kept are the microbatches and two more
        working_set=work,
        libraries=2**27 + 128 * 512 * 16 + int(0.03 * moment),  # tokens and labels are int64
    )


def test_resident_llama_7b_by_hand(llama_7b: ModelShape) -> None:
    held, stage = 8 * LAYER + HEAD, 4 * LAYER + HEAD

    need = need_of(llama_7b, use_offload=False, rank=3)
    # Gradients: kept in bf16, and one fp32 buffer in which those of the largest stage add up.
    assert (need.weights, need.gradients, need.optimizer) == (held * 2, held * 2 + stage * 4, held * 10)

    need = need_of(llama_7b, use_offload=False, max_grad_norm=0.0, rank=3)
    assert (need.weights, need.gradients, need.optimizer) == (held * 2, stage * 4, held * 10)


def test_a_mixture_by_hand_for_each_rank(llama_7b: ModelShape) -> None:
    # Sixteen stages of two layers, four per rank; the first ones stay: two of rank 0, none of rank 1, all of rank 3.
    resident = (2, 0, 1, 4)
    first, inner, last = EMBEDDING + 2 * LAYER, 2 * LAYER, 2 * LAYER + HEAD
    expected = {
        # two slots and the resident stages; one sum and kept gradients; remainder 2 and moments 8
        0: ((2 * inner + first + inner) * 2, first * 4 + (first + inner) * 2, (first + inner) * 10),
        1: (2 * inner * 2, inner * 4, 0),
        2: ((2 * inner + inner) * 2, inner * 4 + inner * 2, inner * 10),
        3: ((3 * inner + last) * 2, last * 4 + (3 * inner + last) * 2, (3 * inner + last) * 10),
    }
    for rank, categories in expected.items():
        need = need_of(llama_7b, num_stages=16, resident=resident, rank=rank)
        assert (need.weights, need.gradients, need.optimizer) == categories, rank


def test_gradients_in_fp32_add_up_where_they_are_kept_or_in_two_sums_of_which_streamed_ones_leave(
    llama_7b: ModelShape,
) -> None:
    held, inner = 8 * LAYER + HEAD, 4 * LAYER
    assert need_of(llama_7b, use_offload=False, fp32_gradients=True, rank=3).gradients == held * 4
    mixed = need_of(llama_7b, resident=(1, 1, 1, 1), fp32_gradients=True, rank=1)
    assert mixed.gradients == 2 * inner * 4 + inner * 4


def test_a_slot_is_as_large_as_the_largest_streamed_stage(llama_7b: ModelShape) -> None:
    # The embedding is resident with its stage, and takes no slot.
    need = need_of(llama_7b, num_stages=16, resident=(1, 1, 1, 1), rank=0)
    assert need.weights == (EMBEDDING + 2 * LAYER + 2 * 2 * LAYER) * 2
    for use_prefetch, slots in ((True, 2), (False, 1)):
        need = need_of(llama_7b, num_stages=16, use_prefetch=use_prefetch)
        assert need.weights == slots * (EMBEDDING + 2 * LAYER) * 2


@pytest.mark.parametrize(
    ("category", "changes", "factor"),
    [
        ("messages", {"batch_size": 256}, 2),
        ("working_set", {"batch_size": 256}, 2),
        ("weights", {"dtype": Dtype.FP32}, 2),
        ("gradients", {"dtype": Dtype.FP32}, 1),
        ("inputs", {"dtype": Dtype.FP32}, 2),
        ("inputs", {"num_ranks": 2}, 2),
    ],
)
def test_each_category_grows_with_what_it_depends_on(
    llama_7b: ModelShape, category: str, changes: dict[str, Any], factor: float
) -> None:
    assert getattr(need_of(llama_7b, **changes), category) == factor * getattr(need_of(llama_7b), category)


def test_a_large_vocabulary_makes_the_loss_the_largest_work(small: ModelShape) -> None:
    wide = replace(small, vocab_size=1_000_000)
    need = need_of(wide, num_stages=4, loss_chunk_tokens=100, rank=3, batch_size=4, seq_length=150)

    # 100 tokens' logits and their gradient in bf16; 4 wide: normed states with their gradient, that of a chunk; then
    # the stage's output [150, 4].
    assert need.working_set == 1_000_000 * 100 * 4 + (2 * 150 + 100) * 4 * 2 + 150 * 4 * 2
