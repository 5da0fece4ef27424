"""A key-value store of files in the current folder, for processes that import no torch."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FolderStore:
    """What the watchdog uses of torch's `Store`."""

    def add(self, key: str, amount: int) -> int:
        with open(_file(key), "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            total = int(file.read() or 0) + amount
            file.truncate(0)
            file.write(str(total))
        return total

    def set(self, key: str, value: str) -> None:
        temporary = _file(f"{key} of {os.getpid()}")
        temporary.write_text(value)
        temporary.rename(_file(key))

    def get(self, key: str) -> bytes:
        return _file(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        return all(_file(key).exists() for key in keys)


def _file(key: str) -> Path:
    return Path(f"store {key}")
