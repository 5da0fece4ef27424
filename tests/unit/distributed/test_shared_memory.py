"""Memory that is made and opened again is the same; tests/distributed/test_copied_messages.py has two processes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from mobius.distributed.mailboxes import SharedMemory

SIZE = 2**20 + 4096


def test_what_is_opened_is_the_same_memory_and_closing_leaves_nothing_open() -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:mobius")

    before = counts()
    memory = SharedMemory.create(SIZE)
    opened = SharedMemory.open(os.getpid(), memory.descriptor, SIZE)
    assert counts()[1] == before[1] + 2
    memory.write_word(SIZE - 4, 2**32 - 1)
    assert ctypes.c_uint32.from_address(opened.address + SIZE - 4).value == 2**32 - 1
    memory.close()
    opened.close()

    assert counts() == before
