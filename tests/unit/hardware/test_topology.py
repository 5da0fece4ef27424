"""Which GPUs share links is read as the kernel shows it; the order of ranks is the best by arithmetic beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, permutations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness.plan_requests import (
    FLAT_VIRTUAL_MACHINE,
    FOUR_PER_SOCKET,
    ONE_SWITCH,
    SWITCHES_ON_TWO_SOCKETS,
    TWO_PER_BRIDGE,
    TWO_PER_ROOT_COMPLEX,
    TWO_SOCKETS,
    make_box,
)
from harness.schedules import spec_of

from mobius.hardware.topology import (
    Ancestor,
    Gpu,
    best_order,
    choose_order,
    common_ancestor,
    read_topology,
)
from mobius.schedule.build import build_schedule
from mobius.schedule.lanes import Lane
from mobius.schedule.render import place_actions

# Where the kernel has them: two behind a switch, one behind another port of the same host bridge, one on the other
# socket, in a PCI domain of its own.
PLACES = {
    "0000:19:00.0": ("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:08.0", 0),
    "0000:1a:00.0": ("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:10.0", 0),
    "0000:2b:00.0": ("pci0000:16/0000:16:03.0", 0),
    "0001:ab:00.0": ("pci0001:a0/0001:a0:01.1", 1),
}


def add_device(root: Path, address: str, way: str, node: str) -> None:
    """A device as sysfs has it: a folder in the tree of bridges, and a link to it by address."""
    folder = root / "sys/devices" / way / address
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(node + "\n")
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / address).symlink_to(Path("../../../devices") / way / address)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for address, (way, node) in PLACES.items():
        add_device(tmp_path, address, way, str(node))
    return tmp_path


def see_gpus(monkeypatch: pytest.MonkeyPatch, *addresses: str | None) -> None:
    """Make torch see these GPUs, in this order; None is one of which it does not tell the address."""
    gpus = []
    for index, address in enumerate(addresses):
        properties = SimpleNamespace(name=f"card {index}")
        if address is not None:
            numbers = [int(part, 16) for part in address.removesuffix(".0").split(":")]
            properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id = numbers
        gpus.append(properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)


def test_bridges_nodes_and_names_are_read_by_torch_s_numbers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, "0001:ab:00.0", "0000:1a:00.0")  # CUDA_VISIBLE_DEVICES=3,1

    first, second = read_topology(2, root=root)

    assert (first.name, first.address, first.numa_node) == ("card 0", "0001:ab:00.0", 1)
    assert first.bridges == ("pci0001:a0", "0001:a0:01.1")
    assert second.bridges == ("pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:10.0")


@pytest.mark.parametrize(
    ("seen", "missing"),
    [
        ((None, None, None), "the PCI address of GPU 0"),
        (("0000:19:00.0", "0000:99:00.0", None), "the path to GPU 1"),
    ],
)
def test_a_gpu_that_the_kernel_does_not_show_leaves_the_order_and_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch, seen: tuple[str | None, ...], missing: str
) -> None:
    see_gpus(monkeypatch, *seen)

    expected = (0, 1, 2), f"devices in their own order 0,1,2: the machine does not report {missing}"
    assert choose(read_topology(3, root=root)) == expected


def test_a_hypervisor_s_folders_above_the_host_bridge_are_not_bridges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hyper-V passes every device through in a PCI domain of its own, below its bus."""
    above = "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/47505500-0001-0000-3130-444531454238"
    for domain in ("0001", "0002", "0003"):
        add_device(tmp_path, f"{domain}:00:00.0", f"{above}/pci{domain}:00", "0")
    see_gpus(monkeypatch, "0001:00:00.0", "0002:00:00.0", "0003:00:00.0")

    gpus = read_topology(3, root=tmp_path)

    assert [gpu.bridges for gpu in gpus] == [("pci0001:00",), ("pci0002:00",), ("pci0003:00",)]
    assert {common_ancestor(*pair) for pair in combinations(gpus, 2)} == {Ancestor.NODE}
    assert best_order(gpus, num_microbatches=4) == (0, 1, 2)


SWITCH = ("pci0000:16", "0000:16:01.0", "0000:17:00.0")
WAYS = {
    "switch, port 8": Gpu(0, bridges=(*SWITCH, "0000:18:08.0"), numa_node=0),
    "switch, port 16": Gpu(0, bridges=(*SWITCH, "0000:18:10.0"), numa_node=0),
    "below another switch": Gpu(0, bridges=(*SWITCH, "0000:18:14.0", "0000:1c:00.0", "0000:1d:00.0"), numa_node=0),
    "below a bridge": Gpu(0, bridges=(*SWITCH, "0000:18:18.0", "0000:1f:00.0"), numa_node=0),
    "other port": Gpu(0, bridges=("pci0000:16", "0000:16:03.0"), numa_node=0),
    "other host bridge": Gpu(0, bridges=("pci0000:30", "0000:30:01.0"), numa_node=0),
    "other node": Gpu(0, bridges=("pci0000:97", "0000:97:01.0"), numa_node=1),
    "no node": Gpu(0, bridges=("pci0000:97", "0000:97:01.0")),
    "nothing told": Gpu(0),
}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("switch, port 8", "switch, port 16", Ancestor.PIX),
        ("switch, port 8", "below another switch", Ancestor.PXB),
        ("switch, port 8", "below a bridge", Ancestor.PXB),
        ("switch, port 8", "other port", Ancestor.PHB),
        ("other port", "other host bridge", Ancestor.NODE),
        ("other port", "other node", Ancestor.SYS),
        ("no node", "no node", Ancestor.PIX),
        ("other port", "nothing told", None),
    ],
)
def test_the_last_common_bridge_tells_what_two_gpus_have_in_common(
    one: str, other: str, expected: Ancestor | None
) -> None:
    assert common_ancestor(WAYS[one], WAYS[other]) == expected
    assert common_ancestor(WAYS[other], WAYS[one]) == expected


