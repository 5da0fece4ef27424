"""Ranks tell each other things as data, and a step that fails on one of them ends it for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from harness.local_transport import together
from torch.distributed import HashStore, PrefixStore

from mobius.distributed.rendezvous import (
    JsonValue,
    Rendezvous,
    decode_json,
    encode_json,
    post_failure_at,
    run_steps_together,
)
from mobius.errors import TransportError


def test_each_step_is_given_what_all_ranks_gave_in_the_one_before() -> None:
    outcomes = together(
        lambda rank, seat: run_steps_together(seat, [lambda _: rank, lambda gathered: (rank, sum(gathered))])
    )

    assert outcomes == [([[0, 3], [1, 3], [2, 3]], None)] * 3


@pytest.mark.parametrize("error", [OSError("no\nmore"), RuntimeError("no")])
def test_what_fails_on_one_rank_ends_it_on_all_and_no_later_step_is_taken(error: Exception) -> None:
    taken: list[int] = []

    def steps_of(rank: int) -> list[Callable[[list[Any]], object]]:
        def fail(_: list[Any]) -> None:
            if rank == 1:
                raise error

        return [fail, lambda _: taken.append(rank)]

    assert together(lambda rank, seat: run_steps_together(seat, steps_of(rank))) == [([], "rank 1: no")] * 3
    assert taken == []


@pytest.mark.parametrize("value", [None, True, 3, -1.5, "\x00\u00ff\ud800", [], [[1], {"a": None}], {"": [0.1]}])
def test_what_may_be_told_arrives_as_it_was(value: JsonValue) -> None:
    assert decode_json(encode_json(value).encode(), by=0) == value


def test_every_rank_hears_all_values_in_the_order_of_ranks() -> None:
    told: list[list[JsonValue]] = [[["first", 0], None], [["first", 1], "\x00\u00ff"], [["first", 2], {"3": 4.5}]]

    heard = together(lambda rank, seat: [seat.gather(value) for value in told[rank]])

    assert heard == [[[["first", 0], ["first", 1], ["first", 2]], [None, "\x00\u00ff", {"3": 4.5}]]] * 3


def test_a_later_meeting_at_the_same_store_does_not_hear_the_earlier_one() -> None:
    store = HashStore()

    def gather(values: str) -> list[object]:
        return together(lambda rank, _: Rendezvous(store, rank=rank, num_ranks=2).gather(values[rank]), 2)

    assert gather("ab") == [["a", "b"]] * 2
    assert gather("cd") == [["c", "d"]] * 2


def test_a_rank_that_never_answers_stops_the_others_with_its_number() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))

    with pytest.raises(TransportError, match=r"rank 1, 2 did not answer .*\(1 of 3 did\)"):
        Rendezvous(store, rank=0, num_ranks=3).gather("alone")


def test_a_word_of_one_that_has_ended_is_told_at_once() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    words = PrefixStore("start 1", store)
    post_failure_at(store, 1, "rank 1 (host1) has ended: no such folder")
    post_failure_at(store, 1, "rank 2 (host1) has ended: it lost rank 1")
    begin = time.monotonic()

    with pytest.raises(TransportError, match=r"^rank 0 stops: rank 1 \(host1\) has ended: no such folder$"):
        Rendezvous(words, rank=0, num_ranks=3).gather("alone")
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("told", ["", "[1", "\udcff", "[" * 100_000], ids=["nothing", "half", "no text", "deep"])
def test_what_a_stranger_writes_to_the_store_is_one_error(told: str) -> None:
    store = HashStore()
    rendezvous = Rendezvous(store, rank=0, num_ranks=2)
    store.set("mobius/1/0/1", told.encode("utf-8", "surrogateescape"))

    with pytest.raises(TransportError, match=r"the value from rank 1 cannot be read \(.*same version of Mobius"):
        rendezvous.gather("the first")
