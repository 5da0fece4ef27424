"""A topology knows what two GPUs have in common, and shows it as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.plan_requests import BRIDGED_PAIRS

from mobius.hardware.topology import Ancestor, Gpu, Link, Topology, common_ancestor

WAYS = {
    "switch, port 8": Gpu(0, bridges=("pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:08.0"), numa_node=0),
    "switch, port 16": Gpu(0, bridges=("pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:10.0"), numa_node=0),
    "below another switch": Gpu(
        0,
        bridges=("pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:14.0", "0000:1c:00.0", "0000:1d:00.0"),
        numa_node=0,
    ),
    "below a bridge": Gpu(
        0, bridges=("pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:18.0", "0000:1f:00.0"), numa_node=0
    ),
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


def test_a_pair_of_which_nothing_is_told_makes_the_topology_unknown() -> None:
    gpus = (replace(WAYS["other port"], index=0), Gpu(1), Gpu(2))
    links = (Link(0, 1, Ancestor.SYS), Link(0, 2, None, num_nvlinks=4, has_p2p=True), Link(1, 2))

    topology = Topology(gpus, links)

    assert (topology.link(1, 0), topology.link(0, 2)) == links[:2]
    assert topology.unknown_reason == "the machine does not report the PCI address of GPU 0"


def test_the_table_shows_what_is_known_of_each_pair() -> None:
    lines = BRIDGED_PAIRS.describe().splitlines()

    assert lines[0].split() == ["GPU0", "GPU1", "GPU2", "GPU3", "node", "PCI", "address"]
    assert lines[2].split() == ["GPU1", "NV4/NODE", "X", "NODE*", "NODE*", "?", "0000:21:00.0"]
