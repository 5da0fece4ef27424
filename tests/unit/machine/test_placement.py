"""A copy that arrives wrong switches copies between GPUs off on all ranks, in time for NCCL, with one line."""

from __future__ import annotations

import ctypes
import logging
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from harness.host_copies import HostCopyEngine, HostQueue
from torch.distributed import HashStore

from mobius.config.config import Config
from mobius.config.options import config_from
from mobius.machine import placement
from mobius.machine.placement import order_devices, send_by_host_if_broken
from mobius.machine.topology import Topology
from mobius.messages.local import LocalTransport, run_rank_threads
from mobius.messages.mailboxes import CopyQueue
from mobius.messages.store_meeting import StoreMeeting
from mobius.ranks import allows_peer_copies

CPU = torch.device("cpu")


class Queue(HostQueue):
    """Spoils the first byte of what it writes into other devices, where its device does so."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(corrupts=False)
        self._engine = engine

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        super().copy(target, source, num_bytes)
        if target in self._engine.opened and self._engine.spoils:
            self._work.put(lambda: ctypes.memset(target, 0x5A, 1))


class Engine(HostCopyEngine):
    def __init__(self, index: int, *, spoils: bool, refuses: bool = False) -> None:
        super().__init__(index, peers=frozenset(range(4)) - {index})
        self.spoils, self._refuses = spoils, refuses
        self.opened: set[int] = set()

    def new_queue(self) -> CopyQueue:
        return Queue(self)

    def open_exported(self, handle: bytes) -> int:
        if self._refuses:
            raise RuntimeError("not permitted")
        address = super().open_exported(handle)
        self.opened.add(address)
        return address


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="mobius.machine.placement")
    return caplog


def send(engines: list[Engine], order: tuple[int, ...]) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))

    def run(transport: LocalTransport) -> None:
        rank = transport.rank
        meeting = StoreMeeting(store, rank=rank, num_ranks=len(engines))
        send_by_host_if_broken(meeting, lambda: engines[rank], device=CPU, order=order, sizes=(64, 5000))

    run_rank_threads(len(engines), run)


def test_copies_that_arrive_are_trusted_without_a_word(log: pytest.LogCaptureFixture) -> None:
    send([Engine(index, spoils=False) for index in (0, 2, 1, 3)], (0, 2, 1, 3))

    assert allows_peer_copies()
    assert "NCCL_P2P_DISABLE" not in os.environ
    assert log.messages == []


def test_copies_that_arrive_wrong_are_switched_off_and_named_by_the_user_s_devices(
    log: pytest.LogCaptureFixture,
) -> None:
    send([Engine(index, spoils=index == 2) for index in (0, 2, 1, 3)], (0, 2, 1, 3))

    assert os.environ["NCCL_P2P_DISABLE"] == "1"
    (line,) = log.messages
    assert line.startswith("copies from GPU 6 to GPU 4, GPU 6 to GPU 5 arrive with other contents")
    assert line.endswith("all messages between GPUs go through host memory, as with NCCL_P2P_DISABLE=1")
    assert log.records[0].levelno == logging.WARNING


def test_copies_that_cannot_be_checked_stay_as_they_are_with_a_line(log: pytest.LogCaptureFixture) -> None:
    send([Engine(index, spoils=False, refuses=index == 3) for index in range(4)], (0, 1, 2, 3))

    assert allows_peer_copies()
    assert log.messages == ["copies from GPU to GPU were not checked: rank 3: not permitted"]


def test_copies_that_the_user_has_switched_off_are_not_tried(log: pytest.LogCaptureFixture) -> None:
    os.environ["NCCL_P2P_DISABLE"] = "1"

    send([Engine(index, spoils=True) for index in range(4)], (0, 1, 2, 3))

    assert log.messages == []


BOX = Topology.from_json((Path(__file__).parents[1] / "machine/topologies/two_per_root_complex.json").read_text())


def order(config: Config) -> list[tuple[int, ...]]:
    """What each of four ranks is told."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    return run_rank_threads(
        4, lambda transport: order_devices(config, StoreMeeting(store, rank=transport.rank, num_ranks=4))
    )


@pytest.mark.parametrize("num_chunks", [4, None])
def test_ranks_get_devices_of_different_root_complexes_in_turn(
    monkeypatch: pytest.MonkeyPatch, num_chunks: int | None
) -> None:
    monkeypatch.setattr(placement, "read_topology", lambda _: BOX)

    assert order(config_from({"num_chunks": num_chunks})) == [(0, 2, 1, 3)] * 4


def test_a_list_that_does_not_ascend_is_the_user_s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "read_topology", lambda _: BOX)
    os.environ["CUDA_VISIBLE_DEVICES"] = "7,6,5,4"

    assert order(Config()) == [(0, 1, 2, 3)] * 4


def test_a_probe_that_is_asked_for_goes_before_the_tree_and_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path)
    measured: list[int] = []

    def measure(num_gpus: int) -> dict[tuple[int, int], float]:
        measured.append(num_gpus)
        return {(a, b): 2.0 if (a, b) in ((0, 2), (1, 3)) else 1.0 for a in range(4) for b in range(a + 1, 4)}

    monkeypatch.setattr(placement, "read_topology", lambda _: BOX)
    monkeypatch.setattr(placement, "measure_in_process", measure)
    config = config_from({"probe_topology": True})

    # By the measurement 0 and 2 share a link, and 1 and 3; the listed order parts them already.
    assert order(config) == order(config) == [(0, 1, 2, 3)] * 4
    assert measured == [4]
    assert len(list((tmp_path / "mobius").iterdir())) == 1


@pytest.mark.parametrize(("config", "num_ranks"), [(config_from({"cross_mapping": False}), 4), (Config(), 2)])
def test_nobody_looks_at_the_machine_where_the_order_is_not_to_be_chosen(
    monkeypatch: pytest.MonkeyPatch, config: Config, num_ranks: int
) -> None:
    monkeypatch.setattr(placement, "read_topology", None)
    meeting = StoreMeeting(HashStore(), rank=0, num_ranks=num_ranks)

    assert order_devices(config, meeting) == tuple(range(num_ranks))
