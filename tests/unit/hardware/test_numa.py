"""A rank is bound near its GPU where the kernel tells where that is, and left alone, with a line, where it does not."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mobius.hardware.numa import bind_to_gpu_node, gpu_addresses, parse_cpu_list
from mobius.process.ranks import Ranks

# What a machine of two sockets says, with eight cores of two threads each and two GPUs on each socket.
GPUS = {"0000:17:00.0": 0, "0000:2a:00.0": 0, "0000:bd:00.0": 1, "0001:ab:00.0": 1}
LISTS = ("0-7,16-23\n", "8-15,24-31\n")
NODES = ({*range(8), *range(16, 24)}, {*range(8, 16), *range(24, 32)})
EVERY_CPU = set(range(32))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The parts of /sys that are read."""
    for address, node in GPUS.items():
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(LISTS[node])
    return tmp_path


def see_gpus(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Make torch see these GPUs, in this order."""
    numbers = [[int(part, 16) for part in address.removesuffix(".0").split(":")] for address in addresses]
    properties = [
        SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=device) for domain, bus, device in numbers
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)


class Machine:
    """The affinities that the kernel would keep: of every process, and of this one's threads."""

    def __init__(self) -> None:
        self.own = set(EVERY_CPU)
        self.launcher = set(EVERY_CPU)
        self.bound: list[set[int]] = []

    def get(self, process: int) -> set[int]:
        return self.launcher if process == os.getppid() else set(self.own)

    def set(self, process: int, cpus: frozenset[int]) -> None:
        if process == 0:
            self.bound.append(set(cpus))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine of 32 CPUs that binds nothing in truth, with the four GPUs in PCI order."""
    machine = Machine()
    monkeypatch.setattr(os, "sched_getaffinity", machine.get)
    monkeypatch.setattr(os, "sched_setaffinity", machine.set)
    see_gpus(monkeypatch, *GPUS)
    return machine


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="mobius.hardware.numa")
    return caplog


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3\n", {0, 1, 2, 3}),
        ("0-1,64-65", {0, 1, 64, 65}),
        ("7", {7}),
        ("0,2,4-5\n", {0, 2, 4, 5}),
        ("\n", set()),  # a node that has memory only
    ],
)
def test_a_cpu_list_of_the_kernel_is_read(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["x", "-3", "0,,1", "0-3,", "0 1"])
def test_anything_else_is_no_cpu_list(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cpu_list(text)


def test_an_address_is_written_as_the_kernel_names_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, "0000:17:00.0", "10000:e1:1f.0")

    assert gpu_addresses([0, 1]) == ["0000:17:00.0", "10000:e1:1f.0"]


def test_every_rank_is_bound_to_the_cpus_beside_its_gpu_and_says_so(
    machine: Machine, root: Path, log: pytest.LogCaptureFixture
) -> None:
    order = (0, 2, 1, 3)  # ranks 0 and 2 on node 0, ranks 1 and 3 on node 1

    assert [bind_to_gpu_node(Ranks(rank, 4, rank), order, root) for rank in range(4)] == [8] * 4

    assert machine.bound == [NODES[0], NODES[1], NODES[0], NODES[1]]
    assert log.messages[1] == "rank 1: GPU 0000:bd:00.0, bound to 16 CPUs"


def test_a_container_s_cpus_are_the_ones_that_are_shared(machine: Machine, root: Path) -> None:
    machine.own = machine.launcher = set(range(12))  # no second threads, and half of node 1

    assert [bind_to_gpu_node(Ranks(rank, 4, rank), range(4), root) for rank in range(4)] == [4, 4, 2, 2]

    assert machine.bound == [set(range(8))] * 2 + [set(range(8, 12))] * 2


@pytest.mark.parametrize(
    ("own", "bound", "num_cpus"),
    [({4, 5, 6}, {4, 5, 6}, 3), ({4, 5, 8}, {4, 5}, 2), ({8, 9}, {8, 9}, 2), (NODES[0], NODES[0], 8)],
)
def test_a_rank_that_its_launcher_bound_leaves_none_of_these_cpus_but_for_its_gpu_s_node(
    machine: Machine, root: Path, own: set[int], bound: set[int], num_cpus: int
) -> None:
    machine.own = own  # taskset, or a scheduler's own shares

    assert bind_to_gpu_node(Ranks(0, 4, 0), range(4), root) == num_cpus

    assert machine.bound == [bound]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "local_cpulist"),
        ("0-7;8\n", "invalid literal"),
        ("\n", "has 0 of the 32 CPUs for 1 of the 4 ranks"),
        ("0-2\n", "has 3 of the 32 CPUs for 1 of the 4 ranks"),
    ],
)
def test_a_rank_whose_gpu_has_no_cpus_or_too_few_is_left_alone_with_a_line(
    machine: Machine, root: Path, log: pytest.LogCaptureFixture, content: str | None, reason: str
) -> None:
    path = root / "sys/bus/pci/devices/0000:bd:00.0/local_cpulist"
    path.unlink()
    if content is not None:
        path.write_text(content)

    assert bind_to_gpu_node(Ranks(2, 4, 2), range(4), root) is None

    assert machine.bound == []
    assert log.messages[0].startswith("rank 2 is not bound to a NUMA node: ")
    assert reason in log.messages[0]


def test_a_kernel_that_forbids_binding_leaves_the_rank_unbound(
    machine: Machine, root: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def forbidden(process: int, cpus: frozenset[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)

    assert bind_to_gpu_node(Ranks(0, 4, 0), range(4), root) is None
    assert machine.bound == []
    assert "Operation not permitted" in log.messages[0]


def affinities() -> dict[int, set[int]]:
    return {int(name): os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")}


@pytest.fixture
def restored_affinities() -> Iterator[None]:
    """Undo what a test binds in truth; its process is that of the other tests too."""
    before = affinities()
    yield
    for thread in affinities():
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(thread, before.get(thread, before[os.getpid()]))


@pytest.mark.usefixtures("restored_affinities")
def test_threads_that_exist_and_threads_to_come_are_bound_too_but_not_those_with_a_place_of_their_own(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("one CPU: there is nothing to choose")
    half, last = allowed[: (len(allowed) + 1) // 2], allowed[-1]
    monkeypatch.setattr(os, "getppid", os.getpid)  # whoever started the tests may have bound them
    numbers = ",".join(map(str, half))
    (root / "sys/bus/pci/devices/0000:17:00.0/local_cpulist").write_text(numbers)
    see_gpus(monkeypatch, "0000:17:00.0")
    seen: dict[str, set[int]] = {}
    started, go_on = threading.Barrier(3), threading.Event()

    def look(name: str, own_place: int | None = None) -> None:
        if own_place is not None:
            os.sched_setaffinity(0, {own_place})
        started.wait()
        go_on.wait()
        seen[name] = os.sched_getaffinity(0)

    early = [threading.Thread(target=look, args=arguments) for arguments in (("early",), ("placed", last))]
    for thread in early:
        thread.start()
    started.wait()

    bound = bind_to_gpu_node(Ranks(0, 1, 0), range(1), root)

    late = threading.Thread(target=lambda: seen.update(late=os.sched_getaffinity(0)))
    late.start()
    go_on.set()
    for thread in (*early, late):
        thread.join()
    assert bound == len(half)
    assert os.sched_getaffinity(0) == set(half)
    assert seen == {"early": set(half), "late": set(half), "placed": {last}}
