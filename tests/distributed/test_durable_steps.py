"""Kills and power cuts of runs whose steps are durable: they go on from the last whole step, to the bit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS, ROOT
from harness.runs import environment


def output_of(program: str, *words: str, folder: Path) -> str:
    finished = subprocess.run(
        [sys.executable, str(ROOT / program), *words],
        env=environment(folder / "cache")
        | {"PYTHONPATH": ":".join(str(ROOT / name) for name in ("", "tests", "scripts"))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.mark.parametrize("cuts", [2, pytest.param(10, marks=pytest.mark.extended)])
def test_no_power_cut_loses_more_than_the_step_in_progress(tmp_path: Path, cuts: int) -> None:
    output = output_of("tests/harness/power_cut_runs.py", str(cuts), "1", str(tmp_path), folder=tmp_path)
    assert re.search(rf"^all( +\d+)+ +{cuts}$", output, re.MULTILINE), output
    taken_back = re.search(r"(\d+) writes", output)
    assert taken_back, output
    assert int(taken_back[1]) > 0, "nothing was cut"


@pytest.mark.extended
def test_no_kill_loses_more_than_the_step_in_progress(tmp_path: Path) -> None:
    words = ["--durable", "--kills", "40", "--seed", "2", "--launched", "0.1", "--folder", str(tmp_path)]
    output = output_of("scripts/kill_and_resume.py", *words, folder=tmp_path)
    assert re.search(r"^all( +\d+)+ +40$", output, re.MULTILINE), output
