"""benchmarks/before_after.py: two trees in turns, and what counts as equal."""

from __future__ import annotations

from pathlib import Path

import before_after
import pytest
from before_after import ROOT, Run
from launch import RunResult


def test_a_row_compares_losses_of_runs_with_the_same_plan_only() -> None:
    before = [Run(1.0, 5.0, (3.0, 2.0), "a"), Run(3.0, 6.0, (3.0, 2.5), "b")]
    after = [Run(1.0, 5.0, (3.0, 2.0), "a"), Run(2.0, 5.0, (3.0, 2.1), "b"), Run(9.0, 5.0, (1.0, 1.0), "c")]

    row = before_after.row_of("streamed", before, after)

    assert row[1:4] == ["2.0000 (1.000-3.000)", "2.0000 (1.000-9.000)", "1.000"]
    assert row[4:] == ["5.50 / 5.00", "2, 3", "1 of 2 equal, within 1.6e-01; within a tree no equal plans"]


def test_a_folder_that_is_no_tree_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        before_after.main([str(tmp_path), "tiny"])
    assert "is no tree of this project" in capsys.readouterr().err


def test_trees_run_in_turns_and_the_table_has_what_they_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class FakeService:
        """The runs of a tree, each step of which takes 1 s, and half of that behind the second turn."""

        def __init__(self, *, worker: Path, **_: object) -> None:
            self._worker, self._num_runs = worker, 0

        def __enter__(self) -> FakeService:
            return self

        def __exit__(self, *_: object) -> None:
            return

        def run(self, words: list[str], *, timeout_seconds: float) -> RunResult:
            self._num_runs += 1
            took = 1.0 if self._num_runs < 3 else 0.5
            step = {"step_seconds": took, "reserved_gpu_memory_gib": None, "loss": 2.0}
            steps = [step | {"step_seconds": 9.0}] * 2 + [step] * 2 + [step | {"step_seconds": 7.0}]
            assert words[-2:] == ["--host_memory_limit", "400"]
            told = {"steps": steps, "plan": {"resident": 0, "kept": 0, "slots": 2}}
            return RunResult(output=told, problem=None, log_end="", machine_bytes=0, seconds=1.0)

    monkeypatch.setattr(before_after, "Service", FakeService)

    before_after.main([str(ROOT), "tiny", "no", "--turns", "3", "--", "--host_memory_limit", "400"])

    *runs, _, _, row = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [line.split()[2] for line in runs[:6]] == ["before", "after", "after", "before", "before", "after"]
    times = "1.0000 (0.500-1.000)"
    losses = "9 of 9 equal, within 0.0e+00; within a tree 6 of 6 equal, within 0.0e+00"
    assert row == f"| no limit | {times} | {times} | 1.000 | 0.00 / 0.00 | 3, 3 | {losses} |"
