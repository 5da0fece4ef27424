"""A rank that hangs makes the others wait for its message; each says where it is, and all end."""

from __future__ import annotations

import re
from pathlib import Path

from harness.forked import Ranks
from harness.runs import environment


def test_a_hang_of_one_rank_is_told_by_all_with_who_waits_for_whom(tmp_path: Path) -> None:
    ranks = Ranks(
        "harness.late_ranks",
        "pass_messages",
        [1, 3.0],
        num_ranks=3,
        folder=tmp_path,
        environment=environment(tmp_path / "cache"),
    )
    for process in ranks.processes:
        process.join(120)
    output = ranks.output()

    assert [process.exitcode for process in ranks.processes] == [75, 75, 75], output
    stories = {
        int(rank): story for rank, story in re.findall(r"watchdog: rank (\d) \(process(.*?)(?=\n\n|\Z)", output, re.S)
    }
    assert set(stories) == {0, 1, 2}, output
    assert "in step 3, at F1.2 (stage 1, microbatch 2)" in stories[1]
    assert "waits for" not in stories[1]
    assert "late_ranks.py:" in stories[1]
    assert "in hang" in stories[1]
    assert "in step 3, at F2.2 (stage 2, microbatch 2)" in stories[2]
    assert "waits for neighbours, what stage 1 makes, from rank 1" in stories[2]
    # Rank 0 got everything from rank 2 but what that could not make.
    assert "in step 3, at F0.3 (stage 0, microbatch 3)" in stories[0]
    assert "waits for neighbours, what stage 2 makes, from rank 2" in stories[0]
    assert "does not answer" not in output