def choose(gpus: list[Gpu], *, num_microbatches: int = 8, is_given: bool = False) -> tuple[tuple[int, ...], str | None]:
    names = [str(gpu.index) for gpu in gpus]
    return choose_order(gpus, num_microbatches=num_microbatches, names=names, is_given=is_given)


# By hand. A group of GPUs that share a link should lie as far from each other in the ring as it goes: every second rank
# for two groups, opposite ranks for four pairs; within that, the lowest ranks get the lowest devices.
EXPECTED = [
    (TWO_PER_ROOT_COMPLEX, (0, 2, 1, 3)),
    (TWO_SOCKETS, (0, 2, 1, 3)),
    (SWITCHES_ON_TWO_SOCKETS, (0, 4, 1, 5, 2, 6, 3, 7)),
    (FOUR_PER_SOCKET, (0, 4, 1, 5, 2, 6, 3, 7)),
    (TWO_PER_BRIDGE, (0, 2, 4, 6, 1, 3, 5, 7)),
    (ONE_SWITCH, (0, 1, 2, 3)),
    (FLAT_VIRTUAL_MACHINE, (0, 1, 2, 3)),
]


@pytest.mark.parametrize(("gpus", "expected"), EXPECTED)
def test_a_machine_gets_the_order_found_by_hand(gpus: list[Gpu], expected: tuple[int, ...]) -> None:
    assert best_order(gpus, num_microbatches=8) == expected


PERCENT = {"PIX": 100, "PXB": 100, "PHB": 50, "NODE": 10, "SYS": 0}


def cost_by_hand(gpus: list[Gpu], order: Sequence[int], period: int) -> tuple[int, int, Sequence[int]]:
    """Loads that share a link, then the distance from the listed order."""
    distances = {(a, b): abs(a - b) for a, b in combinations(range(len(order)), 2)}
    overlap = sum(
        PERCENT[str(common_ancestor(gpus[order[a]], gpus[order[b]]))] * ((period - d) ** 2 + d**2)
        for (a, b), d in distances.items()
    )
    return overlap, sum(abs(rank - gpu) for rank, gpu in enumerate(order)), order


@pytest.mark.parametrize("seed", range(2))
def test_no_order_costs_less_than_the_one_that_is_chosen(seed: int) -> None:
    """Nonsense, but a lot of it: every GPU somewhere in a tree, on some node."""
    numbers = random.Random(seed)
    gpus = [
        Gpu(index, bridges=tuple(f"{level} {numbers.randrange(2)}" for level in "hbsp"), numa_node=numbers.randrange(2))
        for index in range(6)
    ]

    best = best_order(gpus, num_microbatches=6)

    assert best == min(permutations(range(6)), key=lambda order: cost_by_hand(gpus, order, 6))


def test_loads_start_as_the_score_assumes() -> None:
    """A rank's loads start a period apart, and each rank's a microbatch after those of the rank before."""
    for num_ranks, num_microbatches in ((4, 4), (4, 8), (4, 2), (8, 8)):
        schedule = build_schedule(spec_of(num_ranks, 4, num_microbatches, 2))
        timeline = place_actions(schedule, forward_slots=10, backward_slots=20)
        period = 10 * max(num_microbatches, num_ranks)
        starts = [[span.start for span in spans if span.lane is Lane.LOAD] for spans in timeline]
        # The first two of a rank are loaded before anything is computed; the next two under its forwards.
        assert [start[3] - start[2] for start in starts] == [period] * num_ranks
        assert [start[2] - starts[0][2] for start in starts] == [10 * rank for rank in range(num_ranks)]
        if num_microbatches >= num_ranks:  # in backward the last rank is the first, by the length of a backward
            backward = [start[-1] for start in starts]
            assert [backward[0] - start for start in backward] == [20 * rank for rank in range(num_ranks)]


def test_the_choice_is_told_in_one_line_with_the_user_s_names() -> None:
    choice = choose_order(TWO_PER_ROOT_COMPLEX, num_microbatches=4, names=["4", "5", "6", "7"], is_given=False)

    expected = "devices in the order 4,6,5,7: neighbouring ranks load over different root complexes"
    assert choice == ((0, 2, 1, 3), expected)


def test_a_given_order_is_kept_and_a_better_one_named() -> None:
    line = (
        "devices in the given order 0,1,2,3; 0,2,1,3 is better: neighbouring ranks load over different root complexes"
    )
    assert choose(TWO_PER_ROOT_COMPLEX, is_given=True) == ((0, 1, 2, 3), line)


def test_a_flat_tree_leaves_the_order_and_says_so() -> None:
    line = "devices in their own order 0,1,2,3: the machine reports equal sharing for all pairs"
    assert choose(FLAT_VIRTUAL_MACHINE) == ((0, 1, 2, 3), line)
    assert choose(ONE_SWITCH) == ((0, 1, 2, 3), None)  # flat, but that is told by a switch


def test_one_or_two_devices_have_nothing_to_choose() -> None:
    assert choose(make_box(2, switch=2)) == ((0, 1), None)


def test_many_devices_are_placed_well_though_not_by_search() -> None:
    """Sixteen GPUs, four behind each of four switches, listed switch by switch."""
    order, line = choose(make_box(16, switch=4), num_microbatches=16)

    groups = [gpu // 4 for gpu in order]
    assert sorted(order) == list(range(16))
    assert all(len({groups[(start + step) % 16] for step in range(4)}) == 4 for start in range(16))
    assert line is not None
    assert line.endswith("(not all orders of 16 devices were compared)")
