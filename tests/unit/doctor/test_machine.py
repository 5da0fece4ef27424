"""Facts are read as kernel and driver write them, and bytes that arrive wrong are found."""

import shlex
import shutil
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mobius.doctor import machine
from mobius.doctor.machine import Gpu, find_broken_copies, read_gpus, read_host
from mobius.hardware import disk_rate

ADDRESS = "0000:17:00.0"


def fake_nvidia_smi(folder: Path, *lines: str, code: int = 0) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' {' '.join(map(shlex.quote, lines))}\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def test_gpus_are_read_with_the_lanes_of_the_card_behind_those_of_its_slot(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "max_link_width").write_text("16\n")
    program = fake_nvidia_smi(
        tmp_path,
        "NVIDIA GeForce RTX 4090, 24564, 8.9, 580.95.05, 00000000:17:00.0, 1, 4, 4, 4",
        "NVIDIA L4, 23034, 8.9, 580.95.05, 00000000:98:00.0, [N/A], [N/A], [N/A], [N/A]",
    )
    first = Gpu("NVIDIA GeForce RTX 4090", 24564 * 2**20, "8.9", "580.95.05", ADDRESS, 1, 4, lanes=4, most_lanes=16)
    second = Gpu("NVIDIA L4", 23034 * 2**20, "8.9", "580.95.05", "0000:98:00.0", None, None, None, None)
    assert read_gpus(tmp_path, program) == [first, second]


def test_a_driver_that_fails_is_said_and_one_that_is_not_there_means_no_gpus(tmp_path: Path) -> None:
    text = "Failed to initialize NVML: Driver/library version mismatch"
    with pytest.raises(RuntimeError, match=text):
        read_gpus(nvidia_smi=fake_nvidia_smi(tmp_path, text, code=18))
    assert read_gpus(nvidia_smi=str(tmp_path / "none")) == []


def test_one_wrong_byte_of_a_large_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MESSAGE_SIZES", (4096, 2**20))
    devices = [torch.device("cpu")] * 3

    def spoil(received: Tensor, sent: Tensor) -> None:
        received.copy_(sent)
        if sent.numel() == 2**18 and sent[0] == 2:  # what the second device sends
            received.view(torch.uint8)[-1] ^= 1

    assert [*find_broken_copies(devices)] == []
    assert [*find_broken_copies(devices, spoil)] == [(1, 0), (1, 2)]
    assert len([*find_broken_copies(devices, lambda received, sent: None)]) == 6  # nothing arrives


def make_root(root: Path, *, access: int | None) -> None:
    """A machine with two nodes and one GPU behind a bridge whose access control has these bits."""
    files = {
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 500 kB\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  600 kB\n",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:  400 kB\n",
        f"sys/devices/pci0000:16/0000:16:01.0/{ADDRESS}/vendor": "0x10de\n",
        f"sys/devices/pci0000:16/0000:16:01.0/{ADDRESS}/class": "0x030000\n",
        f"sys/devices/pci0000:16/0000:16:01.0/{ADDRESS}/iommu_group/type": "DMA-FQ\n",
        "dev/shm/none": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    (root / "sys/bus/pci/devices" / ADDRESS).symlink_to(root / "sys/devices/pci0000:16/0000:16:01.0" / ADDRESS)
    config = bytearray(4096 if access is not None else 64)
    if access is not None:  # first another capability, of errors, then that of access control
        struct.pack_into("<I", config, 0x100, 0x0001 | 1 << 16 | 0x140 << 20)
        struct.pack_into("<IHH", config, 0x140, 0x000D | 1 << 16, 0, access)
    (root / "sys/devices/pci0000:16/0000:16:01.0/config").write_bytes(config)


@pytest.mark.parametrize(
    ("access", "expected"), [(0b0011101, ("0000:16:01.0",)), (0b0010001, ()), (0, ()), (None, None)]
)
def test_the_host_is_read_with_bridges_that_redirect(
    access: int | None, expected: tuple[str, ...] | None, tmp_path: Path
) -> None:
    make_root(tmp_path, access=access)
    host = read_host(tmp_path)
    assert (host.total_bytes, host.available_bytes) == (1000 * 1024, 500 * 1024)
    assert host.node_bytes == (600 * 1024, 400 * 1024)
    assert host.translation == "DMA-FQ"
    assert host.redirecting == expected


def test_a_machine_without_shared_memory_has_none(tmp_path: Path) -> None:
    make_root(tmp_path, access=0)
    shutil.rmtree(tmp_path / "dev")
    assert read_host(tmp_path).shared_bytes == 0


def test_this_machine_can_be_read() -> None:
    host = read_host()
    assert 0 < host.available_bytes <= host.total_bytes
    assert host.cores >= 1
    assert host.shared_bytes > 0
    assert machine.read_software().torch == torch.__version__


def test_a_disk_is_measured_and_a_folder_that_cannot_be_written_has_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_rate, "MOST_BYTES", disk_rate.CHUNK_BYTES)
    disk = machine.measure_disk(tmp_path)
    assert disk.write is not None
    assert disk.read is not None
    assert min(disk.write, disk.read) > 1e5
    assert machine.measure_disk(Path("/proc")).write is None
