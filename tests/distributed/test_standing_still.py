"""Whole runs under the watchdog: one that stands still is told and ended, one that is only slow is left alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS, ROOT
from harness.runs import environment, make_checkpoint, make_dataset
from launch import free_port

NUM_STEPS = 6
HANGS = """
import threading
from mobius.runtime.executor import Executor
def hang(self, stage, microbatch, run=Executor._forward):
    if os.environ["RANK"] == "1" and self._activity._step == 5 and microbatch == 1:
        threading.Event().wait()
    run(self, stage, microbatch)
Executor._forward = hang
"""
SLOW_DISK = """
import mobius.training.saving as saving
def slowly(*arguments, run=saving.write_stage, **named):
    for _ in range(6 if os.environ["RANK"] == "1" and "slow" not in globals() else 0):
        named["progress"]()
        time.sleep(2)
    globals()["slow"] = True
    return run(*arguments, **named)
saving.write_stage = slowly
"""
SLOW_EVALUATION = """
import mobius.training.judging.evaluation as evaluation
evaluation.MOST_BATCHES_PER_PASS = 1
def slowly(*arguments, run=evaluation.join):
    time.sleep(1)
    return run(*arguments)
evaluation.join = slowly
"""
COMPILES = """
from mobius.runtime.executor import Executor
def compiles(self, *arguments, run=Executor.run, **named):
    if self._activity._step == 1:
        time.sleep(12)
    return run(self, *arguments, **named)
Executor.run = compiles
"""


def run(folder: Path, fault: str, *options: str, minutes: float) -> subprocess.CompletedProcess[str]:
    """Two ranks, started as train.sh starts them, of a program that has `fault` in it."""
    make_checkpoint(folder / "model", num_layers=4)
    make_dataset(folder / "data.jsonl")
    program = f"import os, sys, time\nsys.path.insert(0, {str(ROOT)!r})\n{fault}\nfrom main import main\nmain()\n"
    (folder / "program.py").write_text(program)
    launcher = [str(ROOT / "scripts" / "run_ranks.py"), "--nproc_per_node", "2", "--master_port", str(free_port())]
    words = "--device cpu --fp32 --model_path model --dataset data.jsonl --num_stages 4 --num_chunks 2 --batch_size 4"
    words += f" --seq_length 32 --num_iterations {NUM_STEPS} --val_size 16 --save_steps 2 --save_params none"
    words += f" --save_dir saved --save_results report.txt --watchdog_minutes {minutes}"
    return subprocess.run(
        [sys.executable, *launcher, "program.py", *words.split(), *options],
        cwd=folder,
        env=environment(folder / "cache"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def test_a_hang_in_one_rank_is_told_by_all_and_ends_the_run(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    start = time.monotonic()
    result = run(tmp_path, HANGS, minutes=0.1)
    output = result.stdout

    assert result.returncode == 75, output
    assert time.monotonic() - start < 90
    stories = dict(re.findall(r"watchdog: rank (\d) \(process(.*?)(?=\n\n|\Z)", output, re.S))
    assert set(stories) == {"0", "1"}, output
    assert "in step 5, at F1.1 (stage 1, microbatch 1)" in stories["1"]
    assert "in hang" in stories["1"]
    assert "waits for" not in stories["1"].split("thread")[0]
    assert "in step 5, at F2.1 (stage 2, microbatch 1)" in stories["0"]
    assert "waits for neighbours, what stage 1 makes, from rank 1" in stories["0"]
    assert re.search(r"all ranks end after step 4 of 6: the newest checkpoint is \S*checkpoint-2;", output), output
    assert output.rstrip().endswith("the run stood still: above, each rank tells where it was; all ranks have ended")
    processes = [int(number) for number in re.findall(r"rank \d \(process (\d+)", output)]
    assert not any(Path(f"/proc/{number}").exists() for number in processes)
    assert set(os.listdir("/dev/shm")) <= before
    assert (tmp_path / "saved" / "checkpoint-2" / "config.json").exists()


@pytest.mark.parametrize(
    ("fault", "options", "minutes"),
    [
        (SLOW_DISK, "", 0.1),
        (SLOW_EVALUATION, "--eval_strategy epoch --eval_on_start --packing off", 0.05),
        (COMPILES, "--save_strategy no", 0.1),
    ],
    ids=["a save on a slow disk", "an evaluation", "a first step that compiles"],
)
def test_a_run_that_takes_longer_than_the_limit_for_good_reason_is_left_alone(
    tmp_path: Path, fault: str, options: str, minutes: float
) -> None:
    result = run(tmp_path, fault, *options.split(), minutes=minutes)
    assert result.returncode == 0, result.stdout
    assert "watchdog:" not in result.stdout
