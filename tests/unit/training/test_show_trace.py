"""scripts/show_trace.py, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mobius.memory.spans import MeasuredSpan, TraceLane
from mobius.training.timeline import Trace, TraceFacts, write_trace

ROOT = Path(__file__).resolve().parents[3]


def show(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts" / "show_trace.py"
    return subprocess.run(
        [sys.executable, str(script), *options], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture
def trace_folder(tmp_path: Path) -> Path:
    spans = (
        MeasuredSpan(TraceLane.STEP, "step 3", 3, 0.0, 0.1),
        MeasuredSpan(TraceLane.STEP, "step 4", 4, 0.1, 0.2),
        MeasuredSpan(TraceLane.WAIT, "weights", 4, 0.1, 0.1125),
        MeasuredSpan(TraceLane.COMPUTE, "F0.0", 4, 0.1125, 0.18),
    )
    write_trace(tmp_path / "trace.json", Trace(TraceFacts(1, 1, 1, 1, "cpu"), (spans,)))
    return tmp_path


def test_it_tells_milliseconds_and_draws_the_step_that_is_asked_for(trace_folder: Path) -> None:
    result = show(trace_folder, "trace.json", "--step", "4", "--output", "step.svg")

    assert (result.returncode, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[:3] == [
        ["step", "4", "on", "cpu,", "milliseconds"],
        ["rank", "step", "compute", "wait:", "weights"],
        ["0", "100.0", "67.5", "12.5"],
    ]
    assert ">F0.0<" in (trace_folder / "step.svg").read_text()


def test_without_a_step_it_shows_the_second(trace_folder: Path) -> None:
    assert show(trace_folder, "trace.json").stdout.startswith("step 4 on cpu")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("trace.json", "--step", "5"), "the trace has steps 3, 4, not step 5"),
        (("nowhere.json",), "cannot read nowhere.json: No such file"),
        (("trace.json", "--output", "step.gif"), "ends in .png or .svg"),
    ],
)
def test_a_mistake_is_told_in_one_line(trace_folder: Path, options: tuple[str, ...], complaint: str) -> None:
    result = show(trace_folder, *options)

    assert result.returncode == 2
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1
