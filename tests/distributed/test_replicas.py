"""Processes of several nodes train as one pipeline does, and go on from one another's checkpoints."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from harness.launched import Launched, ranks_of
from harness.runs import ROOT, environment, free_port, make_checkpoint, make_dataset, run_main
from safetensors.torch import load_file
from started_ranks import wait_until
from torch import Tensor

MINUTE = 60.0
OPTIONS = """--model_path model --dataset data.jsonl --fp32 --num_stages 4 --num_chunks 2 --batch_size 12
    --seq_length 24 --num_iterations 6 --learning_rate 2e-3 --warmup_steps 1 --max_grad_norm 0.5 --adam_epsilon 1e-5
    --save_params none --save_steps 2 --save_total_limit 0 --val_size 5 --eval_strategy steps --eval_steps 3"""


def train(folder: Path, name: str, num_ranks: int, *options: str, num_nodes: int = 1) -> None:
    words = [*OPTIONS.split(), "--save_dir", name, "--save_results", f"{name}.txt", *options]
    result = run_main(num_ranks, folder, *words, num_nodes=num_nodes)
    assert result.returncode == 0, result.stdout


def left_by(folder: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    weights = [load_file(path) for path in sorted(folder.glob("model*.safetensors"))]
    return [json.loads(line) for line in lines], {name: value for part in weights for name, value in part.items()}


def assert_alike(one: Path, other: Path) -> None:
    (steps, weights), (own_steps, own) = left_by(one), left_by(other)
    steps = steps[-len(own_steps) :]
    for key in ("step", "num_tokens", "num_targets", "num_samples", "epoch", "padding"):
        assert [step[key] for step in own_steps] == [step[key] for step in steps], key
    assert [step["loss"] for step in own_steps] == pytest.approx([step["loss"] for step in steps], rel=1e-5)
    assert own.keys() == weights.keys()
    for name, value in weights.items():
        assert (own[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


def evaluations(folder: Path) -> dict[int, float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}


def test_a_run_goes_on_with_another_number_of_replicas(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", is_tied=True)
    make_dataset(tmp_path / "data.jsonl", 40)
    train(tmp_path, "one", 1)
    # Two pipelines of two on one node, then three nodes of one rank.
    train(tmp_path, "two", 4, "--pipeline_ranks", "2", "--resume_from_checkpoint", "one/checkpoint-2")
    resumed = ["--resume_from_checkpoint", "two/checkpoint-4", "--resident_stages", "1"]
    train(tmp_path, "three", 3, *resumed, num_nodes=3)
    assert_alike(tmp_path / "one", tmp_path / "two")
    assert_alike(tmp_path / "one", tmp_path / "three")
    assert evaluations(tmp_path / "two") == pytest.approx(evaluations(tmp_path / "one"), rel=1e-5)
    ours, theirs = (tmp_path / name / "checkpoint-4" for name in ("one", "two"))
    states = [{file.name: load_file(file) for file in sorted(each.glob("*.safetensors"))} for each in (ours, theirs)]
    assert states[0].keys() == states[1].keys()
    for file, tensors in states[0].items():
        assert tensors.keys() == states[1][file].keys(), file
        for key, value in tensors.items():
            assert (states[1][file][key] - value).abs().max() <= 1e-4 * value.abs().max(), key


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
    train(tmp_path, "undisturbed", 2, "--num_iterations", "30", num_nodes=2)
    save = ["--num_iterations", "30", "--save_dir", "out", "--save_results", "out.txt"]
    nodes = launchers(tmp_path, *save, max_restarts=1)
    try:
        first = tmp_path / "out" / "checkpoint-4"
        assert wait_until(lambda: first.exists() or any(node.poll() is not None for node in nodes), seconds=300)
        os.kill(ranks_of(nodes[1].pid)[1], signal.SIGKILL)
        codes = [node.wait(300) for node in nodes]
        told = "".join(node.output() for node in nodes)
        assert codes == [0, 0], told
        assert "resumed from out/checkpoint-" in told
        (_, weights), (_, own) = left_by(tmp_path / "undisturbed"), left_by(tmp_path / "out")
        assert all(own[name].equal(value) for name, value in weights.items())
    finally:
        for node in nodes:
            node.kill()


def test_a_node_that_is_lost_ends_the_others_within_a_minute(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl", 40)
    save = ["--num_iterations", "100000", "--save_dir", "out", "--save_results", "out.txt"]
    nodes = launchers(tmp_path, *save, max_restarts=0)
    try:
        assert wait_until((tmp_path / "out" / "checkpoint-2").exists, seconds=300), nodes[0].output()
        nodes[1].kill()
        start = time.monotonic()
        assert nodes[0].wait(MINUTE) == 1
        assert time.monotonic() - start < MINUTE
        assert "rank 0 stops: it lost another rank" in nodes[0].output()
    finally:
        for node in nodes:
            node.kill()
