"""Ctrl-C ends a run at once with one line; nothing that belongs to a run outlives who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS
from harness.runs import command, environment, make_checkpoint, make_dataset
from launch import free_port

ROOT = Path(__file__).parents[2]
OPTIONS = """--model_path model --dataset data.jsonl --fp32 --num_stages 4 --num_chunks 2 --batch_size 4 --seq_length 16
    --num_iterations 100000 --save_dir out"""
ENDLESS = OPTIONS.split()


def heed_ctrl_c() -> None:
    """The tests may run in the background of a script, where programs ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(words: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A program with a process group of its own, as in a terminal; what is left of it is killed in the end."""
    process = subprocess.Popen(
        words,
        cwd=folder,
        env={**environment(folder / "cache"), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_until(process: subprocess.Popen[str], start: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith(start):
            return
    pytest.fail("".join(seen))


def lines_after(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate(timeout=HANG_SECONDS)
    return [line for line in output.splitlines() if line and not line.startswith("step ")]


def children(process: int) -> list[int]:
    """Processes that a process or one of its threads has started, without its helper that removes semaphores."""
    found = [
        int(child) for file in Path(f"/proc/{process}/task").glob("*/children") for child in file.read_text().split()
    ]
    return [
        child for child in found if "multiprocessing.resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text()
    ]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_ctrl_c_on_train_sh_in_a_step_leaves_one_line_on_the_screen(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl")
    torchrun = [sys.executable, str(ROOT / "scripts" / "run_ranks.py"), "--nproc_per_node", "2"]
    words = [*torchrun, "--master_port", str(free_port()), str(ROOT / "main.py"), "--device", "cpu", *ENDLESS]
    with started(words, tmp_path) as process:
        read_until(process, "step      3/100000")
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.killpg(process.pid, signal.SIGINT)
        (line,) = lines_after(process)

    assert line.startswith("interrupted (SIGINT) after step ")
    assert "of 100000: what was trained is lost" in line
    assert f"{tmp_path / 'out.partial' / 'metrics.jsonl'}" in line
    assert process.returncode == 130
    assert not any(is_alive(rank) for rank in ranks)
    assert (tmp_path / "out.partial" / "metrics.jsonl").read_text().count("\n") >= 3
    assert not (tmp_path / "out").exists()


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl")
    with started(command(2, ENDLESS), tmp_path) as process:
        read_until(process, "dataset loaded")
        ranks = children(process.pid)
        assert len(ranks) == 2
        process.kill()
        try:
            assert wait_for(lambda: not any(is_alive(rank) for rank in ranks))
        finally:
            for rank in filter(is_alive, ranks):
                os.kill(rank, signal.SIGKILL)


def test_ctrl_c_while_workers_tokenize_leaves_one_line_and_nothing_else(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    lines = make_dataset(tmp_path / "data.jsonl", num_records=300).read_text()
    (tmp_path / "data.jsonl").write_text(lines * 200)
    before = {path.name for path in tmp_path.iterdir()} | {"cache"}
    with started(command(1, [*ENDLESS, "--preprocessing_num_workers", "2"]), tmp_path) as process:
        assert wait_for(lambda: bool(children(process.pid)))
        workers = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        lines_seen = [line for line in lines_after(process) if not line.startswith(("model loaded", "tokenizing"))]

    expected = "interrupted (SIGINT) before the first step: nothing was trained, and nothing is left"
    assert lines_seen == [expected], "\n".join(lines_seen)
    assert process.returncode == 130
    assert {path.name for path in tmp_path.iterdir()} == before
    assert wait_for(lambda: not any(is_alive(worker) for worker in workers))
