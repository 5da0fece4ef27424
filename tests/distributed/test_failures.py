"""A run that loses a rank ends quickly and says why."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS, Ranks
from harness.runs import command, environment, make_checkpoint, make_dataset

ENDLESS = """--model_path model --dataset data.jsonl --fp32 --num_stages 4 --num_chunks 2 --batch_size 4 --seq_length 16
    --num_iterations 100000 --save_dir out"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run whose ranks are killed in a step before the first save: only its records are there."""
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl")
    yield tmp_path
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count("\n") >= 5
    assert {path.suffix for path in (tmp_path / "out").iterdir()} <= {".jsonl", ".yaml", ".json"}
    assert not (tmp_path / "out" / "config.json").exists()
    assert not (tmp_path / "out.partial").exists()
    assert not (tmp_path / "finetune_params.pt").exists()


def test_torchrun_ends_all_ranks_within_a_minute_when_one_dies_in_a_step(place: Path) -> None:
    process = subprocess.Popen(
        command(2, ENDLESS.split()),
        cwd=place,
        env=environment(place / "cache"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step") and " 5/" in line:
            break
    else:
        pytest.fail("".join(seen))
    workers = _workers(process.pid)
    os.kill(workers[1], signal.SIGKILL)
    start = time.monotonic()
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert time.monotonic() - start < 60
    assert process.returncode != 0
    assert not any(_is_alive(worker) for worker in workers.values())
    assert "Signal 9 (SIGKILL)" in output, output  # torchrun names the rank that was killed


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_ends_within_a_minute_when_the_other_one_dies_and_nobody_else_looks(place: Path, victim: int) -> None:
    arguments = ["--device", "cpu", *ENDLESS.split()]
    ranks = Ranks("main", "main", arguments, num_ranks=2, folder=place, environment=environment(place / "cache"))
    while " 5/100000" not in ranks.output():
        assert all(process.is_alive() for process in ranks.processes), ranks.output()
        time.sleep(0.05)

    ranks.processes[victim].kill()
    start = time.monotonic()
    survivor = ranks.processes[1 - victim]
    survivor.join(HANG_SECONDS)

    assert time.monotonic() - start < 60
    assert survivor.exitcode == 1
    assert f"rank {1 - victim} stops: it lost" in ranks.output()


def _workers(launcher: int) -> dict[int, int]:
    """Rank -> process id of the launcher's children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return {rank: int(child) for child in children if (rank := _rank_of(int(child))) is not None}


def _rank_of(process: int) -> int | None:
    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next((int(v.partition(b"=")[2]) for v in variables if v.startswith(b"RANK=")), None)


def _is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
