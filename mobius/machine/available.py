"""Reads how much host memory this machine and this container have, and how much this process uses."""

from __future__ import annotations

from pathlib import Path


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that may still be taken: the lesser of MemAvailable and what the cgroup's limit leaves.

    `root` is for tests.
    """
    limits = [_memory_available(root), _cgroup_left(root / "sys/fs/cgroup", "memory.max", "memory.current")]
    limits.append(_cgroup_left(root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
    return min(limit for limit in limits if limit is not None)


def _memory_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line (Linux 3.14 or newer is needed)")


def _cgroup_left(folder: Path, limit_file: str, usage_file: str) -> int | None:
    """What a cgroup's limit leaves; None without a limit. File cache counts as free: the kernel gives it back."""
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
    """The largest resident set of this process so far, mapped files included."""
    return _status_bytes("VmHWM:")


def own_host_bytes() -> int:
    """The resident set of this process now, mapped files included."""
    return _status_bytes("VmRSS:")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field} line")


def huge_page_share() -> float:
    """Share of this process's own memory (without files) that lies on huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kib["AnonHugePages"] / max(kib["Anonymous"], 1)
