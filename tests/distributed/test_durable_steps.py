"""Kills and power cuts of runs whose steps are durable: they go on from the last whole step, to the bit."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS
from harness.power_cut_runs import main as cut_power
from harness.runs import environment
from kill_and_resume import main as kill_and_resume
from started_ranks import wait_until


def output_of(run: Callable[[list[str]], int], *words: str, folder: Path) -> str:
    """What a program prints that is forked from here, where everything is imported already."""
    file = folder / "printed.txt"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.environ.clear()
            os.environ.update(environment(folder / "cache"))
            output = os.open(file, os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            code = run([*words])
            sys.stdout.flush()
        finally:  # a failure is none of the parent's tests, which would run twice
            os._exit(code)
    ended = wait_until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT), HANG_SECONDS)
    if not ended:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0, file.read_text()
    return file.read_text()


@pytest.mark.parametrize("cuts", [1, pytest.param(10, marks=pytest.mark.extended)])
def test_no_power_cut_loses_more_than_the_step_in_progress(tmp_path: Path, cuts: int) -> None:
    output = output_of(cut_power, str(cuts), "1", str(tmp_path), folder=tmp_path)
    assert re.search(rf"^all( +\d+)+ +{cuts}$", output, re.MULTILINE), output
    taken_back = re.search(r"(\d+) writes", output)
    assert taken_back, output
    # A single cut may not meet a write that has not been synced.
    assert int(taken_back[1]) > 0 or cuts == 1, "nothing was cut"


@pytest.mark.extended
def test_no_kill_loses_more_than_the_step_in_progress(tmp_path: Path) -> None:
    words = ["--durable", "--kills", "40", "--seed", "2", "--launched", "0.1", "--folder", str(tmp_path)]
    output = output_of(kill_and_resume, *words, folder=tmp_path)
    assert re.search(r"^all( +\d+)+ +40$", output, re.MULTILINE), output
