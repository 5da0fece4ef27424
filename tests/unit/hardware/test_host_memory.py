"""How much host memory may be taken: what the machine has left, and no more than the container allows."""

import resource
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from mobius.hardware.host_memory import available_host_bytes, peak_host_bytes

MIB = 2**20
MEMINFO = "MemTotal:       16384 kB\nMemFree:         1024 kB\nMemAvailable:    8192 kB\nSwapTotal: 0 kB\n"


def write_cgroup(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 MiB available and no container."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    return tmp_path


def test_without_a_container_it_is_what_the_kernel_calls_available(root: Path) -> None:
    assert available_host_bytes(root) == 8 * MIB


def test_a_version_2_limit_leaves_what_is_not_used_and_file_cache_counts_as_free(root: Path) -> None:
    write_cgroup(
        root / "sys/fs/cgroup",
        {
            "memory.max": f"{6 * MIB}\n",
            "memory.current": f"{4 * MIB}\n",
            "memory.stat": f"anon {MIB}\nfile {3 * MIB}\ninactive_file {2 * MIB}\nactive_file {MIB}\nshmem 77\n",
        },
    )

    assert available_host_bytes(root) == (6 - 4 + 2 + 1) * MIB


def test_a_version_1_limit_counts_alike(root: Path) -> None:
    write_cgroup(
        root / "sys/fs/cgroup/memory",
        {
            "memory.limit_in_bytes": f"{6 * MIB}\n",
            "memory.usage_in_bytes": f"{5 * MIB}\n",
            "memory.stat": f"cache {MIB}\ninactive_file {MIB}\nactive_file 0\n",
        },
    )

    assert available_host_bytes(root) == 2 * MIB


@pytest.mark.parametrize(
    ("folder", "limit_file", "usage_file", "limit"),
    [
        ("sys/fs/cgroup", "memory.max", "memory.current", "max"),
        # What version 1 says when there is no limit.
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "9223372036854771712"),
    ],
)
def test_a_container_without_a_limit_has_what_the_machine_has(
    root: Path, folder: str, limit_file: str, usage_file: str, limit: str
) -> None:
    write_cgroup(root / folder, {limit_file: f"{limit}\n", usage_file: f"{MIB}\n", "memory.stat": "inactive_file 0\n"})

    assert available_host_bytes(root) == 8 * MIB


def test_the_peak_is_the_one_that_the_system_charges_this_process_with() -> None:
    written = np.ones(64 * MIB, dtype=np.uint8)

    charged = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # The kernel counts per thread and adds up late, a few hundred pages at most.
    assert abs(peak_host_bytes() - charged) < 4 * MIB
    assert peak_host_bytes() > written.nbytes
