"""A rank that is killed, whatever the run is at, takes all processes of the run with it, and the launcher names it."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.grids import named
from harness.launched import Launched, family, is_alive, ranks_of
from harness.runs import ROOT, environment, free_port, make_checkpoint, make_dataset
from started_ranks import wait_until

MINUTE = 60.0
Moment = Callable[[Path, int], object]
"""Whether a run in this folder, with this launcher, has come to a phase."""
OPTIONS = """--device cpu --model_path model --dataset data.jsonl --fp32 --num_stages 4 --num_chunks 2 --batch_size 4
    --seq_length 16 --preprocessing_num_workers 2 --save_dir out"""
ENDLESS = f"{OPTIONS} --num_iterations 100000".split()


@contextmanager
def started(words: list[str], folder: Path, *, forks_ranks: bool = True) -> Iterator[Launched]:
    """A run by our launcher, which prints to `output.txt`; what is left of it is killed in the end."""
    launched = ["--nproc_per_node", "2", "--master_port", str(free_port()), str(ROOT / "main.py"), *words]
    variables = {**environment(folder / "cache"), "PYTHONPATH": str(ROOT)}
    process = Launched(launched, folder, variables, forks_ranks=forks_ranks)
    (folder / "output.txt").symlink_to(process.output_file)
    try:
        yield process
    finally:
        for number in [*family(process.pid), process.pid]:
            if is_alive(number):
                os.kill(number, signal.SIGKILL)
        process.wait()


def wait_for(moment: Moment, process: Launched, folder: Path) -> None:
    """Return when the run has come to the moment; one that ends before fails the test."""
    come = wait_until(lambda: process.poll() is not None or moment(folder, process.pid), seconds=300, pause=0.02)
    assert come, (folder / "output.txt").read_text()
    assert process.poll() is None, (folder / "output.txt").read_text()


def shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def printed(text: str) -> Moment:
    return lambda folder, _: text in (folder / "output.txt").read_text()


def workers_are_at_work(folder: Path, _: int) -> bool:
    return re.search(r"tokenizing: +[1-9]", (folder / "output.txt").read_text()) is not None


def is_saving(folder: Path, _: int) -> bool:
    # A folder may be renamed while it is looked into; os.walk passes over that.
    below = (names for top in folder.glob("out*") for _, _, names in os.walk(top))
    return any(name.endswith(".safetensors") for names in below for name in names)


PHASES: dict[str, tuple[Moment, int]] = {
    "starting": (lambda _, launcher: len(ranks_of(launcher)) == 2, 1),
    "tokenizing, the parent of the workers": (workers_are_at_work, 0),
    "tokenizing, the one that waits": (workers_are_at_work, 1),
    "connecting and loading": (printed("data  "), 0),
    "in a step": (printed(" 5/100000"), 1),
}


def kill_and_look(process: Launched, folder: Path, victim: int, shared: set[str]) -> str:
    """Kill a rank; all of the run is gone within a minute, and nothing of it is left in shared memory."""
    members = {process.pid, *family(process.pid)}
    os.kill(ranks_of(process.pid)[victim], signal.SIGKILL)
    begin = time.monotonic()
    gone = wait_until(
        lambda: process.poll() is not None and not any(map(is_alive, members)), seconds=MINUTE, pause=0.02
    )
    output, living = (folder / "output.txt").read_text(), [*filter(is_alive, members)]
    for member in living:
        os.kill(member, signal.SIGKILL)
    assert gone, f"after a minute {living} live: {output}"
    assert process.returncode != 0
    # Other runs of this machine have files there, too, which go when they end.
    left = shared_files() - shared
    rest = MINUTE - (time.monotonic() - begin)
    assert wait_until(lambda: not left & shared_files(), seconds=rest), f"left in /dev/shm: {left & shared_files()}"
    return output


ON_DEMAND = ["tokenizing, the one that waits", "connecting and loading"]


@pytest.mark.parametrize("phase", named({name: name for name in PHASES}, on_demand=ON_DEMAND))
def test_a_killed_rank_ends_all_within_a_minute_and_is_named(tmp_path: Path, phase: str) -> None:
    moment, victim = PHASES[phase]
    make_checkpoint(tmp_path / "model")
    records = make_dataset(tmp_path / "data.jsonl", num_records=300).read_text()
    (tmp_path / "data.jsonl").write_text(records * (100 if "tokenizing" in phase else 1))
    shared = shared_files()
    # Only the first phase has programs that are being loaded.
    with started(ENDLESS, tmp_path, forks_ranks=phase != "starting") as process:
        wait_for(moment, process, tmp_path)
        time.sleep(random.uniform(0, 0.5))
        output = kill_and_look(process, tmp_path, victim, shared)

    assert f"rank {victim} ended first, by SIGKILL; all ranks were stopped" in output
    assert "Traceback" not in output
    assert process.returncode == 128 + signal.SIGKILL
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_a_rank_that_is_killed_while_it_saves_leaves_no_model(tmp_path: Path) -> None:
    shared = shared_files()
    for number in range(5):  # on a busy machine all may be saved before the rank is stopped
        folder = tmp_path / str(number)
        index = folder / "out" / "model.safetensors.index.json"
        make_checkpoint(folder / "model", num_layers=64)
        make_dataset(folder / "data.jsonl")
        with started(f"{OPTIONS} --num_iterations 2".split(), folder) as process:
            wait_for(is_saving, process, folder)
            os.kill(ranks_of(process.pid)[1], signal.SIGSTOP)
            time.sleep(0.2)  # the other rank ends what it can without this one
            if index.exists():
                continue
            output = kill_and_look(process, folder, 1, shared)
        break
    else:
        pytest.fail("a model was there each time")

    assert "rank 1 ended first, by SIGKILL" in output
    assert not (folder / "out" / "model.safetensors").exists()
    assert not index.exists()
