"""Reads how much host memory this machine or container has, and how much of it the start of a run uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from mobius.units import GIB

OWNERS: Final = ("Python and its libraries", "data and tokenizer", "connections", "stages")
"""Parts of a run's start, in order. "stages": weights, gradients, optimizer state; on GPUs also the rehearsal's
kernels."""
_SHOWN_BYTES: Final = GIB // 200
"""Parts below this size are omitted: they would be shown as 0.00."""


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that can still be allocated: the minimum of MemAvailable and the rest of the cgroup's limit.

    `root` is for tests.
    """
    limits = [
        _line_bytes(root / "proc/meminfo", "MemAvailable"),
        _cgroup_left(root / "sys/fs/cgroup", "memory.max", "memory.current"),
        _cgroup_left(root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ]
    return min(limit for limit in limits if limit is not None)


def total_host_bytes(root: Path = Path("/")) -> int:
    """Total bytes of the machine, or of its container; the same in every process. `root` is for tests."""
    limits = [_line_bytes(root / "proc/meminfo", "MemTotal")]
    for file in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max" in it: no limit
            limits.append(int((root / file).read_text()))
    return min(limits)


def _cgroup_left(folder: Path, limit_file: str, usage_file: str) -> int | None:
    """Rest of a cgroup's limit; None without a limit. File cache counts as free, because the kernel can drop it."""
    try:
        limit = (folder / limit_file).read_text().strip()
        usage = int((folder / usage_file).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max" or int(limit) >= 2**60:
        return None
    cache = int(statistics.get("inactive_file", 0)) + int(statistics.get("active_file", 0))
    return max(0, int(limit) - usage + cache)


def peak_host_bytes() -> int:
    """Largest resident set of this process so far, with mapped files."""
    return _line_bytes(Path("/proc/self/status"), "VmHWM")


def own_host_bytes() -> int:
    """Current resident set of this process, with mapped files."""
    return _line_bytes(Path("/proc/self/status"), "VmRSS")


def private_host_bytes() -> int:
    """Current resident set of this process without mapped files; shared memory counts in each process that uses it."""
    return sum(_line_bytes(Path("/proc/self/status"), field) for field in ("RssAnon", "RssShmem"))


def mapped_file_bytes() -> int:
    """Bytes of mapped files, such as libraries, in the resident set of this process."""
    return _line_bytes(Path("/proc/self/status"), "RssFile")


def _line_bytes(file: Path, field: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{file} has no {field} line (Linux 3.14 or newer is needed)")


def huge_page_share() -> float:
    """Share of this process's anonymous memory (without files) that is on huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kib["AnonHugePages"] / max(kib["Anonymous"], 1)


class HostMemoryUsage:
    """Growth of this process's memory between marks, by owner."""

    def __init__(self, read: Callable[[], int] = private_host_bytes) -> None:
        """Count all current memory for the first owner."""
        self._read, self._last = read, read()
        self.num_bytes = dict.fromkeys(OWNERS, 0)
        self.num_bytes[OWNERS[0]] = self._last

    def mark(self, owner: str) -> None:
        """Count the growth since the last mark for `owner`; a decrease counts as 0."""
        now = self._read()
        self.num_bytes[owner] += max(0, now - self._last)
        self._last = now

    def describe(self, sum_over_ranks: Callable[[Tensor], Tensor], *, planned: int | None) -> str:
        """Return text with the bytes of all ranks by owner; collective. `planned` is the plan's total for all ranks."""
        own = [*self.num_bytes.values(), mapped_file_bytes(), 1]
        *sums, files, num_ranks = sum_over_ranks(torch.tensor(own, dtype=torch.float64)).tolist()
        files /= num_ranks  # most files are libraries, which processes share
        parts = ", ".join(
            f"{name} {_gib(num_bytes)}"
            for name, num_bytes in zip(OWNERS, sums, strict=True)
            if num_bytes >= _SHOWN_BYTES
        )
        text = (
            f"{_gib(sum(sums) + files)} GiB in {num_ranks:.0f} process(es): {parts}, files shared by them {_gib(files)}"
        )
        return text if planned is None else f"{text}; planned {_gib(planned)}, to which a step adds its buffers"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"
