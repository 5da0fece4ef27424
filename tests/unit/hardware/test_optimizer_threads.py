"""How many threads update: no more than use up the host's memory bandwidth, and some cores are left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mobius.hardware import devices
from mobius.hardware.devices import num_optimizer_threads
from mobius.hardware.numa import num_numa_nodes


@pytest.mark.parametrize(
    ("threads", "num_ranks", "nodes", "expected"),
    [
        (1, 4, 1, 1),
        (4, 4, 1, 4),
        (7, 8, 1, 7),
        (8, 4, 1, 6),  # two are for what feeds the GPU
        (16, 4, 1, 8),  # 32 of all ranks
        (16, 2, 1, 14),
        (16, 1, 1, 14),
        (64, 1, 1, 32),
        (64, 8, 1, 6),
        (16, 8, 2, 8),  # 32 of each node
        (24, 4, 2, 16),
    ],
)
def test_threads_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, threads: int, num_ranks: int, nodes: int, expected: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(devices, "num_numa_nodes", lambda: nodes)
    assert num_optimizer_threads(num_ranks) == expected


@pytest.mark.parametrize(("folders", "expected"), [([], 1), (["node0"], 1), (["node0", "node1", "possible"], 2)])
def test_nodes_are_those_that_the_kernel_tells(tmp_path: Path, folders: list[str], expected: int) -> None:
    for folder in folders:
        (tmp_path / "sys/devices/system/node" / folder).mkdir(parents=True)
    assert num_numa_nodes(tmp_path) == expected
