"""Copies that arrive with other contents are found by both ends, named by their edge, and everything is given back."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from harness.host_copies import HostCopyEngine, HostQueue
from harness.local_transport import together

from mobius.distributed.cuda_copies import CudaQueue
from mobius.distributed.peer_check import PeerCheck, PeerCheckResult
from mobius.distributed.rendezvous import Rendezvous
from mobius.errors import TransportError
from mobius.process.ranks import allows_peer_copies

T = TypeVar("T")
CPU = torch.device("cpu")
MESSAGE_SIZES = (4096, 12_346, 200_000)

Spoil = Callable[[int, int], None]
"""Changes what has just been written: address and number of bytes."""


class PeerQueue(HostQueue):
    """Copies well within its device, and as it is told into another's."""

    def __init__(self, engine: PeerEngine) -> None:
        super().__init__(corrupts=False)
        self._engine = engine

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        super().copy(target, source, num_bytes)
        spoil = self._engine.spoil
        if target in self._engine.targets:
            self._engine.written.append(num_bytes)
            if spoil is not None:
                self._work.put(lambda: spoil(target, num_bytes))


class PeerEngine(HostCopyEngine):
    def __init__(self, device_index: int, peers: frozenset[int], spoil: Spoil | None = None) -> None:
        super().__init__(device_index, peers=peers)
        self.spoil = spoil
        self.targets: set[int] = set()
        self.written: list[int] = []
        """Bytes of each copy into another device's memory."""

    def new_queue(self) -> CudaQueue:
        return PeerQueue(self)

    def open_exported(self, handle: bytes) -> int:
        address = super().open_exported(handle)
        self.targets.add(address)
        return address


def flip_last_byte(address: int, num_bytes: int) -> None:
    ctypes.c_ubyte.from_address(address + num_bytes - 1).value ^= 0x10


def arrive_as_zeros(address: int, num_bytes: int) -> None:
    ctypes.memset(address, 0, num_bytes)


