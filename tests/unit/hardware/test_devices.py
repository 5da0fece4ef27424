"""A rank gets the device that was asked for, or a message that says what is missing."""

from __future__ import annotations

import os

import pytest
import torch

from mobius.config.config import Device
from mobius.errors import GpuMemoryError
from mobius.hardware import devices
from mobius.hardware.devices import MemoryMeter, choose_device, set_host_threads
from mobius.process.ranks import Ranks

CPU = torch.device("cpu")


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a machine with GPUs look like one without."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_gpus")
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    assert choose_device(Device.AUTO, Ranks(1, 2, 1), range(2)) == CPU


@pytest.mark.usefixtures("without_gpus")
def test_cuda_asked_for_and_absent_is_told_with_what_to_do() -> None:
    with pytest.raises(GpuMemoryError) as caught:
        choose_device(Device.CUDA, Ranks(0, 2, 0), range(2))

    message = str(caught.value)
    assert "2 ranks need one GPU each, but torch sees 0" in message
    assert all(advice in message for advice in ("--nproc_per_node", "CUDA_VISIBLE_DEVICES", "--device cpu"))


def test_more_ranks_than_gpus_are_told_on_any_machine() -> None:
    with pytest.raises(GpuMemoryError, match=r"10000 ranks need one GPU each, but torch sees \d+"):
        choose_device(Device.CUDA, Ranks(0, 10_000, 0), range(10_000))


@pytest.mark.parametrize(
    ("variable", "num_cores", "num_ranks", "expected"),
    [
        ("1", 64, 4, [16]),  # what torchrun sets when the user does not
        (None, 64, 4, [16]),
        (None, 2, 4, [1]),
        ("6", 64, 4, []),  # the user's own number stays
    ],
)
def test_a_rank_computes_with_its_share_of_the_cores_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, num_cores: int, num_ranks: int, expected: list[int]
) -> None:
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)

    set_host_threads(Ranks(0, num_ranks, 0), CPU, range(num_ranks))

    assert numbers == expected


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("1", [3]),
        ("2", []),
        ("64", [3]),  # more threads than CPUs would only wait for each other
    ],
)
def test_a_rank_that_is_bound_computes_on_every_cpu_it_is_bound_to_and_on_no_more(
    monkeypatch: pytest.MonkeyPatch, variable: str, expected: list[int]
) -> None:
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(devices, "bind_to_gpu_node", lambda _, order: 3)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)

    set_host_threads(Ranks(0, 2, 0), torch.device("cuda", 0), (0, 1))

    assert numbers == expected


def test_on_the_cpu_no_gpu_is_asked_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ranks] = []
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(devices, "bind_to_gpu_node", asked.append)

    set_host_threads(Ranks(0, 1, 0), CPU, (0,))

    assert asked == []


def test_ranks_get_their_devices_in_the_order_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)

    chosen = [choose_device(Device.AUTO, Ranks(rank, 4, rank), (0, 2, 1, 3)) for rank in range(4)]
    listed = [choose_device(Device.AUTO, Ranks(rank, 4, rank), range(4)) for rank in range(4)]

    assert [device.index for device in chosen] == [0, 2, 1, 3]
    assert [device.index for device in listed] == [0, 1, 2, 3]
    assert current == chosen + listed


def test_a_rank_is_bound_near_the_device_that_the_order_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[object] = []
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(devices, "bind_to_gpu_node", lambda _, order: orders.append(order))

    set_host_threads(Ranks(1, 4, 1), torch.device("cuda", 2), (0, 2, 1, 3))

    assert orders == [(0, 2, 1, 3)]


def test_the_meter_of_a_cpu_reads_host_memory_only() -> None:
    meter = MemoryMeter(CPU)
    meter.synchronize()
    before = meter.read()
    block = torch.ones(2**24)  # 64 MiB, touched

    after = meter.read()

    assert block.nbytes == 64 * 2**20
    assert (meter.device_name, meter.has_gpu) == ("cpu", False)
    assert (after.peak_allocated, after.peak_reserved, after.allocated) == (0, 0, 0)
    assert after.peak_host >= before.peak_host > 32 * 2**20
