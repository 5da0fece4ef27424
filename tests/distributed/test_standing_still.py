"""Whole runs under the watchdog: one that stands still is told and ended, one that is only slow is left alone."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS, ROOT, Ranks
from harness.launched import Launched
from harness.runs import environment, make_checkpoint, make_dataset
from started_ranks import wait_until

NUM_STEPS = 6
OPTIONS = f"""--device cpu --fp32 --model_path model --dataset data.jsonl --num_stages 4 --num_chunks 2 --batch_size 4
    --seq_length 32 --num_iterations {NUM_STEPS} --val_size 16 --save_steps 2 --save_params none --save_dir saved
    --save_results report.txt"""
HANGS = """
import os, threading
from mobius.engine.executor import Executor
def hang(self, stage, microbatch, run=Executor._forward):
    if os.environ["RANK"] == "1" and self._observers.activity._step == 5 and microbatch == 1:
        threading.Event().wait()
    run(self, stage, microbatch)
Executor._forward = hang
"""
HANGS_WHILE_LOADING = """
import os, threading
from mobius.models.weights import StoredTensor
def hang(self, rows=None, run=StoredTensor.read):
    if os.environ["RANK"] == "1" and "layers.1" in self.name:
        threading.Event().wait()
    return run(self, rows)
StoredTensor.read = hang
"""
SLOW_DISK = """
import os, time
import mobius.checkpoint.saver as saving
def slowly(*arguments, run=saving.write_stage, **named):
    for _ in range(4 if os.environ["RANK"] == "1" and "slow" not in globals() else 0):
        named["progress"]()
        time.sleep(1)
    globals()["slow"] = True
    return run(*arguments, **named)
saving.write_stage = slowly
"""
SLOW_EVALUATION = """
import mobius.training.evaluation.evaluator as evaluation
evaluation.MAX_BATCHES_PER_PASS = 1
calls = [0]
def slowly_again(*arguments, run=evaluation.concatenate_batches):
    calls[0] += 1
    time.sleep(1 if 4 < calls[0] < 9 else 0)  # the second one: none may compile any more
    return run(*arguments)
evaluation.concatenate_batches = slowly_again
"""
COMPILES = """
from mobius.engine.executor import Executor
def compiles(self, *arguments, run=Executor.run, **named):
    if self._observers.activity._step == 1:
        time.sleep(4)
    return run(self, *arguments, **named)
Executor.run = compiles
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", num_layers=4)
    make_dataset(tmp_path / "data.jsonl")
    return tmp_path


def run(folder: Path, fault: str, *, minutes: float) -> tuple[int, str]:
    """Exit code and output of two ranks under our launcher, of a program that has `fault` in it."""
    program = f"import os, sys, time\nsys.path.insert(0, {str(ROOT)!r})\n{fault}\nfrom main import main\nmain()\n"
    (folder / "faulty_main.py").write_text(program)
    words = f"--nproc_per_node 2 --master_port 0 faulty_main.py {OPTIONS} --watchdog_minutes {minutes}".split()
    launched = Launched(words, folder, environment(folder / "cache"), forks_ranks=True)
    return launched.wait(HANG_SECONDS), launched.output()


def run_forked(folder: Path, fault: str, options: str) -> tuple[int, str]:
    """Exit code and output of two ranks that are forked, which spares each its imports."""
    arguments = [fault, *OPTIONS.split(), *options.split()]
    variables = environment(folder / "cache")
    ranks = Ranks(
        "harness.late_ranks",
        "faulty_main",
        arguments,
        num_ranks=2,
        folder=folder,
        environment=variables,
    )
    return ranks.wait(), ranks.output()


def test_a_hang_in_one_rank_is_told_by_all_and_ends_the_run(place: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    start = time.monotonic()
    code, output = run(place, HANGS, minutes=0.06)

    assert code == 75, output
    assert time.monotonic() - start < 90
    stories = dict(re.findall(r"watchdog: rank (\d) \(process(.*?)(?=\n\n|\Z)", output, re.S))
    assert set(stories) == {"0", "1"}, output
    assert "in step 5, at F1.1 (stage 1, microbatch 1)" in stories["1"]
    assert "in hang" in stories["1"]
    assert "waits for" not in stories["1"].split("thread")[0]
    assert "in step 5, at F2.1 (stage 2, microbatch 1)" in stories["0"]
    assert "waits for neighbours (output of stage 1), from rank 1" in stories["0"]
    assert re.search(r"all ranks end after step 4 of 6: the newest checkpoint is \S*checkpoint-2;", output), output
    assert output.rstrip().endswith("the run stood still: above, each rank reports where it was; all ranks have ended")
    processes = [int(number) for number in re.findall(r"rank \d \(process (\d+)", output)]
    assert not any(Path(f"/proc/{number}").exists() for number in processes)
    assert wait_until(lambda: set(os.listdir("/dev/shm")) <= before, 60)  # those of other tests go
    assert (place / "saved" / "checkpoint-2" / "config.json").exists()


def test_a_hang_while_weights_are_read_is_told_too(place: Path) -> None:
    code, output = run_forked(place, HANGS_WHILE_LOADING, "--watchdog_minutes 0.03")

    assert code == 75, output
    stories = dict(re.findall(r"watchdog: rank (\d) \(process(.*?)(?=\n\n|\Z)", output, re.S))
    assert "before the first step, at the weights" in stories["1"]
    assert "in hang" in stories["1"]
    assert "before the first step, at the wait for all ranks' weights" in stories["0"]
    assert "all ranks end before the first step: nothing was trained, and nothing is left" in output
    assert {path.name for path in place.glob("saved*")} == set()


def test_a_run_that_takes_longer_than_the_limit_for_good_reason_is_left_alone(place: Path) -> None:
    """An evaluation, a first step that compiles, and a save on a slow disk take 4 s or more each, of allowed 3 s."""
    options = "--eval_strategy epoch --eval_on_start --packing off --watchdog_minutes 0.05"
    code, output = run_forked(place, SLOW_DISK + SLOW_EVALUATION + COMPILES, options)
    assert code == 0, output
    assert "watchdog:" not in output