def flip_in_large_messages(address: int, num_bytes: int) -> None:
    if num_bytes == max(MESSAGE_SIZES):
        ctypes.c_ubyte.from_address(address + num_bytes // 2).value ^= 1


def check(engines: Sequence[HostCopyEngine], *, timeout_seconds: float = 20.0) -> list[PeerCheckResult]:
    """What each rank found, one thread for each."""

    def run(rank: int, seat: Rendezvous) -> PeerCheckResult:
        return PeerCheck(
            seat, CPU, make_engine=lambda _: engines[rank], timeout_seconds=timeout_seconds, sizes=MESSAGE_SIZES
        ).run()

    return no_errors(together(run, len(engines)))


def no_errors(found: list[T | BaseException]) -> list[T]:
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found  # type: ignore[return-value]


def engines_of(num_ranks: int, spoils: dict[int, Spoil] | None = None) -> list[PeerEngine]:
    """Ranks with devices 10, 11, ... that all reach each other; some of them copy badly."""
    devices = frozenset(range(10, 10 + num_ranks))
    return [PeerEngine(10 + rank, devices - {10 + rank}, (spoils or {}).get(rank)) for rank in range(num_ranks)]


@pytest.mark.parametrize(("num_ranks", "num_edges"), [(2, 2), (3, 6), (4, 8)])
def test_copies_that_work_are_checked_over_every_edge_of_the_ring(num_ranks: int, num_edges: int) -> None:
    engines = engines_of(num_ranks)

    verdicts = check(engines)

    assert verdicts == [verdicts[0]] * num_ranks
    assert verdicts[0] == PeerCheckResult()
    assert sorted(size for engine in engines for size in engine.written) == sorted(MESSAGE_SIZES * num_edges)
    assert all(len(engine.targets) == num_edges // num_ranks for engine in engines)
    assert [engine.num_held for engine in engines] == [0] * num_ranks


@pytest.mark.parametrize("spoil", [flip_last_byte, arrive_as_zeros, flip_in_large_messages])
def test_a_device_that_spoils_its_copies_is_found_and_all_ranks_know_its_edges(spoil: Spoil) -> None:
    engines = engines_of(4, {2: spoil})

    verdicts = check(engines)

    assert verdicts == [verdicts[0]] * 4
    assert sorted(verdicts[0].broken) == [(2, 1), (2, 3)]
    assert [engine.num_held for engine in engines] == [0] * 4


def test_a_copy_that_does_nothing_is_found_though_memory_is_used_again() -> None:
    """Old contents must not pass for a message: every message has a pattern of its own."""

    class LazyQueue(PeerQueue):
        def copy(self, target: int, source: int, num_bytes: int) -> None:
            if target not in self._engine.targets:
                super().copy(target, source, num_bytes)

    class LazyEngine(PeerEngine):
        def new_queue(self) -> CudaQueue:
            return LazyQueue(self)

    engines: list[HostCopyEngine] = [LazyEngine(10, frozenset({11})), PeerEngine(11, frozenset({10}))]

    assert [verdict.broken for verdict in check(engines)] == [((0, 1),)] * 2


def test_devices_that_do_not_reach_each_other_are_not_checked() -> None:
    one_way = [PeerEngine(10, frozenset({11})), PeerEngine(11, frozenset())]
    neither = [PeerEngine(10 + rank, frozenset()) for rank in range(2)]

    assert check(one_way) == check(neither) == [PeerCheckResult()] * 2
    assert [engine.written for engine in (*one_way, *neither)] == [list(MESSAGE_SIZES), [], [], []]


def test_a_copy_that_never_ends_stops_the_run_with_what_to_set() -> None:
    class DeadQueue(HostQueue):
        def record(self) -> object:  # type: ignore[override]
            return NeverEvent()

    class NeverEvent:
        def is_completed(self) -> bool:
            return False

    class DeadEngine(PeerEngine):
        def new_queue(self) -> CudaQueue:
            return DeadQueue(corrupts=False)  # type: ignore[return-value]

    engines: list[HostCopyEngine] = [DeadEngine(10 + rank, frozenset({11 - rank})) for rank in range(2)]

    with pytest.raises(TransportError, match="did not end within 0.05 s. Set NCCL_P2P_DISABLE=1"):
        check(engines, timeout_seconds=0.05)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="mobius.distributed.peer_check")
    return caplog


def spoil_first_byte(address: int, num_bytes: int) -> None:
    ctypes.memset(address, 0x5A, 1)


def engine_of(index: int, spoil: Spoil | None = None) -> PeerEngine:
    """Device `index` of four that all reach each other."""
    return PeerEngine(index, frozenset(range(4)) - {index}, spoil)


def send(engines: list[PeerEngine], order: tuple[int, ...]) -> None:
    def run(rank: int, seat: Rendezvous) -> None:
        check = PeerCheck(seat, CPU, make_engine=lambda _: engines[rank], sizes=(64, 5000))
        check.disable_peer_copies_if_broken(order)

    no_errors(together(run, len(engines)))


def test_copies_that_arrive_wrong_are_switched_off_and_named_by_the_user_s_devices(
    log: pytest.LogCaptureFixture,
) -> None:
    send([engine_of(index, spoil_first_byte if index == 2 else None) for index in (0, 2, 1, 3)], (0, 2, 1, 3))

    assert os.environ["NCCL_P2P_DISABLE"] == "1"
    (line,) = log.messages
    assert line.startswith("copies from GPU 6 to GPU 4, GPU 6 to GPU 5 arrive with wrong contents")
    assert line.endswith("all messages between GPUs go through host memory, as with NCCL_P2P_DISABLE=1")
    assert log.records[0].levelno == logging.WARNING


def test_copies_that_cannot_be_checked_stay_as_they_are_with_a_line(log: pytest.LogCaptureFixture) -> None:
    class RefusingEngine(PeerEngine):
        def open_exported(self, handle: bytes) -> int:
            raise RuntimeError("not permitted")

    send([*map(engine_of, range(3)), RefusingEngine(3, frozenset(range(3)))], (0, 1, 2, 3))

    assert allows_peer_copies()
    assert log.messages == ["copies from GPU to GPU were not checked: rank 3: not permitted"]


def test_copies_that_the_user_has_switched_off_are_not_tried(log: pytest.LogCaptureFixture) -> None:
    os.environ["NCCL_P2P_DISABLE"] = "1"

    send([engine_of(index, spoil_first_byte) for index in range(4)], (0, 1, 2, 3))

    assert log.messages == []
