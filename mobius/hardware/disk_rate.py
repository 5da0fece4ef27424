"""Measures the write rate of a folder's disk, including fsync."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

CHUNK_BYTES = 2**26
MOST_SECONDS = 1.0
MOST_BYTES = 2**30


def measure_write_rate(folder: Path) -> float | None:
    """Return the bytes per second of a test file, which takes about two seconds; None if it cannot be written."""
    chunk = os.urandom(2**20) * (CHUNK_BYTES // 2**20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            start, num_bytes = time.monotonic(), 0
            while num_bytes < MOST_BYTES and time.monotonic() - start < MOST_SECONDS:
                num_bytes += file.write(chunk)
                os.fsync(file.fileno())
            return num_bytes / (time.monotonic() - start)
    except OSError:
        return None
