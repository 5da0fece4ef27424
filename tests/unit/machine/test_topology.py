"""A topology reads its own record, knows what two GPUs have in common, and refuses what cannot be one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mobius.machine.topology import Ancestor, Gpu, Link, Topology, common_ancestor

FOLDER = Path(__file__).parent / "topologies"
RECORDED = sorted(FOLDER.glob("*.json"))


def read(name: str) -> Topology:
    return Topology.from_json((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_machine_is_written_as_it_was_read(path: Path) -> None:
    assert Topology.from_json(path.read_text()).to_json() == path.read_text()


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_bridges_of_a_recorded_machine_say_what_its_table_says(path: Path) -> None:
    topology = Topology.from_json(path.read_text())

    for link in topology.links:
        told = common_ancestor(topology.gpus[link.first], topology.gpus[link.second])
        assert told == link.ancestor or not topology.gpus[0].bridges


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


def test_two_host_bridges_of_a_machine_without_nodes_are_on_its_only_node() -> None:
    one, other = (Gpu(0, bridges=(f"pci0000:{bus}", f"0000:{bus}:01.0")) for bus in ("00", "40"))

    assert common_ancestor(one, other) == Ancestor.NODE


def test_a_pair_of_which_nothing_is_told_makes_the_topology_unknown_until_it_is_measured() -> None:
    gpus = (replace(WAYS["other port"], index=0), Gpu(1), Gpu(2))
    links = (Link(0, 1, Ancestor.SYS), Link(0, 2, None, num_nvlinks=4, has_p2p=True), Link(1, 2))

    topology = Topology(gpus, links)

    assert (topology.link(1, 0), topology.link(0, 2)) == links[:2]
    assert topology.unknown_reason == "the machine does not tell the PCI address of GPU 0"
    assert topology.with_slowdowns({(0, 1): 1.0, (0, 2): 2.0, (1, 2): 1.0}).unknown_reason is None


def test_the_table_shows_what_is_known_of_each_pair() -> None:
    topology = read("nvlink_pairs").with_slowdowns(
        {(a, b): 1.96 if (a, b) == (1, 2) else 1.0 for a in range(4) for b in range(a + 1, 4)}
    )

    lines = topology.describe().splitlines()

    assert lines[0].split() == ["GPU0", "GPU1", "GPU2", "GPU3", "node", "PCI", "address"]
    words = ["GPU1", "NV4/NODE", "x1.0", "X", "NODE*", "x2.0", "NODE*", "x1.0", "0", "0000:41:00.0"]
    assert lines[2].split()[:10] == words


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda record: record["links"].pop(), "does not have one link"),
        (lambda record: record["gpus"].pop(0), "not numbered"),
        (lambda record: record["links"][0].update(ancestor="QPI"), "QPI"),
        (lambda record: record["links"][0].update(slowdown=float("nan")), "not a finite number"),
        (lambda record: record["gpus"][0].update(colour="green"), "no recorded topology"),
        (lambda record: record.pop("gpus"), "no recorded topology"),
    ],
)
def test_a_record_that_is_no_topology_is_refused_with_the_reason(change: object, problem: str) -> None:
    record = json.loads((FOLDER / "one_switch.json").read_text())
    assert callable(change)
    change(record)

    with pytest.raises(ValueError, match=problem):
        Topology.from_json(json.dumps(record))


@pytest.mark.parametrize("text", ["", "[]", "null", "{"])
def test_a_text_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Topology.from_json(text)
