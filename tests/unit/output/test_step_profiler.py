"""A profile covers the chosen steps, and is there as soon as the last of them is over."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from mobius.output.recordings import StepProfiler


def play(profiler: StepProfiler, steps: range) -> None:
    """Steps that each do one addition, marked with the number of the step."""
    for number in steps:
        with profiler.step(number), torch.profiler.record_function(f"my step {number}"):
            torch.ones(8) + number


def names_in(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def test_the_profile_holds_the_operations_of_its_steps_only(tmp_path: Path) -> None:
    path = tmp_path / "profile" / "rank0.json.gz"

    play(StepProfiler(torch.device("cpu"), range(2, 4), path), range(1, 6))

    names = names_in(path)
    assert {name for name in names if name.startswith("my step")} == {"my step 2", "my step 3"}
    assert "aten::add" in names


def test_the_profile_is_written_right_behind_its_last_step(tmp_path: Path) -> None:
    path = tmp_path / "rank1.json.gz"
    profiler = StepProfiler(torch.device("cpu"), range(1, 3), path)

    play(profiler, range(1, 2))
    assert not path.exists()
    play(profiler, range(2, 3))

    assert {"my step 1", "my step 2"} <= names_in(path)


def test_steps_before_the_first_cost_no_profiler_and_leave_nothing(tmp_path: Path) -> None:
    profiler = StepProfiler(torch.device("cpu"), range(9, 10), tmp_path / "rank0.json.gz")

    with profiler.step(1):
        assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_cannot_be_written_is_told_and_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    play(StepProfiler(torch.device("cpu"), range(1, 2), tmp_path / "file" / "rank0.json.gz"), range(1, 3))

    (message,) = caplog.messages
    assert message.startswith(f"--profile_steps: cannot write {tmp_path / 'file' / 'rank0.json.gz'}")
