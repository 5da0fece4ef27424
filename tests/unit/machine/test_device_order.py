"""All ranks get the order that the first one found, and a list that is an order of the user's is known as one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import combinations

import pytest
from torch.distributed import HashStore

from mobius.machine.device_order import agree_on_order, device_names, is_given_order
from mobius.machine.topology import Ancestor, Gpu, Link, Topology
from mobius.messages.local import LocalTransport, run_rank_threads
from mobius.messages.store_meeting import StoreMeeting

BOX = Topology(
    tuple(Gpu(index, address=f"0000:{index + 1:x}1:00.0") for index in range(4)),
    tuple(Link(a, b, Ancestor.PHB if a // 2 == b // 2 else Ancestor.SYS) for a, b in combinations(range(4), 2)),
)
"""Two GPUs under each of two root complexes."""


def agree(survey: Callable[[int], Topology], listed: str | None, num_ranks: int = 4) -> list[tuple[int, ...]]:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))

    def run(transport: LocalTransport) -> tuple[int, ...]:
        meeting = StoreMeeting(store, rank=transport.rank, num_ranks=num_ranks)
        return agree_on_order(meeting, survey, listed=listed, num_microbatches=4)

    return run_rank_threads(num_ranks, run)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="mobius.machine.device_order")
    return caplog


@pytest.mark.parametrize(("listed", "shown"), [(None, "0,2,1,3"), ("4,5,6,7", "4,6,5,7"), ("0,1,2,3,4", "0,2,1,3")])
def test_every_rank_gets_the_order_of_the_first_which_alone_looks_and_tells(
    log: pytest.LogCaptureFixture, listed: str | None, shown: str
) -> None:
    asked: list[int] = []

    def survey(num_gpus: int) -> Topology:
        asked.append(num_gpus)
        return BOX

    assert agree(survey, listed) == [(0, 2, 1, 3)] * 4
    assert asked == [4]
    assert log.messages == [f"devices in the order {shown}: neighbouring ranks load over different root complexes"]


def test_an_order_of_the_user_s_stays_and_a_better_one_is_named_by_the_user_s_numbers(
    log: pytest.LogCaptureFixture,
) -> None:
    assert agree(lambda _: BOX, "3,2,1,0") == [(0, 1, 2, 3)] * 4

    (line,) = log.messages
    assert line.startswith("devices in the given order 3,2,1,0; 3,1,2,0 is better: ")


def test_a_good_order_of_the_user_s_is_taken_without_a_word(log: pytest.LogCaptureFixture) -> None:
    place = {gpu: index for index, gpu in enumerate((0, 2, 1, 3))}
    links = []
    for link in BOX.links:
        first, second = sorted((place[link.first], place[link.second]))
        links.append(replace(link, first=first, second=second))

    assert agree(lambda _: Topology(BOX.gpus, tuple(links)), "0,2,1,3") == [(0, 1, 2, 3)] * 4
    assert log.messages == []


@pytest.mark.parametrize(
    ("listed", "addresses", "expected"),
    [
        (None, "abc", False),
        ("", "abc", False),
        ("0,1,2", "abc", False),
        ("4, 5, 7", "abc", False),
        ("9,10,11", "abc", False),  # as numbers, not as texts
        ("0,2,1", "abc", True),
        ("0,1,2,9,3", "abc", False),  # only the devices of the ranks count
        ("GPU-5f,GPU-11,GPU-80", "abc", False),
        ("GPU-5f,GPU-11,GPU-80", "acb", True),
    ],
)
def test_a_list_is_an_order_where_it_does_not_ascend(listed: str | None, addresses: str, expected: bool) -> None:
    gpus = tuple(Gpu(index, address=f"0000:{letter}0:00.0") for index, letter in enumerate(addresses))
    links = tuple(Link(a, b) for a, b in combinations(range(3), 2))

    assert is_given_order(listed, Topology(gpus, links)) is expected


@pytest.mark.parametrize(
    ("listed", "expected"), [(None, ["0", "1"]), ("3, 1", ["3", "1"]), ("GPU-5,GPU-6,GPU-7", ["GPU-5", "GPU-6"])]
)
def test_devices_are_called_what_the_user_calls_them(listed: str | None, expected: list[str]) -> None:
    assert list(device_names(listed, 2)) == expected
