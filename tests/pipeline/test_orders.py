"""Neither the order of a step's forwards and backwards nor what stays on the GPU meanwhile changes a bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.pipelines import Pipeline, assert_same_bits, make_batch, make_model, model_of, resident_stages
from harness.runs import assert_equal_tensors, make_checkpoint, steps_of
from harness.small_run import Run, assert_same_bits_of_runs
from harness.tiny_families import tiny_config

from mobius.schedule.plan import RecomputeLevel
from mobius.schedule.spec import ComputeOrder

CASES = {  # number of sum buffers, of resident stages of a rank, whether all stages save activations
    "sums travel": (0, 0, False),
    "three sum buffers, first resident": (3, 1, False),
    "sums stay": (9, 0, False),
    "sums stay, activations saved": (9, 0, True),
    "all but the last resident, activations saved": (9, 9, True),
}
PIPELINES = (
    (1, 1, 4),
    (1, 4, 4),
    (2, 3, 4),
    (2, 1, 4),
    (3, 1, 6),
    (3, 2, 3),
    (4, 2, 4),
)  # ranks, stages of each, microbatches
FORMATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.grid
@pytest.mark.parametrize("half", [0, 1])  # every other pipeline; both halves have some of several stages in a rank
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_depth_first_order_changes_no_bit_of_a_step(family: str, case: str, half: int) -> None:
    """Each case meets each pipeline with one format, and each format in one of the families or the other."""
    num_sum_buffers, num_resident, saves = CASES[case]
    first = sorted(CASES).index(case) + (family == "llama-tied")
    for turn in range(half, len(PIPELINES), 2):
        num_ranks, per_rank, number = PIPELINES[turn]
        model = make_model(family, max(4, num_ranks * per_rank))
        dtype = FORMATS[(first + turn) % len(FORMATS)]
        resident = resident_stages(num_ranks, per_rank, range(min(num_resident, per_rank - 1)))
        batch = make_batch(number)
        level = RecomputeLevel.ELEMENTWISE if turn // 2 % 2 else RecomputeLevel.NONE
        num_slots = per_rank - len(resident) // num_ranks
        sizes = num_ranks, per_rank, number
        expected = Pipeline(model, *sizes, 2, dtype=dtype, recompute_level=level).step(batch)
        for rounds in (1, 2) if number >= 2 * num_ranks else (1,):
            found = Pipeline(
                model,
                *sizes,
                num_slots,
                keeps_graphs=saves,
                recompute_level=level,
                resident=resident,
                dtype=dtype,
                num_rounds=rounds,
                order=ComputeOrder.DEPTH_FIRST,
                num_sum_buffers=num_sum_buffers,
            ).step(batch)
            found = found[0], {name: gradient.to(dtype) for name, gradient in found[1].items()}
            assert_same_bits(found, expected, (sizes, rounds, dtype))
        assert all(gradient.any() for gradient in expected[1].values())


@pytest.mark.grid
@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
@pytest.mark.parametrize("num_sum_buffers", [0, 3, 4])
def test_what_stays_between_rounds_changes_no_bit_of_a_step(num_slots: int, num_sum_buffers: int) -> None:
    model, batch = make_model("llama", 8), make_batch(4)
    expected = Pipeline(model, 2, 4, 4, 2, dtype=torch.bfloat16).step(batch)
    found = Pipeline(
        model,
        *(2, 4, 4, num_slots),
        dtype=torch.bfloat16,
        num_rounds=2,
        num_sum_buffers=num_sum_buffers,
    ).step(batch)
    assert_same_bits((found[0], {name: each.to(torch.bfloat16) for name, each in found[1].items()}), expected)


def test_a_depth_first_order_changes_no_bit_of_a_router_loss() -> None:
    model, batch = model_of(tiny_config("qwen3_moe")), make_batch(4)
    expected = Pipeline(model, 2, 2, 4, 2).step(batch)
    found = Pipeline(model, 2, 2, 4, 2, num_rounds=2, order=ComputeOrder.DEPTH_FIRST).step(batch)
    assert_same_bits(found, expected)


USUAL = "--num_chunks 4 --num_stages 4 --learning_rate 1e-2 --save_params none"
DEPTH_FIRST = ("--compute_order", "depth_first")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("--max_grad_norm 0.5 --num_rounds 2", marks=pytest.mark.extended),
        "--max_grad_norm 0 --num_rounds 4 --resident_stages 1 --no_overlap_optimizer",
        "--dtype bf16 --max_grad_norm 0 --recompute none",
        "--dtype bf16 --fp32_gradients --num_rounds 2 --packing on --recompute elementwise",
        pytest.param("--dtype fp16 --num_rounds 2 --resident_stages 2", marks=pytest.mark.extended),
        "--model_path tied --dtype bf16 --max_grad_norm 0.1 --num_rounds 4 --num_iterations 4",
        "--use_lora --lora_rank 4 --num_rounds 2",
        "--val_size 9 --eval_strategy steps --eval_steps 1 --packing off --num_rounds 2",
    ],
)
def test_a_depth_first_order_changes_no_bit_of_a_run(run: Run, options: str) -> None:
    make_checkpoint(Path("tied"), is_tied=True)
    words = f"{USUAL} {options}".split()
    assert_same_bits_of_runs(run, [*words, *DEPTH_FIRST], [*words, "--compute_order", "breadth_first"])


def test_a_breadth_first_checkpoint_continues_depth_first(run: Run) -> None:
    words = f"{USUAL} --save_steps 2 --num_iterations 4".split()
    run(*words, "--save_dir", "broad", "--save_results", "broad.txt")
    resumed = ["--resume_from_checkpoint", "broad/checkpoint-2", *DEPTH_FIRST, "--num_rounds", "2"]
    run(*words, *resumed, "--save_dir", "deep", "--save_results", "deep.txt")
    assert steps_of(Path("deep"))[-2:] == steps_of(Path("broad"))[-2:]
    assert_equal_tensors(Path("deep"), Path("broad"))
