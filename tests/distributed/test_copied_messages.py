"""Between two processes: mailboxes carry messages beside compute, with gloo for everything else, or for all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.forked import Ranks
from harness.runs import environment


@pytest.mark.parametrize("has_peer_copies", [True, False])
def test_two_processes_talk_over_mailboxes_in_each_other_s_memory_or_over_gloo(
    tmp_path: Path, has_peer_copies: bool
) -> None:
    # 50 messages are three steps, the last a short one.
    ranks = Ranks(
        "harness.mailbox_worker",
        "main",
        ["cpu", "1.3", "50"],
        num_ranks=2,
        folder=tmp_path,
        environment=environment(tmp_path / "cache") | {"NCCL_P2P_DISABLE": str(int(not has_peer_copies))},
    )
    assert ranks.wait() == 0, ranks.output()
    (told,) = [json.loads(line) for line in ranks.output().splitlines() if line.startswith("{")]
    assert told["over_mailboxes"] == has_peer_copies
    assert told["num_wrong"] == 0
