"""The order of devices is the best there is, by arithmetic that counts every slot of time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, permutations

import pytest
from harness.plan_requests import (
    BRIDGED_PAIRS,
    FLAT_VIRTUAL_MACHINE,
    NVSWITCH_IN_PAIRS,
    NVSWITCH_ON_TWO_SOCKETS,
    ONE_SWITCH,
    SWITCHES_ON_TWO_SOCKETS,
    TWO_PER_ROOT_COMPLEX,
    TWO_SOCKETS,
    make_box,
)

from mobius.hardware.cross_mapping import DeviceOrder, best_order, choose_order
from mobius.hardware.topology import Ancestor, Gpu, Link, Topology
from mobius.schedule import ScheduleSpec, build_schedule
from mobius.schedule.lanes import Lane
from mobius.schedule.render import place_actions

PERCENT = {"PIX": 100, "PXB": 100, "PHB": 50, "NODE": 10, "SYS": 0}


def names_of(topology: Topology) -> list[str]:
    return [str(gpu.index) for gpu in topology.gpus]


def choose(topology: Topology, *, num_microbatches: int = 8, is_given: bool = False) -> DeviceOrder:
    return choose_order(topology, num_microbatches=num_microbatches, names=names_of(topology), is_given=is_given)


# By hand. A group of GPUs that share a link should lie as far from each other in the ring as it goes: every second rank
# for two groups, opposite ranks for four pairs; within that, the lowest ranks get the lowest devices.
EXPECTED = [
    (TWO_PER_ROOT_COMPLEX, (0, 2, 1, 3)),
    (TWO_SOCKETS, (0, 2, 1, 3)),
    (SWITCHES_ON_TWO_SOCKETS, (0, 4, 1, 5, 2, 6, 3, 7)),
    (NVSWITCH_ON_TWO_SOCKETS, (0, 4, 1, 5, 2, 6, 3, 7)),
    (NVSWITCH_IN_PAIRS, (0, 2, 4, 6, 1, 3, 5, 7)),
    (BRIDGED_PAIRS, (0, 1, 2, 3)),  # loads share equally: the bridges decide, and lie right already
    (ONE_SWITCH, (0, 1, 2, 3)),
    (FLAT_VIRTUAL_MACHINE, (0, 1, 2, 3)),
]


@pytest.mark.parametrize(("topology", "expected"), EXPECTED)
def test_a_machine_gets_the_order_found_by_hand(topology: Topology, expected: tuple[int, ...]) -> None:
    assert best_order(topology, num_microbatches=8) == expected


def cost_by_hand(topology: Topology, order: Sequence[int], period: int) -> tuple[int, int, int, Sequence[int]]:
    """Loads that share a link, then slow edges of the ring, then the distance from the listed order."""
    distances = {(a, b): abs(a - b) for a, b in combinations(range(len(order)), 2)}
    overlap = sum(
        PERCENT[str(topology.link(order[a], order[b]).ancestor)] * ((period - d) ** 2 + d**2)
        for (a, b), d in distances.items()
    )
    slow = 0
    for rank, gpu in enumerate(order):
        link = topology.link(gpu, order[(rank + 1) % len(order)])
        steps = ["PIX or PXB", "PHB", "NODE", "SYS"]
        way = next(place for place, names in enumerate(steps, start=1) if str(link.ancestor) in names)
        slow += 36 - link.num_nvlinks if link.num_nvlinks else 1000 * (way if link.has_p2p else 5)
    return overlap, slow, sum(abs(rank - gpu) for rank, gpu in enumerate(order)), order


@pytest.mark.parametrize("seed", range(2))
def test_no_order_costs_less_than_the_one_that_is_chosen(seed: int) -> None:
    topology = random_topology(random.Random(seed), 6)

    best = best_order(topology, num_microbatches=6)

    assert best == min(permutations(range(6)), key=lambda order: cost_by_hand(topology, order, 6))


def random_topology(numbers: random.Random, num_gpus: int) -> Topology:
    """Nonsense, but a lot of it: every pair another ancestor, some NVLinks."""
    links = [
        Link(a, b, numbers.choice(list(Ancestor)), numbers.choice([0, 0, 2]), numbers.random() < 0.5)
        for a, b in combinations(range(num_gpus), 2)
    ]
    return Topology(tuple(Gpu(index) for index in range(num_gpus)), tuple(links))


def test_loads_start_as_the_score_assumes() -> None:
    """A rank's loads start a period apart, and each rank's a microbatch after those of the rank before."""
    for num_ranks, num_microbatches in ((4, 4), (4, 8), (4, 2), (8, 8)):
        schedule = build_schedule(ScheduleSpec.of(num_ranks, 4, num_microbatches, 2))
        timeline = place_actions(schedule, forward_slots=10, backward_slots=20)
        period = 10 * max(num_microbatches, num_ranks)
        starts = [[span.start for span in spans if span.lane is Lane.LOAD] for spans in timeline]
        # The first two of a rank are loaded before anything is computed; the next two under its forwards.
        assert [start[3] - start[2] for start in starts] == [period] * num_ranks
        assert [start[2] - starts[0][2] for start in starts] == [10 * rank for rank in range(num_ranks)]
        if num_microbatches >= num_ranks:  # in backward the last rank is the first, by the length of a backward
            backward = [start[-1] for start in starts]
            assert [backward[0] - start for start in backward] == [20 * rank for rank in range(num_ranks)]


def test_bridged_gpus_become_neighbours_where_loads_do_not_care() -> None:
    """Bridges between 0 and 2 and between 1 and 3: the listed order has no neighbours on one, a ring can have two."""
    choice = choose(make_box(4, (4, Ancestor.NODE), nvlinks=4, bridged={(0, 2), (1, 3)}))

    # 0-1, 1=3, 3-2, 2=0; the ring 0=2, 2-1, 1=3, 3-0 has as many, and is as far from the listed order.
    assert choice.order == (0, 1, 3, 2)
    assert choice.line == "devices in the order 0,1,3,2: more neighbouring ranks are on fast links"


def test_the_choice_is_told_in_one_line_with_the_user_s_names() -> None:
    topology = TWO_PER_ROOT_COMPLEX

    choice = choose_order(topology, num_microbatches=4, names=["4", "5", "6", "7"], is_given=False)

    expected = "devices in the order 4,6,5,7: neighbouring ranks load over different root complexes"
    assert choice == DeviceOrder((0, 2, 1, 3), expected)


def test_a_given_order_is_kept_and_a_better_one_named() -> None:
    choice = choose(TWO_PER_ROOT_COMPLEX, is_given=True)

    assert choice.order == (0, 1, 2, 3)
    line = (
        "devices in the given order 0,1,2,3; 0,2,1,3 is better: neighbouring ranks load over different root complexes"
    )
    assert choice.line == line


def test_a_topology_that_is_not_known_leaves_the_order_and_says_why() -> None:
    gpus = tuple(Gpu(index) for index in range(4))
    links = tuple(Link(a, b) for a, b in combinations(range(4), 2))

    choice = choose(Topology(gpus, links))

    assert choice.order == (0, 1, 2, 3)
    assert choice.line is not None
    assert "does not report the PCI address of GPU 0" in choice.line


def test_a_flat_tree_leaves_the_order_and_says_so() -> None:
    choice = choose(FLAT_VIRTUAL_MACHINE)
    assert choice.order == (0, 1, 2, 3)
    assert choice.line == "devices in their own order 0,1,2,3: the machine reports equal sharing for all pairs"
    assert choose(ONE_SWITCH).line is None  # flat, but that is told by a switch


def test_one_or_two_devices_have_nothing_to_choose() -> None:
    two = Topology((Gpu(0), Gpu(1)), (Link(0, 1, Ancestor.PIX),))

    assert choose(two) == DeviceOrder((0, 1), None)


def test_many_devices_are_placed_well_though_not_by_search() -> None:
    """Sixteen GPUs, four behind each of four switches, listed switch by switch."""
    links = tuple(Link(a, b, Ancestor.PIX if a // 4 == b // 4 else Ancestor.SYS) for a, b in combinations(range(16), 2))
    topology = Topology(tuple(map(Gpu, range(16))), links)

    choice = choose(topology, num_microbatches=16)

    groups = [gpu // 4 for gpu in choice.order]
    assert sorted(choice.order) == list(range(16))
    assert all(len({groups[(start + step) % 16] for step in range(4)}) == 4 for start in range(16))
    assert choice.line is not None
    assert choice.line.endswith("(not every order of 16 devices was looked at)")
