"""Each check finds the machine that is wrong, says what to do, and is content with the one that is right."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mobius.doctor import checks
from mobius.doctor.apart import Problem
from mobius.doctor.checks import Status, judge_all
from mobius.doctor.machine import Disk, Gpu, Host, HostSpeed, Links, Software

GIB = 2**30
CARD = Gpu("NVIDIA GeForce RTX 4090", 24 * GIB, "8.9", "580.95.05", "0000:17:00.0", 4, 4, 16, 16)
LINKS = Links((25e9, 25e9), (26e9, 26e9), (4, 4))
SOFTWARE = Software("2.13.0+cu130", "13.0", True, (2, 29, 7), "x86_64")
HOST = Host(32, 0.1, 128 * GIB, 120 * GIB, 64 * GIB, 1048576, None, (64 * GIB, 64 * GIB), "identity", ())
RIGHT: dict[str, Any] = {
    "gpus": [CARD, CARD],
    "links": LINKS,
    "software": SOFTWARE,
    "host": HOST,
    "speed": HostSpeed(6e9, 170e9, 6),
    "disk": Disk("/data", 2e9, 5e9, 900 * GIB),
}


def gpus(**changes: object) -> dict[str, Any]:
    return {"gpus": [CARD, replace(CARD, **changes)]}  # type: ignore[arg-type]


def changed(name: str) -> Callable[..., dict[str, Any]]:
    return lambda **changes: {name: replace(RIGHT[name], **changes)}


links, software, host, speed, disk = map(changed, ("links", "software", "host", "speed", "disk"))


def test_a_machine_that_is_right_is_ok_in_every_line() -> None:
    findings = [*judge_all(RIGHT)]
    assert [each.name for each in findings if each.status is not Status.OK or each.advice] == []
    assert len(findings) == len(checks.CHECKS) == 14


@pytest.mark.parametrize(
    ("name", "facts", "status", "texts"),
    [
        ("GPU lanes", gpus(lanes=4), "slow", ("GPU 0 x16 of x16, GPU 1 x4 of x16", "slot")),
        ("GPU lanes", gpus(lanes=8), "slow", ("GPU 1 x8 of x16",)),
        ("GPU copies", links(generations=(4, 3)), "slow", ("PCIe 3 of 4", "riser")),
        ("GPU copies", links(from_gpu=(26e9, 12e9)), "slow", ("GPU 1 25.0 GB/s to the GPU, 12.0 back", "26 GB/s")),
        ("peer copies", links(broken=((0, 1),)), "wrong", ("1 of 2 right", "GPU 0 to GPU 1", "NCCL_P2P_DISABLE=1")),
        ("/dev/shm", host(shared_bytes=64 * 2**20), "wrong", ("64.0 MiB", "--shm-size=1g")),
        ("NCCL", software(nccl=(2, 29, 2)), "wrong", ("2.29.2", "nvidia-nccl-cu13>=2.29.3", "pytorch#174338")),
        ("NCCL", software(nccl=(2, 28, 9), processor="aarch64"), "wrong", ("ARM",)),
        ("NCCL", software(nccl=(2, 26, 2)) | gpus(capability="12.0"), "wrong", ("RTX 50", ">=2.27.3")),
        ("ulimit", host(locked_bytes=65536) | links(can_pin=False), "wrong", ("-l 64.0 KiB", "memlock=-1")),
        ("ulimit", host(open_files=64), "wrong", ("-n 64", "96 open files")),
        ("CPU AdamW", speed(threads=0), "slow", ("compiler",)),
        ("CPU AdamW", speed(bandwidth=40e9), "slow", ("40 GB/s", "190 GB/s")),
        ("disk", disk(write=0.1e9), "slow", ("writes 0.10", "15 minutes")),
        ("disk", disk(write=None, read=None), "wrong", ("/data", "--folder")),
        ("torch", gpus() | {"gpus": [replace(CARD, driver="570.86")]}, "wrong", ("driver 570.86", "580 or later")),
        ("torch", software(cuda="12.8") | {"gpus": [replace(CARD, driver="470.1")]}, "wrong", ("525 or later",)),
        ("torch", software(torch="2.13.0+cpu", cuda=None), "wrong", ("for CPUs",)),
        ("torch", software(torch="2.9.1+cu130"), "wrong", ("2.11 or later",)),
        ("torch", software(sees_gpus=False), "wrong", ("CUDA_VISIBLE_DEVICES",)),
        ("GPUs", gpus(name="NVIDIA GeForce RTX 3090"), "slow", ("1 x NVIDIA GeForce RTX 3090", "slowest")),
        ("GPUs", gpus(capability="7.5"), "slow", ("--fp16",)),
        ("IOMMU", host(translation="DMA-FQ"), "slow", ("DMA-FQ", "iommu=pt")),
        ("IOMMU", host(redirecting=("0000:16:01.0",)), "slow", ("ACS 0000:16:01.0",)),
        ("NUMA", host(node_bytes=(128 * GIB, 0)), "slow", ("128.0 GiB, 0.0 GiB", "channels")),
        ("host memory", host(available_bytes=5 * GIB), "wrong", ("5.0 GiB of 128.0 GiB", "end other programs")),
        ("host memory", host(available_bytes=50 * GIB), "slow", ("other programs",)),
        ("cores", host(cores=6), "slow", ("6", "4 per GPU")),
        ("cores", host(load=4.0), "slow", ("32, 4.0 processes per core", "other programs")),
    ],
)
def test_what_is_wrong_is_found_in_its_line_alone(
    name: str, facts: dict[str, Any], status: str, texts: tuple[str, ...]
) -> None:
    bad = [each for each in judge_all(RIGHT | facts) if each.status is not Status.OK]
    found = next(each for each in bad if each.name == name)
    assert found.status == status
    assert all(text in f"{found.found} {found.advice}" for text in texts), found
    assert found.advice
    assert {each.name for each in bad} <= {name, "GPUs"}  # GPUs that differ in anything shown


@pytest.mark.parametrize(
    "facts",
    [
        host(locked_bytes=65536),  # drivers pin all the same
        software(nccl=(2, 28, 9)),  # hangs on ARM only
        software(cuda="12.8") | {"gpus": [replace(CARD, driver="525.60.13")] * 2},
        gpus(generation=1),  # idle
        gpus(lanes=None, most_lanes=None),  # virtual machines tell nothing
        {"gpus": [CARD], "links": Links((25e9,), (25e9,), (4,)), "host": replace(HOST, shared_bytes=64 * 2**20)},
        {"gpus": [], "links": Links(), "software": Software("2.13.0+cpu", None, False, (), "x86_64")},
    ],
)
def test_a_machine_that_differs_harmlessly_is_ok(facts: dict[str, Any]) -> None:
    assert [each for each in judge_all(RIGHT | facts) if each.status is not Status.OK] == []


def test_facts_that_are_not_there_spoil_only_the_checks_that_need_them() -> None:
    by_name = {each.name: each for each in judge_all(RIGHT | {"links": Problem("RuntimeError: no kernel image")})}
    unknown = [name for name, each in by_name.items() if each.status is Status.UNKNOWN]
    assert unknown == ["GPU copies", "peer copies", "ulimit"]
    assert "no kernel image" in by_name["GPU copies"].found


def test_copies_that_hang_are_wrong() -> None:
    by_name = {each.name: each for each in judge_all(RIGHT | {"links": Problem("not done", is_late=True)})}
    assert by_name["GPU copies"].status is Status.WRONG
    assert "NCCL_P2P_DISABLE=1" in by_name["GPU copies"].advice
    busy = judge_all(RIGHT | host(load=4.0) | {"links": Problem("not done", is_late=True)})
    assert {each.name: each.status for each in busy}["GPU copies"] is Status.UNKNOWN
