"""Gradient accumulation rounds change no bit: of a step, of whole runs, and of a run that is resumed in rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.local_transport import LocalTransport
from harness.pipelines import Pipeline, assert_same_bits, make_batch, make_model, resident_stages
from harness.runs import assert_equal_tensors, evaluations_of, make_checkpoint, steps_of
from harness.sessions import evaluator_of, in_sessions, random_samples
from harness.small_run import Run, assert_same_bits_of_runs

from mobius.data.batches import TrainingBatches
from mobius.limits import max_sends_in_flight
from mobius.training.session import Session

CASES = {  # number of slots, whether resident and last stages save everything, places of the resident stages of a rank
    "resident": (None, False, ()),
    "resident, everything saved": (None, True, ()),
    "streamed": (1, False, ()),
    "streamed, prefetched": (2, False, ()),
    "streamed, three slots, everything saved at last": (3, True, ()),
    "first resident": (2, False, (0,)),
    "all but one resident, everything saved": (1, True, (0, 1)),
}
PIPELINES = (  # ranks, stages of each, microbatches, numbers of rounds
    (1, 3, 4, (2, 4)),
    (2, 1, 4, (4,)),
    (4, 2, 6, (3,)),
    (2, 3, 4, (2,)),
)
FORMATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.grid
@pytest.mark.parametrize("half", [0, 1])  # every other pipeline; in both halves is one of three stages in a rank
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_rounds_change_no_bit_of_a_step(family: str, case: str, half: int) -> None:
    """Each case meets each pipeline with one format, and each format in one of the families or the other."""
    num_slots, saves_all, places = CASES[case]
    first = sorted(CASES).index(case) + (family == "llama-tied")
    for turn in range(half, len(PIPELINES), 2):
        num_ranks, stages_per_rank, number, some_rounds = PIPELINES[turn]
        dtype = FORMATS[(first + turn) % len(FORMATS)]
        model = make_model(family, num_ranks * stages_per_rank + 1)  # two layers in a stage, one in the others
        batch = make_batch(number)
        sizes = num_ranks, stages_per_rank, number, num_slots, saves_all
        resident = resident_stages(num_ranks, stages_per_rank, places)
        steps = {}
        for rounds in (1, *some_rounds):
            pipeline = Pipeline(model, *sizes, resident=resident, dtype=dtype, num_rounds=rounds)
            loss, gradients = pipeline.step(batch)
            steps[rounds] = loss, {name: gradient.to(dtype) for name, gradient in gradients.items()}
            assert_same_bits(steps[rounds], steps[1], (sizes, rounds, dtype))
        assert all(gradient.any() for gradient in steps[1][1].values())


USUAL = "--num_chunks 4 --num_stages 4 --learning_rate 1e-2 --save_params none"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("--max_grad_norm 0.5 --num_rounds 2", marks=pytest.mark.extended),
        pytest.param("--max_grad_norm 0 --num_rounds 4 --resident_stages 1", marks=pytest.mark.extended),
        "--max_grad_norm 0 --num_rounds 4 --no_overlap_optimizer --no_prefetch",
        pytest.param("--dtype bf16 --max_grad_norm 0 --num_rounds 2 --no_offload", marks=pytest.mark.extended),
        "--dtype fp16 --num_rounds 2 --resident_stages 2",
        "--dtype bf16 --fp32_gradients --num_rounds 2 --packing on",
        "--model_path tied --dtype bf16 --max_grad_norm 0 --num_rounds 2 --num_iterations 4 --no_offload",
        "--model_path tied --dtype bf16 --max_grad_norm 0.1 --num_rounds 4 --num_iterations 4 --resident_stages 1",
    ],
)
def test_rounds_change_no_bit_of_a_run(run: Run, options: str) -> None:
    make_checkpoint(Path("tied"), is_tied=True)
    words = f"{USUAL} {options}".split()
    place = words.index("--num_rounds")
    assert_same_bits_of_runs(run, words, [*words[:place], *words[place + 2 :]])


def test_a_checkpoint_of_a_run_at_once_continues_in_rounds(run: Run) -> None:
    words = f"{USUAL} --save_steps 2 --num_iterations 4".split()
    run(*words, "--save_dir", "once", "--save_results", "once.txt")
    resumed = ["--resume_from_checkpoint", "once/checkpoint-2", "--num_rounds", "4", "--save_dir", "rounds"]
    run(*words, *resumed, "--save_results", "rounds.txt")
    assert steps_of(Path("rounds"))[-2:] == steps_of(Path("once"))[-2:]
    assert_equal_tensors(Path("rounds"), Path("once"))


def test_rounds_change_no_evaluation(run: Run) -> None:
    words = f"{USUAL} --val_size 9 --eval_strategy steps --eval_steps 1 --packing off".split()
    assert_same_bits_of_runs(run, [*words, "--num_rounds", "4"], words)
    assert len(evaluations_of(Path("one"))) == 3


def test_a_rank_holds_no_more_messages_than_its_rounds_and_evaluations_are_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[int] = []
    monkeypatch.setattr(
        LocalTransport, "limit_pending_sends", lambda self, most: bounds.append(most) if self.rank == 0 else None
    )
    make_checkpoint(tmp_path, num_layers=4)
    options = """--num_stages 4 --num_chunks 8 --num_rounds 4 --batch_size 8 --seq_length 32 --packing off --fp32
        --no_offload"""

    def evaluate(session: Session, _: TrainingBatches) -> None:
        evaluator_of(session, random_samples(40, 20)).evaluate()

    in_sessions(2, tmp_path, options, random_samples(64, 20), evaluate)
    # A round has two microbatches; a pass as many as one of them and its inputs of the one layer that waits on rank 1.
    assert bounds == [max_sends_in_flight(number) for number in (2, 4, 2)]
