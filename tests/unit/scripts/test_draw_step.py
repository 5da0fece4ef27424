"""The predicted step of a plan is drawn, and written like a measured one."""

from __future__ import annotations

import shlex
from pathlib import Path

import draw_step
import pytest
from harness.traces import read_trace

SMALL = shlex.split(
    "--model_path 1b --card H200 --num_ranks 2 --num_stages 4 --num_chunks 4 --batch_size 8 --resident_stages 0"
)


def test_the_predicted_step_is_drawn_and_written_like_a_measured_one(tmp_path: Path) -> None:
    picture, file = tmp_path / "step.png", tmp_path / "trace.json"
    assert draw_step.main([str(picture), *SMALL]) == draw_step.main([str(file), *SMALL]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    trace = read_trace(file)
    assert trace.facts.is_predicted
    assert trace.steps == [1, 2, 3]
    lanes = {span.lane.value for span in trace.spans[0]}
    assert {"compute", "load", "offload", "optimizer"} <= lanes


def test_what_has_no_predicted_step_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw_step.main([str(tmp_path / "a.png"), *SMALL, "--dtype", "fp32"]) == 2
    assert "no step is predicted" in capsys.readouterr().err
    assert draw_step.main([str(tmp_path / "a.png"), *SMALL, "--num_stagez", "4"]) == 2
    assert "did you mean `--num_stages`?" in capsys.readouterr().err
