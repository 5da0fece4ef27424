"""scripts/show_trace.py, as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import show_trace

from mobius.reporting.trace import Trace, TraceFacts, write_trace
from mobius.schedule.lanes import Lane, LaneSpan


@pytest.fixture
def trace_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    spans = (
        LaneSpan(Lane.STEP, "step 3", 3, 0.0, 0.1),
        LaneSpan(Lane.STEP, "step 4", 4, 0.1, 0.2),
        LaneSpan(Lane.WAIT, "weights", 4, 0.1, 0.1125),
        LaneSpan(Lane.COMPUTE, "F0.0", 4, 0.1125, 0.18),
    )
    write_trace(tmp_path / "trace.json", Trace(TraceFacts(1, 1, 1, 1, "cpu"), (spans,)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_tells_milliseconds_and_draws_the_step_that_is_asked_for(
    trace_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = show_trace.main(["trace.json", "--step", "4", "--output", "step.svg"])

    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    lines = [line.split() for line in printed.out.splitlines()]
    assert lines[:3] == [
        ["step", "4", "on", "cpu,", "milliseconds"],
        ["rank", "step", "compute", "wait:", "weights"],
        ["0", "100.0", "67.5", "12.5"],
    ]
    assert ">F0.0<" in (trace_folder / "step.svg").read_text()
