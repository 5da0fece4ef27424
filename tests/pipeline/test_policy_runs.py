"""Runs on files of rollouts: scores of tokens before step 1, first ratios, mismatch, evaluation and resuming."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from harness.runs import assert_equal_tensors
from harness.small_run import Run, run, saved_inputs, workplace  # noqa: F401
from transformers import AutoModelForCausalLM

from mobius.errors import CheckpointError, DataError
from mobius.training.reference import REFERENCE_FILE

AWAY = 0.125
"""Distance of the sampler's log-probabilities from the model's."""
ARGUMENTS = """--objective policy --seq_length 32 --num_iterations 4 --batch_size 4 --num_chunks 2 --learning_rate 0.01
    --save_params none --save_results auto"""
SHARED = ARGUMENTS.split()


@pytest.fixture
def rollouts(workplace: Path) -> Path:  # noqa: F811
    """Six groups of four rollouts with the log-probabilities of the plain model, `AWAY` below them."""
    model, generator = AutoModelForCausalLM.from_pretrained("model"), torch.Generator().manual_seed(1)
    path = workplace / "rollouts.jsonl"
    with path.open("w") as file:
        for number in range(24):
            prompt = [5 + number // 4, 7, 9]
            completion = torch.randint(10, 4000, (2 + number % 7,), generator=generator).tolist()
            logits = (
                model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            )
            logps = logits.gather(-1, torch.tensor(completion).unsqueeze(-1)).squeeze(-1)
            record = {"prompt_ids": prompt, "completion_ids": completion, "reward": math.sin(number)}
            file.write(json.dumps({**record, "logprobs": (logps - AWAY).tolist()}) + "\n")
    return path


def steps(folder: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_rollouts_starts_at_ratio_1_and_logs_the_mismatch(run: Run, rollouts: Path) -> None:  # noqa: F811
    run(*SHARED, "--dataset", str(rollouts), "--save_dir", "whole", "--save_strategy", "steps", "--save_steps", "2")
    first, *_, last = steps("whole")
    assert (first["ratio"], first["kl"], first["clip_ratio/low_mean"], first["clip_ratio/high_mean"]) == (1, 0, 0, 0)
    assert first["sampling/sampling_logp_difference/mean"] == pytest.approx(AWAY, abs=1e-5)
    assert first["sampling/importance_sampling_ratio/mean"] == pytest.approx(math.exp(AWAY), abs=1e-5)
    assert first["sampling/kl"] == pytest.approx(math.exp(AWAY) - AWAY - 1, abs=1e-5)
    assert last["kl"] > 1e-4
    assert last["ratio"] != 1
    # Other programs read every file of weights in the folder.
    assert {path.name for path in Path("whole").glob("*.safetensors")} == {"model.safetensors"}

    shutil.copytree("whole", "uninterrupted")
    run("--resume_from_checkpoint", "whole/checkpoint-2", *SHARED, "--dataset", str(rollouts), "--save_dir", "whole")
    assert_equal_tensors(Path("whole"), Path("uninterrupted"))


@pytest.mark.parametrize(
    "further",
    [
        "--packing off",
        "--num_chunks 4 --num_stages 4",
        "--dtype bf16 --policy_loss grpo",
        "--policy_loss gspo --recompute full",
    ],
)
def test_the_first_ratio_is_1_in_other_layouts(run: Run, rollouts: Path, further: str) -> None:  # noqa: F811
    run(*SHARED, "--dataset", str(rollouts), "--num_iterations", "2", *further.split())
    assert [steps("out")[0][name] for name in ("ratio", "kl")] == [1, 0]


def test_a_run_of_one_step_needs_no_scores(run: Run, rollouts: Path) -> None:  # noqa: F811
    for name, length in (("one", "1"), ("two", "2")):
        further = ("--num_iterations", length, "--lr_scheduler_type", "constant")
        run(*SHARED, "--dataset", str(rollouts), "--save_dir", name, *further, "--warmup_steps", "0")
    assert not Path("one", REFERENCE_FILE).exists()
    one, two = steps("one")[0], steps("two")[0]
    names = ("loss", "grad_norm", "ratio", "sampling/kl", "reward_std")
    assert [one[name] for name in names] == [two[name] for name in names]


def test_rollouts_are_evaluated_with_scores_of_their_own(run: Run, rollouts: Path) -> None:  # noqa: F811
    run(*SHARED, "--dataset", str(rollouts), "--val_size", "8", "--eval_on_start", "--eval_strategy", "epoch")
    history = json.loads(Path("out/trainer_state.json").read_text())["log_history"]
    before, *_, after = (entry for entry in history if "eval_loss" in entry)
    assert (before["eval_ratio"], before["eval_kl"]) == (1, 0)
    assert after["eval_kl"] > 0
    assert before["eval_reward"] == after["eval_reward"]


def test_a_run_that_loses_its_scores_is_refused(run: Run, rollouts: Path) -> None:  # noqa: F811
    run(*SHARED, "--dataset", str(rollouts), "--save_strategy", "steps", "--save_steps", "2")
    Path("out", REFERENCE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"log-probabilities before step 1 cannot be read"):
        run("--resume_from_checkpoint", "out/checkpoint-2", *SHARED, "--dataset", str(rollouts))


def test_equal_completions_are_no_repeats(run: Run, workplace: Path, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    """A policy that is sure of its answer samples it again and again."""
    records = [{"prompt": "Say a.", "completion": text, "reward": float(text == "a")} for text in "aaab" * 4]
    Path("equal.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run(*SHARED, "--dataset", "equal.jsonl", "--num_iterations", "1", "--batch_size", "2")
    assert "repeat an earlier one" not in caplog.text
    Path("same.jsonl").write_text(Path("equal.jsonl").read_text().replace("1.0", "0.0"))
    with pytest.raises(DataError, match="every rollout has the advantage 0"):
        run(*SHARED, "--dataset", "same.jsonl", "--num_iterations", "1", "--batch_size", "2", "--save_dir", "no")
