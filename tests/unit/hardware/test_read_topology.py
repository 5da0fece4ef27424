"""What the kernel shows of GPUs is read as it is, by torch's numbers; what it does not show is left out."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mobius.hardware.cross_mapping import best_order
from mobius.hardware.read_topology import read_topology
from mobius.hardware.topology import Ancestor, Topology

# Where the kernel has them: two behind a switch, one behind another port of the same host bridge, one on the other
# socket, in a PCI domain of its own.
PLACES = {
    "0000:19:00.0": ("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:08.0", 0),
    "0000:1a:00.0": ("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:10.0", 0),
    "0000:2b:00.0": ("pci0000:16/0000:16:03.0", 0),
    "0001:ab:00.0": ("pci0001:a0/0001:a0:01.1", 1),
}


def add_device(root: Path, address: str, way: str, node: str) -> Path:
    """A device as sysfs has it: a folder in the tree of bridges, and a link to it by address."""
    folder = root / "sys/devices" / way / address
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(node + "\n")
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / address).symlink_to(Path("../../../devices") / way / address)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for address, (way, node) in PLACES.items():
        add_device(tmp_path, address, way, str(node))
    return tmp_path


def see_gpus(
    monkeypatch: pytest.MonkeyPatch, *addresses: str | None, p2p: frozenset[tuple[int, int]] = frozenset()
) -> None:
    """Make torch see these GPUs, in this order; None is one of which it does not tell the address. There is no NVML."""
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    gpus = []
    for index, address in enumerate(addresses):
        properties = SimpleNamespace(name=f"card {index}")
        if address is not None:
            numbers = [int(part, 16) for part in address.removesuffix(".0").split(":")]
            properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id = numbers
        gpus.append(properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) in p2p)


def test_bridges_nodes_and_names_are_read_by_torch_s_numbers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, "0001:ab:00.0", "0000:1a:00.0")  # CUDA_VISIBLE_DEVICES=3,1

    topology = read_topology(2, root=root)

    first, second = topology.gpus
    assert (first.name, first.address, first.numa_node) == ("card 0", "0001:ab:00.0", 1)
    assert first.bridges == ("pci0001:a0", "0001:a0:01.1")
    assert second.bridges == ("pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:10.0")


def test_what_gpus_have_in_common_follows_from_the_tree(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, *PLACES)

    topology = read_topology(4, root=root)

    assert topology.link(0, 1).ancestor is Ancestor.PIX
    assert topology.link(0, 2).ancestor is topology.link(1, 2).ancestor is Ancestor.PHB
    assert {topology.link(gpu, 3).ancestor for gpu in range(3)} == {Ancestor.SYS}
    assert topology.unknown_reason is None


@pytest.mark.parametrize("seen", [(None, None, None), ("0000:99:00.0", "0000:9a:00.0", "0000:9b:00.0")])
def test_gpus_that_the_kernel_does_not_show_leave_the_topology_unknown(
    root: Path, monkeypatch: pytest.MonkeyPatch, seen: tuple[str | None, ...]
) -> None:
    see_gpus(monkeypatch, *seen)

    topology = read_topology(3, root=root)

    assert topology.unknown_reason is not None
    assert {link.ancestor for link in topology.links} == {None}


def test_a_hypervisor_s_folders_above_the_host_bridge_are_not_bridges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hyper-V passes every device through in a PCI domain of its own, below its bus."""
    above = "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/47505500-0001-0000-3130-444531454238"
    for domain in ("0001", "0002", "0003"):
        add_device(tmp_path, f"{domain}:00:00.0", f"{above}/pci{domain}:00", "0")
    see_gpus(monkeypatch, "0001:00:00.0", "0002:00:00.0", "0003:00:00.0")

    topology = read_topology(3, root=tmp_path)

    assert [gpu.bridges for gpu in topology.gpus] == [("pci0001:00",), ("pci0002:00",), ("pci0003:00",)]
    assert {link.ancestor for link in topology.links} == {Ancestor.NODE}
    assert best_order(topology, num_microbatches=4) == (0, 1, 2)


class FakeNvml:
    """The module pynvml as two bridged pairs, a card without NVLink beside them, and a driver that tells levels."""

    NVML_TOPOLOGY_INTERNAL, NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_MULTIPLE = 0, 10, 20
    NVML_TOPOLOGY_HOSTBRIDGE, NVML_TOPOLOGY_NODE, NVML_TOPOLOGY_SYSTEM = 30, 40, 50
    NVML_FEATURE_ENABLED, NVML_NVLINK_MAX_LINKS = 1, 6
    NVML_NVLINK_DEVICE_TYPE_GPU, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 0, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, ends: dict[str, list[str]], level: int = 40, *, fails: str = "") -> None:
        self._ends, self._level, self._fails = ends, level, fails
        self.num_open = 0

    def _may(self, name: str) -> None:
        if name == self._fails:
            raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None:  # noqa: N802
        self._may("init")
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> str:  # noqa: N802
        self._may("handle")
        return address

    def nvmlDeviceGetTopologyCommonAncestor(self, one: str, other: str) -> int:  # noqa: N802
        self._may("ancestor")
        return self._level

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:  # noqa: N802
        if link >= len(self._ends[handle]):
            raise self.NVMLError("Not Supported")
        return 1 if self._ends[handle][link] else 0

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: str, link: int) -> int:  # noqa: N802
        return 2 if self._ends[handle][link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: str, link: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=f"0000{self._ends[handle][link]}".upper().encode())

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, index: int) -> int:  # noqa: N802
        self._may("p2p")
        return 0


def read_with(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, root: Path) -> Topology:
    """The topology of three GPUs where nvidia-ml-py is installed."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    return read_topology(3, root)


ADDRESSES = ("0000:19:00.0", "0000:1a:00.0", "0000:2b:00.0")


def test_nvlinks_between_two_gpus_are_counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, *ADDRESSES)
    nvml = FakeNvml({ADDRESSES[0]: [ADDRESSES[2]] * 3 + [""], ADDRESSES[1]: [], ADDRESSES[2]: [ADDRESSES[0]] * 3})

    topology = read_with(monkeypatch, nvml, root)

    assert [link.num_nvlinks for link in topology.links] == [0, 3, 0]
    assert topology.link(0, 1).ancestor is Ancestor.PIX  # the tree goes before the driver's NODE
    assert nvml.num_open == 0


def test_nvlinks_to_switches_join_all_that_have_some(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, *ADDRESSES)
    ends = {ADDRESSES[0]: ["switch"] * 6, ADDRESSES[1]: ["switch"] * 4, ADDRESSES[2]: []}

    links = read_with(monkeypatch, FakeNvml(ends), root).links
    without_p2p = read_with(monkeypatch, FakeNvml(ends, fails="p2p"), root).links

    assert [link.num_nvlinks for link in links] == [4, 0, 0]
    assert [link.num_nvlinks for link in without_p2p] == [0, 0, 0]


def test_the_driver_tells_what_a_container_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, *ADDRESSES)
    ends: dict[str, list[str]] = {address: [] for address in ADDRESSES}

    topology = read_with(monkeypatch, FakeNvml(ends, level=30), tmp_path)

    assert {link.ancestor for link in topology.links} == {Ancestor.PHB}
