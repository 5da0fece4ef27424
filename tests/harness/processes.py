"""Processes of others: whether they live, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from harness.forked import HANG_SECONDS


def is_alive(process: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def comes(condition: Callable[[], object], *, seconds: float = HANG_SECONDS, pause: float = 0.02) -> bool:
    """Whether a condition comes true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True
