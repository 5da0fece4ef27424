"""Between two processes that share memory: mailboxes carry messages beside compute, with gloo for everything else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from harness.forked import HANG_SECONDS
from harness.runs import ROOT, environment, free_port


def test_two_processes_talk_over_mailboxes_in_shared_host_memory(tmp_path: Path) -> None:
    launcher = f"-m torch.distributed.run --nproc_per_node 2 --master_port {free_port()}".split()
    worker = ROOT / "tests" / "harness" / "mailbox_worker.py"
    # 9 MiB are three chunks; 50 messages are three steps, the last a short one.
    result = subprocess.run(
        [sys.executable, *launcher, str(worker), "cpu", "9", "50"],
        env=environment(tmp_path / "cache"),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 of 2 edges from GPU to GPU" in result.stderr
    told = json.loads(result.stdout)
    assert told["over_mailboxes"]
    assert told["num_wrong"] == 0
    assert told["gathered"] == [["", 0], ["x" * 1000, 1]]
