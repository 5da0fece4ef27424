"""Processes meet at the store that their launcher names, and make their process groups by way of it afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS, Ranks
from harness.runs import ROOT, environment, free_port

WORKER = str(ROOT / "tests/harness/store_worker.py")
HEARD = [[["first", 0], ["first", 1]], [["second", 0], ["second", 1]], [2.0, 2.0]]


@pytest.mark.extended  # ranks of each launcher in other tests do
def test_ranks_of_torchrun_meet_before_and_beside_their_process_groups(tmp_path: Path) -> None:
    launcher = f"-m torch.distributed.run --nproc_per_node 2 --master_port {free_port()}".split()

    result = subprocess.run(
        [sys.executable, *launcher, WORKER],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert [json.loads(line) for line in result.stdout.splitlines()] == [HEARD] * 2


def test_ranks_that_were_started_by_hand_meet_too(tmp_path: Path) -> None:
    """The first rank then keeps the store itself."""
    ranks = Ranks("harness.store_worker", "main", [], num_ranks=2, folder=tmp_path, environment=environment(tmp_path))

    assert ranks.wait() == 0, ranks.output()
    assert [json.loads(line) for line in ranks.output().splitlines()] == [HEARD] * 2
