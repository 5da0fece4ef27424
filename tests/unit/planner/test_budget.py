"""The bytes that a run needs, by hand for Llama-2-7B, and what a user is told when they are not there."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from mobius.config import Dtype
from mobius.errors import GpuMemoryError, HostMemoryError
from mobius.planner.budget import GIB, ByteSizes, GpuNeed, check_gpu_memory, check_host_memory, gpu_need
from mobius.planner.partition import balanced_partition
from mobius.planner.shape import ModelShape

BF16, FP16, FP32 = (ByteSizes.of(dtype) for dtype in (Dtype.BF16, Dtype.FP16, Dtype.FP32))
LAYER = 202_383_360  # of Llama-2-7B
EMBEDDING = 131_072_000
HEAD = 131_076_096
# Four ranks with two stages of four layers each, two slots, 128 sequences of 512 tokens in 4 microbatches.
NODE: dict[str, Any] = {
    "num_ranks": 4,
    "num_slots": 2,
    "batch_tokens": 128 * 512,
    "microbatch_tokens": 32 * 512,
    "loss_chunk_tokens": 2048,
}


def need_of(shape: ModelShape, *, num_stages: int = 8, sizes: ByteSizes = BF16, **changes: Any) -> GpuNeed:
    return gpu_need(balanced_partition(shape.num_layers, num_stages), shape, sizes, **(NODE | changes))


def test_a_parameter_takes_14_bytes_of_host_memory_in_bf16_and_16_in_fp16_and_fp32() -> None:
    # bf16: weight 2, gradient 2, remainder 2, moments 8. fp16: a whole master of 4. fp32: weight and master in one 4.
    assert BF16.host == 2 + 2 + 2 + 8
    assert FP16.host == 2 + 2 + 4 + 8
    assert FP32.host == 4 + 4 + 8


def test_gradients_that_travel_in_fp32_take_two_bytes_more_of_host_memory_and_none_of_the_gpu() -> None:
    for dtype, num_bytes in ((Dtype.BF16, 16), (Dtype.FP16, 18), (Dtype.FP32, 16)):
        sizes = ByteSizes.of(dtype, has_fp32_gradients=True)
        assert sizes.host == num_bytes
        assert sizes.resident == ByteSizes.of(dtype).resident


def test_a_resident_parameter_takes_18_bytes_of_gpu_memory_in_bf16_and_16_in_fp32() -> None:
    # Gradients stay in fp32 there: bf16 weight 2, gradient 4, master 4, moments 8.
    assert BF16.resident == FP16.resident == 2 + 4 + 4 + 8
    assert FP32.resident == 4 + 4 + 8


def test_llama_7b_on_four_ranks_needs_its_parameters_and_a_gib_per_process(llama_7b: ModelShape) -> None:
    need = check_host_memory(
        balanced_partition(32, 8),
        llama_7b,
        bytes_per_parameter=14,
        process_bytes=GIB,
        num_ranks=4,
        available_bytes=500 * GIB,
    )

    assert need == 6_738_415_616 * 14 + 4 * 2**30


def test_exactly_enough_host_memory_is_enough_and_a_byte_less_is_not(llama_7b: ModelShape) -> None:
    spans, need = balanced_partition(32, 8), 6_738_415_616 * 14 + 4 * 2**30

    assert (
        check_host_memory(spans, llama_7b, bytes_per_parameter=14, process_bytes=GIB, num_ranks=4, available_bytes=need)
        == need
    )
    with pytest.raises(HostMemoryError):
        check_host_memory(
            spans, llama_7b, bytes_per_parameter=14, process_bytes=GIB, num_ranks=4, available_bytes=need - 1
        )


def test_too_little_host_memory_is_told_with_the_arithmetic_and_a_way_out(llama_7b: ModelShape) -> None:
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory(
            balanced_partition(32, 8),
            llama_7b,
            bytes_per_parameter=14,
            process_bytes=GIB,
            num_ranks=4,
            available_bytes=80 * GIB,
        )

    message = str(caught.value)
    # 98,632,785,920 bytes are 91.86 GiB.
    assert "4 rank(s) need 91.9 GiB of host memory" in message
    assert "(6.74e+09 parameters x 14 bytes + 4 x 1.0 GiB for the processes)" in message
    assert "80.0 GiB is available" in message
    assert "--host_memory_limit" in message


def test_a_tied_matrix_is_budgeted_twice_because_both_ends_hold_it(small: ModelShape) -> None:
    need = check_host_memory(
        balanced_partition(5, 2), small, bytes_per_parameter=14, process_bytes=GIB, num_ranks=1, available_bytes=2 * GIB
    )

    assert need == (240 + 500 + 244) * 14 + GIB


def test_streamed_llama_7b_by_hand(llama_7b: ModelShape) -> None:
    stage = 4 * LAYER + HEAD  # the last stage is the largest, so its rank is the fullest

    need = need_of(llama_7b)
    assert need == GpuNeed(
        rank=3,
        weights=2 * stage * 2,  # two slots
        gradients=stage * 4,  # one fp32 buffer
        optimizer=0,
        stash=2 * 4 * (128 * 512) * 4096 * 2,  # the inputs of eight layers
        working_set=(32 * 512) * (8 * 4096 + 5 * 11008) * 2,
    )
    assert need.total == 14_697_136_128


def test_resident_llama_7b_by_hand(llama_7b: ModelShape) -> None:
    held = 8 * LAYER + HEAD

    need = need_of(llama_7b, num_slots=None)

    assert (need.rank, need.weights, need.gradients, need.optimizer) == (3, held * 2, held * 4, held * 12)
    assert need.weights + need.gradients + need.optimizer == held * BF16.resident


def test_with_one_stage_per_rank_a_second_slot_takes_nothing(llama_7b: ModelShape) -> None:
    assert need_of(llama_7b, num_stages=4) == need_of(llama_7b, num_stages=4, num_slots=1)
    assert need_of(llama_7b, num_stages=4).weights == (8 * LAYER + HEAD) * 2


@pytest.mark.parametrize(
    ("category", "changes", "factor"),
    [
        ("stash", {"batch_tokens": 2 * NODE["batch_tokens"]}, 2),
        ("working_set", {"microbatch_tokens": 2 * NODE["microbatch_tokens"]}, 2),
        ("weights", {"num_slots": 1}, 0.5),
        ("weights", {"sizes": FP32}, 2),
        ("gradients", {"sizes": FP32}, 1),
        ("stash", {"sizes": FP32}, 2),
        ("stash", {"num_ranks": 2}, 2),
    ],
)
def test_each_category_grows_with_what_it_depends_on(
    llama_7b: ModelShape, category: str, changes: dict[str, Any], factor: float
) -> None:
    assert getattr(need_of(llama_7b, **changes), category) == factor * getattr(need_of(llama_7b), category)


def test_smaller_stages_need_less(llama_7b: ModelShape) -> None:
    totals = [need_of(llama_7b, num_stages=num_stages).total for num_stages in (4, 8, 16, 32)]

    assert all(larger > smaller for larger, smaller in pairwise(totals))


def test_a_large_vocabulary_makes_the_loss_the_largest_work(small: ModelShape) -> None:
    wide = replace(small, vocab_size=1_000_000)
    need = need_of(wide, num_stages=4, loss_chunk_tokens=100, microbatch_tokens=150)

    # 100 tokens: bf16 logits, fp32 logits and their gradient; and the head's gradient [V, 4] in bf16.
    assert need.working_set == 1_000_000 * (100 * (2 + 4 + 4) + 4 * 2)
    assert need.rank == 3


def test_a_microbatch_smaller_than_the_loss_chunk_bounds_the_logits(small: ModelShape) -> None:
    wide = replace(small, vocab_size=1_000_000)
    need = need_of(wide, num_stages=4, loss_chunk_tokens=4096, microbatch_tokens=50)

    assert need.working_set == 1_000_000 * (50 * (2 + 4 + 4) + 4 * 2)


GIBS = GpuNeed(rank=2, weights=2 * GIB, gradients=3 * GIB, optimizer=0, stash=4 * GIB, working_set=GIB // 2)


def test_exactly_enough_gpu_memory_is_enough_and_a_byte_less_is_not() -> None:
    check_gpu_memory(GIBS, available_bytes=9 * GIB + GIB // 2, is_offloading=True)

    with pytest.raises(GpuMemoryError):
        check_gpu_memory(GIBS, available_bytes=9 * GIB + GIB // 2 - 1, is_offloading=True)


@pytest.mark.parametrize(("is_offloading", "advice"), [(True, "raise --num_stages"), (False, "use --use_offload")])
def test_too_little_gpu_memory_is_told_with_the_sum_and_what_to_change(is_offloading: bool, advice: str) -> None:
    with pytest.raises(GpuMemoryError) as caught:
        check_gpu_memory(GIBS, available_bytes=8 * GIB, is_offloading=is_offloading)

    message = str(caught.value)
    assert "rank 2 needs at least 9.5 GiB of GPU memory" in message
    assert (
        "weights 2.00 + gradients 3.00 + optimizer 0.00 + stashed activations 4.00 + one layer's work 0.50 = 9.50 GiB"
        in message
    )
    assert "8.0 GiB is available" in message
    assert f"To fit: {advice}" in message
    assert "--num_chunks" in message
    assert "--batch_size" in message
