"""Processes meet at the store that their launcher names, and make their process groups by way of it afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from harness.forked import HANG_SECONDS
from harness.runs import ROOT, environment, free_port

WORKER = str(ROOT / "tests/harness/store_worker.py")
HEARD = [[["first", 0], ["first", 1]], [["second", 0], ["second", 1]], [2.0, 2.0]]


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
    shared = {**environment(tmp_path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]

    told = [process.communicate(timeout=HANG_SECONDS) for process in processes]

    assert [process.returncode for process in processes] == [os.EX_OK] * 2, told
    assert [json.loads(output) for output, _ in told] == [HEARD] * 2
