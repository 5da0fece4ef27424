"""Memory that one process makes and another one opens is the same memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from harness.forked import HANG_SECONDS

from mobius.distributed.mailboxes import SharedMemory

ROOT = Path(__file__).parents[3]
SIZE = 2**20 + 4096


def word(memory: SharedMemory, offset: int) -> int:
    return ctypes.c_uint32.from_address(memory.address + offset).value


def test_two_processes_see_what_the_other_writes() -> None:
    memory = SharedMemory.create(SIZE)
    memory.write_word(128, 2**32 - 1)
    program = (
        "from mobius.distributed.mailboxes import SharedMemory\n"
        "import ctypes\n"
        f"memory = SharedMemory.open({os.getpid()}, {memory.descriptor}, {SIZE})\n"
        "print(ctypes.c_uint32.from_address(memory.address + 128).value)\n"
        f"memory.write_word({SIZE - 4}, 77)\n"
        "memory.close()\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_SECONDS
    )

    assert finished.stdout == f"{2**32 - 1}\n", finished.stderr
    assert word(memory, SIZE - 4) == 77
    memory.close()


def test_closing_leaves_nothing_open() -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:mobius")

    before = counts()
    memory = SharedMemory.create(SIZE)
    opened = SharedMemory.open(os.getpid(), memory.descriptor, SIZE)
    assert counts()[1] == before[1] + 2
    memory.close()
    opened.close()

    assert counts() == before
