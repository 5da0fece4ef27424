"""benchmarks/before_after.py: two trees in turns, and what counts as equal."""

from __future__ import annotations

from pathlib import Path

import before_after
import pytest
from before_after import ROOT, Run


def test_a_row_compares_losses_of_runs_with_the_same_plan_only() -> None:
    before = [Run(1.0, 5.0, (3.0, 2.0), "a"), Run(3.0, 6.0, (3.0, 2.5), "b")]
    after = [Run(1.0, 5.0, (3.0, 2.0), "a"), Run(2.0, 5.0, (3.0, 2.1), "b"), Run(9.0, 5.0, (1.0, 1.0), "c")]

    row = before_after.row_of("streamed", before, after)

    assert row[1:4] == ["2.0000 (1.000-3.000)", "2.0000 (1.000-9.000)", "1.000"]
    assert row[4:] == ["5.50 / 5.00", "2, 3", "1 of 2 pairs equal"]


def test_a_folder_that_is_no_tree_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        before_after.main([str(tmp_path), "tiny"])
    assert "is no tree of this project" in capsys.readouterr().err


def test_this_tree_beside_itself_has_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--device", "cpu", "--fp32", "--batch_size", "4", "--seq_length", "16", "--num_stages", "4"]

    before_after.main([str(ROOT), "tiny", "streamed", "--gpus", "1", "--steps", "4", "--turns", "1", "--", *small])

    told = capsys.readouterr().out
    assert "| streamed | " in told
    assert told.count("streamed  before") >= 1
    equal, _, number = told.splitlines()[-1].split("|")[-2].partition(" of ")
    assert int(equal) == int(number.split()[0]) > 0
