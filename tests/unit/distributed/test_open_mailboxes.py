"""Mailboxes are opened on all ranks or on none, carry what is sent, and give everything back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from harness.forked import HANG_SECONDS
from harness.host_copies import HostCopyEngine
from harness.local_transport import LocalTransport, run_rank_threads
from torch.distributed import HashStore

from mobius.distributed.cuda_copies import CudaCopyEngine
from mobius.distributed.mailboxes import Mailboxes
from mobius.distributed.rendezvous import Rendezvous
from mobius.distributed.transport import Edge, ring_edges
from mobius.schedule.action import Direction

CPU = torch.device("cpu")
SIZE = 12_346  # no multiple of a word, nor of a page


def engines_of(num_ranks: int) -> list[HostCopyEngine]:
    """One engine per rank; rank r has device r + 10, and each reaches all others."""
    devices = frozenset(range(10, 10 + num_ranks))
    return [HostCopyEngine(device, peers=devices - {device}) for device in sorted(devices)]


def with_mailboxes(
    engines: list[HostCopyEngine],
    work: Callable[[LocalTransport, Mailboxes], None],
    *,
    makers: dict[int, Callable[[torch.device], CudaCopyEngine]] | None = None,
    timeout_seconds: float = 20.0,
) -> list[bool]:
    """Open mailboxes in one thread per engine, work with them and close them; who had some."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=HANG_SECONDS))

    def run(transport: LocalTransport) -> bool:
        make = (makers or {}).get(transport.rank, lambda _: engines[transport.rank])
        rendezvous = Rendezvous(store, rank=transport.rank, num_ranks=len(engines))
        mailboxes = Mailboxes(
            rendezvous, CPU, make_engine=make, message_bytes=SIZE, timeout_seconds=timeout_seconds
        ).open()
        if mailboxes is None:
            return False
        work(transport, mailboxes)
        transport.barrier()
        mailboxes.close()
        return True

    return run_rank_threads(len(engines), run)


def message(edge: Edge, number: int) -> torch.Tensor:
    is_backward = edge.direction is Direction.BACKWARD
    generator = torch.Generator().manual_seed(10_000 * edge.source + 1000 * edge.target + 100 * is_backward + number)
    return torch.randint(256, (SIZE,), generator=generator, dtype=torch.uint8)


def talk(transport: LocalTransport, mailboxes: Mailboxes) -> None:
    """Ten numbered messages over every edge, the edges in turn; received edge by edge, the last first, two ahead."""
    sent, edges = [], ring_edges(transport.num_ranks)
    for number in range(10):
        for edge in edges:
            if edge.source == transport.rank:
                tensor = message(edge, number)
                sent.append((tensor, mailboxes.send(tensor, edge.target, edge.direction)))
    for edge in reversed([edge for edge in edges if edge.target == transport.rank]):
        posted = []
        for number in range(12):
            if number < 10:
                buffer = torch.empty(SIZE, dtype=torch.uint8)
                posted.append((buffer, mailboxes.post_receive(buffer, edge.source, edge.direction)))
            if number >= 2:
                buffer, arrived = posted[number - 2]
                arrived.wait()
                assert arrived.is_completed()
                assert torch.equal(buffer, message(edge, number - 2))
    for _, left in sent:
        left.wait()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_edge_carries_its_messages(num_ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    engines = engines_of(num_ranks)
    with caplog.at_level(logging.DEBUG, "mobius"):
        assert with_mailboxes(engines, talk) == [True] * num_ranks

    assert [engine.num_held for engine in engines] == [0] * num_ranks
    assert set(caplog.messages) == {"messages travel by copy engines from GPU to GPU"}


def test_one_edge_without_peer_access_makes_all_ranks_go_without(caplog: pytest.LogCaptureFixture) -> None:
    engines = engines_of(3)
    engines[1] = HostCopyEngine(11, peers=frozenset({10}))
    with caplog.at_level(logging.INFO, "mobius"):
        assert with_mailboxes(engines, talk) == [False] * 3

    assert set(caplog.messages) == {"messages travel over NCCL: rank 1: its GPU cannot write to the GPU of rank 2"}
    assert [engine.num_held for engine in engines] == [0] * 3


def fail(*arguments: object) -> Any:
    raise RuntimeError("it is forbidden\nfor a reason")


@pytest.mark.parametrize(
    "operation", ["can_access_peer", "new_queue", "register", "allocate", "export", "open_exported"]
)
@pytest.mark.parametrize("victim", [0, 2])
def test_what_one_rank_may_not_do_makes_all_ranks_go_without(
    operation: str, victim: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = engines_of(3)
    monkeypatch.setattr(engines[victim], operation, fail)
    with caplog.at_level(logging.INFO, "mobius"):
        assert with_mailboxes(engines, talk) == [False] * 3

    assert set(caplog.messages) == {f"messages travel over NCCL: rank {victim}: it is forbidden"}
    assert [engine.num_held for engine in engines] == [0] * 3


def test_contents_that_change_on_the_way_are_noticed_before_training(caplog: pytest.LogCaptureFixture) -> None:
    engines = [HostCopyEngine(10, peers=frozenset({11})), HostCopyEngine(11, peers=frozenset({10}), corrupts=True)]
    with caplog.at_level(logging.INFO, "mobius"):
        assert with_mailboxes(engines, talk) == [False, False]

    assert "arrived with wrong contents" in caplog.text
    assert [engine.num_held for engine in engines] == [0, 0]


def test_a_message_that_never_comes_is_called_off_and_releases_its_stream(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's counters' writes do not leave it, as if the device did not have the operation."""
    engines = engines_of(2)
    make = engines[1].new_queue

    def mute() -> Any:
        queue = make()
        queue.write_value = lambda address, value: None  # type: ignore[method-assign]
        return queue

    monkeypatch.setattr(engines[1], "new_queue", mute)
    with caplog.at_level(logging.INFO, "mobius"):
        assert with_mailboxes(engines, talk, timeout_seconds=0.5) == [False, False]

    assert set(caplog.messages) == {"messages travel over NCCL: rank 0: no message from rank 1 within 0.5 s"}
    assert [engine.num_held for engine in engines] == [0, 0]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_mailboxes_on_a_gpu_take_two_messages_for_activations_and_two_for_gradients(num_ranks: int) -> None:
    engines = engines_of(num_ranks)
    taken: dict[int, list[int]] = {}

    def weigh(transport: LocalTransport, mailboxes: Mailboxes) -> None:
        taken[transport.rank] = engines[transport.rank].allocated_bytes

    with_mailboxes(engines, weigh)

    pages = -(-SIZE // 4096) * 4096
    assert taken == {rank: [2 * pages, 2 * pages] for rank in range(num_ranks)}
