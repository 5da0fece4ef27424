"""Messages by copy engines: whole and in order during compute, and nothing else waits for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.runs import ROOT, environment, free_port

pytestmark = pytest.mark.gpu

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def run_worker(folder: Path, arguments: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """Run a worker of the harness; the numbers in its JSON line, with what it logged under "log"."""
    result = subprocess.run(
        [sys.executable, *arguments],
        env={**environment(folder / "cache"), **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report | {"log": result.stderr}


def talk(folder: Path, mib: int, **variables: str) -> dict[str, Any]:
    """200 messages each way between two processes, during products of matrices."""
    launcher = f"-m torch.distributed.run --nproc_per_node 2 --master_port {free_port()}".split()
    worker = str(ROOT / "tests" / "harness" / "mailbox_worker.py")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    return run_worker(
        folder, [*launcher, worker, "cuda", str(mib), "200"], {"CUDA_VISIBLE_DEVICES": visible, **variables}
    )


@two_gpus
@pytest.mark.parametrize("mib", [9, 64, 256])
def test_messages_beside_compute_arrive_whole_and_in_order(tmp_path: Path, mib: int) -> None:
    report = talk(tmp_path, mib)
    assert report["over_mailboxes"], report["log"]
    assert report["num_wrong"] == 0


@two_gpus
def test_gpus_that_may_not_write_to_each_other_talk_over_nccl(tmp_path: Path) -> None:
    report = talk(tmp_path, 64, NCCL_P2P_DISABLE="1")

    assert not report["over_mailboxes"]
    assert "messages travel over NCCL: rank 0: its GPU cannot write to the GPU of rank 1" in report["log"]
    assert report["num_wrong"] == 0


def test_messages_that_wait_hold_up_no_other_stream(tmp_path: Path) -> None:
    report = run_worker(tmp_path, [str(ROOT / "tests" / "harness" / "waiting_receive.py"), "64"], {})

    assert report["num_waiting"] == 4  # two receives, and two sends for which there was no mailbox
    assert report["held_up"] == []
    assert report["num_wrong"] == 0
