"""Whole runs in rounds are, to the bit, the runs that play each step at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness.local_transport import LocalTransport
from harness.runs import make_checkpoint
from harness.sessions import evaluator_of, in_sessions, random_samples
from safetensors.torch import load_file

from mobius.data.batches import TrainingBatches
from mobius.limits import max_sends_in_flight
from mobius.training.session import Session

Run = Callable[..., None]

USUAL = "--num_chunks 4 --num_stages 4 --learning_rate 1e-2 --save_params none"


def left_by(folder: Path) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [(step["loss"], step["grad_norm"]) for step in map(json.loads, lines)]
    weights = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return steps, {name: value for part in weights for name, value in part.items()}


def assert_equal(one: Path, other: Path) -> None:
    (steps, weights), (own_steps, own) = left_by(one), left_by(other)
    assert own_steps == steps
    assert own.keys() == weights.keys()
    assert all(torch.equal(own[name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    "options",
    [
        "--max_grad_norm 0.5 --num_rounds 2",
        pytest.param("--max_grad_norm 0 --num_rounds 4 --resident_stages 1", marks=pytest.mark.extended),
        "--max_grad_norm 0 --num_rounds 4 --no_overlap_optimizer --no_prefetch",
        pytest.param("--dtype bf16 --max_grad_norm 0 --num_rounds 2 --no_offload", marks=pytest.mark.extended),
        "--dtype fp16 --num_rounds 2 --resident_stages 2",
        "--dtype bf16 --fp32_gradients --num_rounds 2 --packing on",
        "--model_path tied --dtype bf16 --max_grad_norm 0 --num_rounds 2 --num_iterations 4 --no_offload",
        "--model_path tied --dtype bf16 --max_grad_norm 0.1 --num_rounds 4 --num_iterations 4 --resident_stages 1",
    ],
)
def test_a_run_in_rounds_is_the_run_at_once(run: Run, options: str) -> None:
    make_checkpoint(Path("tied"), is_tied=True)
    words = f"{USUAL} {options}".split()
    place = words.index("--num_rounds")
    run(*words, "--save_dir", "rounds", "--save_results", "rounds.txt")
    run(*words[:place], *words[place + 2 :], "--save_dir", "once", "--save_results", "once.txt")
    assert_equal(Path("once"), Path("rounds"))


def test_a_checkpoint_of_a_run_at_once_goes_on_in_rounds(run: Run) -> None:
    words = f"{USUAL} --save_steps 2".split()
    run(*words, "--num_iterations", "4", "--save_dir", "once", "--save_results", "once.txt")
    resumed = ["--resume_from_checkpoint", "once/checkpoint-2", "--num_rounds", "4", "--save_dir", "rounds"]
    run(*words, "--num_iterations", "4", *resumed, "--save_results", "rounds.txt")
    (steps, weights), (own_steps, own) = left_by(Path("once")), left_by(Path("rounds"))
    assert own_steps[-2:] == steps[-2:]
    assert all(torch.equal(own[name], value) for name, value in weights.items())


def test_evaluations_beside_rounds_hold_no_more_than_a_round_and_say_the_same(run: Run) -> None:
    words = f"{USUAL} --val_size 9 --eval_strategy steps --eval_steps 1 --packing off".split()
    run(*words, "--num_rounds", "4", "--save_dir", "rounds", "--save_results", "rounds.txt")
    run(*words, "--save_dir", "once", "--save_results", "once.txt")

    def told(folder: str) -> list[tuple[float, float]]:
        history = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
        return [(entry["eval_loss"], entry["eval_token_accuracy"]) for entry in history if "eval_loss" in entry]

    assert len(told("rounds")) == 3
    assert told("rounds") == told("once")


def test_a_rank_keeps_no_more_messages_than_its_rounds_and_evaluations_are_planned_with(
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
