"""Measures the rates of a folder's disk: writes with fsync, and reads without the page cache."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

CHUNK_BYTES = 2**26
MOST_SECONDS = 1.0
MOST_BYTES = 2**30


def measure_rates(folder: Path, *, reads: bool = True) -> list[float] | None:
    """Return the bytes per second of writing and, with `reads`, of reading a test file; None if writing fails.

    Each measurement takes about two seconds.
    """
    chunk = bytearray(os.urandom(2**20) * (CHUNK_BYTES // 2**20))
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            rates = [_rate(lambda: _write(file, chunk))]
            if reads:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(0)
                rates.append(_rate(lambda: file.readinto(chunk) or 0))
            return rates
    except OSError:
        return None


def _write(file: IO[bytes], chunk: bytearray) -> int:
    written = file.write(chunk)
    os.fsync(file.fileno())
    return written


def _rate(move: Callable[[], int]) -> float:
    """Bytes per second of repeated calls of `move`, which returns the bytes moved; it ends when a call moves none."""
    start, num_bytes = time.monotonic(), 0
    while num_bytes < MOST_BYTES and time.monotonic() - start < MOST_SECONDS and (moved := move()):
        num_bytes += moved
    return num_bytes / (time.monotonic() - start)
