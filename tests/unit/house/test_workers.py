"""Tests in several processes: how each ended is told once, also when a process dies."""

from __future__ import annotations

import os
import re
from pathlib import Path

from harness.forked import Ranks

PLAIN = """
import warnings, pytest

def test_fails():
    print("said before")
    assert 1 == 2

def test_warns():
    warnings.warn("careful")

@pytest.mark.skip
def test_is_left_out():
    pass
"""
DIES = """
import os

def test_dies():
    os._exit(3)

def test_behind_it():
    pass
"""
FLAKY = """
tries = []

def test_passes_at_last():
    tries.append(1)
    assert len(tries) == 2
"""


def test_each_end_is_told_and_a_dead_worker_fails_its_test(tmp_path: Path) -> None:
    for name, text in (("plain", PLAIN), ("dies", DIES), ("flaky", FLAKY)):
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").touch()
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-p", "harness.workers", "--workers", "2", "--reruns", "1"]
    words = [*options, "--basetemp", str(tmp_path / "own"), str(tmp_path)]

    run = Ranks("pytest", "main", words, num_ranks=1, folder=tmp_path, environment=os.environ)
    run.wait()

    said = run.output()
    # Of the six tests one is left out, and one is not reached.
    assert re.search(r"2 failed, 2 passed, 1 skipped, \d warnings?, 2 rerun in", said)
    assert "E       assert 1 == 2" in said
    assert "said before" in said
    assert "UserWarning: careful" in said
    assert "test_dies.py::test_dies - its worker ended with 3" in said
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"worker0", "worker1"}
