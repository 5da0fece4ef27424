"""The what-if script: rows as they come, refusals as lines, a picture and a trace where wanted."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulate
from harness.traces import read_trace

SMALL = ["--model_path", "1b", "--batch_size", "8", "--gpus", "2", "--num_stages", "4", "--num_chunks", "4"]
SMALL += ["--resident_stages", "0"]
"""Nothing is left to choose, which takes the most time."""

Captured = pytest.CaptureFixture[str]


def test_the_table_has_a_row_per_combination(capsys: Captured) -> None:
    assert simulate.main([*SMALL, "--card", "H200", "4090", "--pcie", "3", "4"]) == 0
    output, errors = capsys.readouterr()
    rows = [line for line in output.splitlines() if line.strip().startswith("1b ")]
    assert len(rows) == 4 + 2  # the table, and per card how the layers are cut
    assert "estimated" in output
    assert errors == ""


def test_a_format_of_products_that_a_card_lacks_is_told_in_its_row(capsys: Captured) -> None:
    assert simulate.main([*SMALL, "--card", "3090", "--matmul_dtype", "fp8", "int8"]) == 0
    fp8, int8, *_ = capsys.readouterr().out.splitlines()[1:]
    assert "fp8  the card has no such products" in fp8
    assert "  int8  " in int8


def test_the_options_of_a_run_count_and_a_wrong_one_is_told_as_there(capsys: Captured) -> None:
    def step(*arguments: str) -> float:
        assert simulate.main([*SMALL, *arguments]) == 0
        head, row = capsys.readouterr().out.splitlines()[:2]
        place = head.index("s/step") + len("s/step")
        return float(row[:place].split()[-1])

    assert step("--compile", "off", "--recompute", "full") > step("--recompute", "full")
    assert simulate.main([*SMALL, "--num_stagez", "4"]) == 2
    assert "did you mean `--num_stages`?" in capsys.readouterr().err
    assert simulate.main([*SMALL, "--gpus", "3"]) == 2
    assert "`--num_stages` 4: not a multiple of the number of ranks, 3" in capsys.readouterr().err
    assert simulate.main([*SMALL, "--fp32"]) == 2
    assert "no step is predicted" in capsys.readouterr().err


def test_the_predicted_step_is_drawn_and_written_like_a_measured_one(tmp_path: Path) -> None:
    picture, file = tmp_path / "step.png", tmp_path / "trace.json"
    assert simulate.main([*SMALL, "--output", str(picture), "--trace", str(file)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    trace = read_trace(file)
    assert trace.facts.is_predicted
    assert trace.steps == [1, 2, 3]
    lanes = {span.lane.value for span in trace.spans[0]}
    assert {"compute", "load", "offload", "optimizer"} <= lanes
