"""Ranks that have no process group yet tell each other things through a store, and never read an earlier meeting's."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from mobius.errors import TransportError
from mobius.runtime.store_meeting import StoreMeeting


def all_ranks(store: HashStore, num_ranks: int, *, told: list[list[object]]) -> list[list[list[object]]]:
    """Every rank gathers each of its values in turn, in a thread of its own; what each of them heard."""
    heard: list[list[list[object]]] = [[] for _ in range(num_ranks)]

    def meet(rank: int) -> None:
        meeting = StoreMeeting(store, rank=rank, num_ranks=num_ranks)
        heard[rank] = [meeting.gather(value) for value in told[rank]]

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return heard


def test_every_rank_hears_all_values_in_the_order_of_ranks() -> None:
    told: list[list[object]] = [[("first", 0), None], [("first", 1), b"\x00\xff"], [("first", 2), {3: 4}]]

    heard = all_ranks(HashStore(), 3, told=told)

    assert heard == [[[("first", 0), ("first", 1), ("first", 2)], [None, b"\x00\xff", {3: 4}]]] * 3


def test_a_later_meeting_at_the_same_store_does_not_hear_the_earlier_one() -> None:
    store = HashStore()

    first = all_ranks(store, 2, told=[["a"], ["b"]])
    second = all_ranks(store, 2, told=[["c"], ["d"]])

    assert first == [[["a", "b"]]] * 2
    assert second == [[["c", "d"]]] * 2


def test_a_rank_that_never_answers_stops_the_others_with_its_number() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))

    with pytest.raises(TransportError, match="rank 1 did not answer"):
        StoreMeeting(store, rank=0, num_ranks=2).gather("alone")
