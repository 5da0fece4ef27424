"""Processes of others."""

from __future__ import annotations

from pathlib import Path


def is_alive(process: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def family(process: int) -> set[int]:
    """All that a process has started, and what that has started."""
    found: set[int] = set()
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = [int(child) for child in file.read_text().split()]
        except OSError:
            continue
        found |= {*children, *(number for child in children for number in family(child))}
    return found


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> process, of those that live; one that is forked has it in its name."""
    found = {}
    for child in family(launcher):
        try:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            name, _, rest = Path(f"/proc/{child}/stat").read_text().partition(" (")[2].rpartition(")")
        except OSError:
            continue
        words, parent = [*variables, name.replace("rank ", "RANK=").encode()], int(rest.split()[1])
        rank = next((int(each.partition(b"=")[2]) for each in words if each.startswith(b"RANK=")), None)
        if rank is not None and parent == launcher:
            found[rank] = child
    return found
