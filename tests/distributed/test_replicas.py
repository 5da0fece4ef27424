"""Replicas of several processes train what one pipeline does, and continue from one another's checkpoints."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from harness.launched import Launched, ranks_of
from harness.rounding import after_adam, assert_near_after_adam, assert_near_gradients, reordered
from harness.runs import (
    ROOT,
    assert_equal_tensors,
    environment,
    free_port,
    make_checkpoint,
    make_dataset,
    run_main,
    tensors_of,
)
from started_ranks import wait_until
from torch import Tensor

MINUTE = 60.0
SHARE = reordered(12 * 24)  # tokens of a step
OPTIONS = """--model_path model --dataset data.jsonl --fp32 --num_stages 4 --num_chunks 2 --batch_size 12
    --seq_length 24 --num_iterations 6 --learning_rate 2e-3 --warmup_steps 1 --max_grad_norm 0.5 --adam_epsilon 1e-5
    --save_params none --save_steps 2 --save_total_limit 0 --val_size 5 --eval_strategy steps --eval_steps 3"""


def train(folder: Path, name: str, num_ranks: int, *options: str, num_nodes: int = 1) -> None:
    words = [*OPTIONS.split(), "--save_dir", name, "--save_results", f"{name}.txt", *options]
    result = run_main(num_ranks, folder, *words, num_nodes=num_nodes)
    assert result.returncode == 0, result.stdout


def assert_alike(one: Path, other: Path) -> None:
    own_steps, steps = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (other, one)
    )
    all_steps, steps, weights, own = steps, steps[-len(own_steps) :], tensors_of(one), tensors_of(other)
    for key in ("step", "num_tokens", "num_targets", "num_samples", "epoch", "padding"):
        assert [step[key] for step in own_steps] == [step[key] for step in steps], key
    assert [step["loss"] for step in own_steps] == pytest.approx([step["loss"] for step in steps], rel=SHARE)
    before, rates = tensors_of(one.parent / "model"), [step["learning_rate"] for step in all_steps]
    assert_near_after_adam(own, weights, before, rates=rates, share=SHARE)


def moments_of(checkpoint: Path) -> dict[str, Tensor]:
    """Means of gradients, and roots of those of their squares."""
    named = tensors_of(checkpoint).items()
    return {name: value.sqrt() if "exp_avg_sq" in name else value for name, value in named if "exp_avg" in name}


def evaluations(folder: Path) -> dict[int, float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}


def test_a_run_continues_with_another_number_of_replicas(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", is_tied=True)
    make_dataset(tmp_path / "data.jsonl", 40)
    train(tmp_path, "one", 1)
    # Two pipelines of two on one node, then three nodes of one rank.
    train(tmp_path, "two", 4, "--pipeline_ranks", "2", "--resume_from_checkpoint", "one/checkpoint-2")
    resumed = ["--resume_from_checkpoint", "two/checkpoint-4", "--resident_stages", "1"]
    train(tmp_path, "three", 3, *resumed, num_nodes=3)
    assert_alike(tmp_path / "one", tmp_path / "two")
    assert_alike(tmp_path / "one", tmp_path / "three")
    assert evaluations(tmp_path / "two") == pytest.approx(evaluations(tmp_path / "one"), rel=SHARE)
    ours, theirs = (tmp_path / name / "checkpoint-4" for name in ("one", "two"))
    assert sorted(file.name for file in ours.iterdir()) == sorted(file.name for file in theirs.iterdir())
    assert_near_gradients(*map(moments_of, (theirs, ours)), share=after_adam(SHARE))


def launchers(folder: Path, *options: str, max_restarts: int) -> list[Launched]:
    """A launcher on each of two nodes, which are one machine."""
    meeting = ["--nnodes", "2", "--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--nproc_per_node", "1"]
    program = [str(ROOT / "main.py"), "--device", "cpu", *OPTIONS.split(), "--overwrite_output_dir", *options]
    restarts = ["--max_restarts", str(max_restarts)]
    return [
        Launched(
            [*meeting, "--node_rank", str(node), *restarts, *program],
            folder,
            environment(folder / "cache"),
            forks_ranks=True,
        )
        for node in range(2)
    ]


def test_all_nodes_end_with_a_rank_and_a_restart_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl", 40)
    once = ["--save_steps", "10", "--eval_steps", "10"]
    train(tmp_path, "undisturbed", 2, "--num_iterations", "10", *once, num_nodes=2)
    save = ["--num_iterations", "10", "--save_dir", "out", "--save_results", "out.txt"]
    nodes = launchers(tmp_path, *save, max_restarts=1)
    try:
        first = tmp_path / "out" / "checkpoint-2"
        assert wait_until(lambda: first.exists() or any(node.poll() is not None for node in nodes), seconds=300)
        os.kill(ranks_of(nodes[1].pid)[1], signal.SIGKILL)
        codes = [node.wait(300) for node in nodes]
        told = "".join(node.output() for node in nodes)
        assert codes == [0, 0], told
        assert "resumed from out/checkpoint-" in told
        assert_equal_tensors(tmp_path / "undisturbed", tmp_path / "out")
    finally:
        for node in nodes:
            node.kill()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_lost_ends_the_others_within_a_minute(tmp_path: Path, lost: int) -> None:
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl", 40)
    save = ["--num_iterations", "100000", "--save_dir", "out", "--save_results", "out.txt"]
    nodes = launchers(tmp_path, *save, max_restarts=0)
    try:
        assert wait_until((tmp_path / "out" / "checkpoint-2").exists, seconds=300), nodes[0].output()
        nodes[lost].kill()
        left = nodes[1 - lost]
        start = time.monotonic()
        assert left.wait(MINUTE) == 1
        assert time.monotonic() - start < MINUTE
        assert f"rank {1 - lost} stops: it lost" in left.output()
        assert not (tmp_path / "out" / "config.json").exists()
    finally:
        for node in nodes:
            node.kill()
