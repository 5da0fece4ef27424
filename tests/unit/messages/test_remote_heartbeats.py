"""Watchdogs of two nodes hear each other through a store: that something is done, and who tells what."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore, Store

from mobius.heartbeats import HeartbeatSocket, WatchdogMessage
from mobius.messages.remote_heartbeats import RemoteHeartbeats
from mobius.ranks import Ranks

SOON = 0.05


def comes(condition: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


class Seat:
    """A rank of two nodes of two."""

    def __init__(self, store: Store, rank: int) -> None:
        ranks = Ranks(rank, 4, rank % 2, num_replicas=2, num_nodes=2)
        self.nodes = RemoteHeartbeats(ranks, open=lambda rank, num_ranks: store)
        self.heard = list[tuple[WatchdogMessage, int]]()
        self.nodes.start(lambda call, other: self.heard.append((call, other)), SOON)


@pytest.fixture
def seats() -> Iterator[list[Seat]]:
    store = HashStore()
    both = [Seat(store, 0), Seat(store, 3)]
    time.sleep(4 * SOON)  # each has read how far the other is
    yield both
    for seat in both:
        seat.nodes.close()


def test_something_that_is_done_is_heard_on_the_other_node_and_not_on_its_own(seats: list[Seat]) -> None:
    first, other = seats
    assert not other.heard
    first.nodes.send(WatchdogMessage.PROGRESS)
    assert comes(lambda: other.heard == [(WatchdogMessage.PROGRESS, 0)])
    time.sleep(4 * SOON)
    assert other.heard == [(WatchdogMessage.PROGRESS, 0)]  # once
    assert not first.heard


def test_who_tells_is_heard_in_order_with_where_it_is(seats: list[Seat]) -> None:
    first, other = seats
    other.nodes.send(WatchdogMessage.REPORT)
    other.nodes.send(WatchdogMessage.REPORTED, "rank 3: in step 5")
    other.nodes.send(WatchdogMessage.END)  # behind it the process ends
    assert comes(lambda: len(first.heard) == 3)
    assert first.heard == [(WatchdogMessage.REPORT, 3), (WatchdogMessage.REPORTED, 3), (WatchdogMessage.END, 3)]
    assert not other.heard


def test_a_rank_hears_its_node_and_the_others_at_one_socket() -> None:
    store = HashStore()
    nodes = [
        RemoteHeartbeats(Ranks(rank, 2, 0, num_replicas=2, num_nodes=2), open=lambda *_: store) for rank in range(2)
    ]
    calls = [HeartbeatSocket(rank, [rank], remote=nodes[rank], poll_seconds=SOON) for rank in range(2)]
    try:
        assert calls[0].is_reachable
        assert calls[0].other_ranks == {1}
        calls[1].broadcast(WatchdogMessage.REPORTED, "rank 1: at the data")
        assert calls[0].listen(20) == (WatchdogMessage.REPORTED, 1)
        assert calls[0].report_of(1) == "rank 1: at the data"
        assert calls[1].listen(0.3) is None
    finally:
        for call in calls:
            call.close()


def test_a_store_that_is_gone_is_silence() -> None:
    def refuse(rank: int, num_ranks: int) -> Store:
        raise RuntimeError("connection refused")

    nodes = RemoteHeartbeats(Ranks(0, 2, 0, num_replicas=2, num_nodes=2), open=refuse)
    nodes.start(lambda call, rank: None, SOON)
    begin = time.monotonic()
    nodes.send(WatchdogMessage.REPORT)
    nodes.send(WatchdogMessage.END)
    nodes.close()
    assert time.monotonic() - begin < 5
