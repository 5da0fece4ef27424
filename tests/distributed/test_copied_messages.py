"""Between two processes: mailboxes carry messages beside compute, with gloo for everything else."""

from __future__ import annotations

import json
from pathlib import Path

from harness.forked import Ranks
from harness.runs import environment


def test_two_processes_talk_over_mailboxes_in_each_other_s_memory(tmp_path: Path) -> None:
    # 50 messages are three steps, the last a short one.
    ranks = Ranks(
        "harness.mailbox_worker",
        "main",
        ["cpu", "9", "50"],
        num_ranks=2,
        folder=tmp_path,
        environment=environment(tmp_path / "cache"),
    )
    assert ranks.wait() == 0, ranks.output()
    (told,) = [json.loads(line) for line in ranks.output().splitlines() if line.startswith("{")]
    assert told["over_mailboxes"]
    assert told["num_wrong"] == 0
