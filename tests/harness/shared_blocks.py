"""Clones of files where the file system has none, and file systems that have them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import main
from mobius.checkpoint import cloned_stages

BLOCK = 4096


def copy_range(source: int, start: int, length: int, target: int, position: int) -> None:
    """Do what `clone_range` does by copying, as picky about its numbers as xfs and btrfs are."""
    assert not any(number % BLOCK for number in (start, length, position)), (start, length, position)
    assert length > 0
    assert start + length <= os.fstat(source).st_size
    assert os.pwrite(target, os.pread(source, length, start), position) == length


def clone_by_copies() -> list[str]:
    """Let tiny tensors be cloned in this process, by copies; returns the names of the files that have been made so."""
    made: list[str] = []

    def clone_range(source: int, start: int, length: int, target: int, position: int) -> None:
        copy_range(source, start, length, target, position)
        made.append(os.readlink(f"/proc/self/fd/{target}"))

    cloned_stages.clone_range = clone_range
    cloned_stages.SMALLEST_CLONE = BLOCK
    return made


def run_with_clones(dies_in: str, *words: str) -> None:
    """Run main.py with such clones, as `harness.forked.Ranks` does; killed behind the first one in a file `dies_in`."""
    made = clone_by_copies()
    clone_range = cloned_stages.clone_range

    def dying(*numbers: int) -> None:
        clone_range(*numbers)
        if dies_in and dies_in in made[-1]:
            os.kill(os.getpid(), signal.SIGKILL)

    cloned_stages.clone_range = dying
    sys.argv = ["main.py", "--device", "cpu", *words]
    main.main()


@contextmanager
def mounted(kind: str, folder: Path) -> Iterator[Path]:
    """Mount a new file system in a file; the test is skipped where that cannot be done."""
    image, place = folder / f"{kind}.img", folder / kind
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(600 * 2**20)
    if os.geteuid() != 0 or shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"mkfs.{kind} or the right to mount is missing")
    for command in ([f"mkfs.{kind}", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{command[0]}: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
