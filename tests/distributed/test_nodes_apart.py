"""Nodes that do not reach each other, or have folders of their own: told by name, and ended where that must be."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from harness.forked import Ranks
from harness.launched import Launched
from harness.runs import environment, free_port, make_checkpoint, make_dataset

OPTIONS = """--device cpu --fp32 --model_path model --dataset data.jsonl --num_stages 4 --num_chunks 1 --batch_size 4
    --seq_length 24 --num_iterations 4 --save_steps 2 --save_params none --save_dir saved --save_results report.txt"""
OWN_FOLDER = """
import os
if os.environ["RANK"] == "1":
    os.chdir("node1")
import mobius.training.file_checks as same_files
same_files._SIGHT_SECONDS = 0.2
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of two nodes of one rank, the second of which has a folder of its own."""
    arguments = [OWN_FOLDER, *OPTIONS.split(), *options]
    variables = environment(folder / "cache")
    ranks = Ranks(
        "harness.late_ranks",
        "faulty_main",
        arguments,
        num_ranks=2,
        num_nodes=2,
        folder=folder,
        environment=variables,
    )
    return ranks.wait(), ranks.output()


def test_nodes_with_folders_of_their_own_train_and_go_on_from_copies(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl")
    shutil.copytree(tmp_path / "model", tmp_path / "node1" / "model")
    shutil.copy(tmp_path / "data.jsonl", tmp_path / "node1")
    code, output = run(tmp_path)
    assert code == 0, output
    assert f"--save_dir saved: {tmp_path}/saved of rank 0 (" in output
    assert output.count(f") is not {tmp_path}/node1/saved of rank 1 (") == 1
    assert {path.name for path in (tmp_path / "node1").iterdir()} == {"model", "data.jsonl"}

    resume = ["--resume_from_checkpoint", "saved/checkpoint-2", "--num_iterations", "6"]
    resume += ["--resume_changes", "num_iterations"]
    code, output = run(tmp_path, *resume)
    assert code == 1
    assert "the checkpoint that the run goes on from differs" in output
    assert "none that can be read (" in output

    # The first node has saved more than the other has a copy of: saves are counted alike all the same.
    shutil.copytree(tmp_path / "saved" / "checkpoint-2", tmp_path / "node1" / "saved" / "checkpoint-2")
    code, output = run(tmp_path, *resume)
    assert code == 0, output
    assert "checkpoint saved: saved/checkpoint-6" in output.replace(f"{tmp_path}/", ""), output


def test_a_node_without_the_model_ends_the_others_at_once_with_its_reason(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl")
    (tmp_path / "node1").mkdir()
    begin = time.monotonic()
    code, output = run(tmp_path)
    assert code == 1
    assert "rank 0 stops: rank 1 (" in output
    assert f") has ended: --model_path model: not found. Looked for a folder {tmp_path}/node1/model" in output
    assert time.monotonic() - begin < 60


def test_a_node_that_nobody_meets_says_where_it_waited_and_for_how_long(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    meeting = ["--nnodes", "2", "--rdzv_endpoint", endpoint, "--nproc_per_node", "1", "--rdzv_conf", "timeout=1"]
    nodes = [
        Launched([*meeting, "--node_rank", "1", "main.py"], tmp_path, environment(tmp_path / "cache")),
        Launched(
            [*meeting[:3], f"127.0.0.1:{free_port()}", *meeting[4:], "--node_rank", "0", "main.py"],
            tmp_path,
            environment(tmp_path / "cache"),
        ),
    ]
    assert [node.wait(60) for node in nodes] == [1, 1]
    alone, waits = (node.output() for node in nodes)
    assert f"has waited 1 s for node 0 at --rdzv_endpoint {endpoint}: connection refused" in alone
    assert "has waited 1 s for node(s) 1 of 2 (there are 0 (" in waits
    assert not any("Traceback" in text or "frame #" in text for text in (alone, waits))
