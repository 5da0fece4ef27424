"""Two slots of states: a step is written to one while the other stays whole, and counts once all of it is there."""

from __future__ import annotations

import errno
import os
import time
import zlib
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mobius.engine import slot_files, state_files
from mobius.engine.host_arena import map_zeros, whole_pages
from mobius.engine.slot_files import SlotFiles, SlotPlace, done
from mobius.engine.state_files import ALIGNMENT, wait
from mobius.errors import StateFileError

SIZES: dict[Any, int] = {0: 5 * ALIGNMENT, 1: 3, (1, "weights"): 2 * ALIGNMENT + 1}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "CHUNK_BYTES", 2 * ALIGNMENT)


@pytest.fixture
def files(tmp_path: Path) -> SlotFiles:
    return SlotFiles(SIZES, place=SlotPlace([tmp_path / "a", tmp_path / "b"], "run", 3, first_slot=1))


def filled(key: Any, value: int) -> Tensor:
    buffer = map_zeros(SIZES[key], torch.uint8)
    whole_pages(buffer).fill_(value)
    return whole_pages(buffer)


def read(files: SlotFiles, key: Any) -> int:
    buffer = whole_pages(map_zeros(SIZES[key], torch.uint8))
    wait(files.read(key, buffer))
    (value,) = buffer.unique().tolist()
    return int(value)


def test_a_step_is_read_from_where_it_was_written_while_the_other_slot_stays(files: SlotFiles, tmp_path: Path) -> None:
    assert [read(files, key) for key in SIZES] == [0, 0, 0]
    first = files.version
    assert first is not None
    for key in SIZES:
        wait(files.write(key, filled(key, 1), first))
    files.sync(first)
    kept = [path.read_bytes() for path in files.paths(1)]
    files.open_slot(0)
    files.begin_version(0, done())
    wait(files.write(0, filled(0, 2)))
    assert [read(files, key) for key in SIZES] == [2, 1, 1]
    assert [path.read_bytes() for path in files.paths(1)] == kept
    assert files.paths(0) == [tmp_path / folder / "run/slot-0/states-3.raw" for folder in "ab"]
    for key, chunks in files.chunks(first).items():
        for folder, offset, length, checksum in chunks:
            part = kept[folder][offset : offset + length]
            assert len(part) == length
            assert zlib.crc32(part) == checksum, key
    files.close()
    files.close()


def test_nothing_is_overwritten_before_it_may_be(files: SlotFiles) -> None:
    may_begin = Future[None]()
    files.open_slot(0)
    files.begin_version(0, may_begin)
    version = files.version
    assert version is not None
    writes = [write for key in SIZES for write in files.write(key, filled(key, 7))]
    time.sleep(0.05)
    assert not any(write.done() for write in writes)
    assert not any(any(path.read_bytes()) for path in files.paths(0))
    may_begin.set_result(None)
    files.sync(version)
    assert [read(files, key) for key in SIZES] == [7, 7, 7]
    files.close()


def test_a_step_is_whole_only_with_all_of_its_stages(files: SlotFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    version = files.version
    assert version is not None
    for key in [*SIZES][1:]:
        wait(files.write(key, filled(key, 1)))
    assert not version.written.done()
    monkeypatch.setattr(slot_files, "LOOK_SECONDS", 0.01)

    def dead() -> None:
        raise RuntimeError("whoever was to write it")

    with pytest.raises(RuntimeError, match="whoever"):
        files.sync(version, dead)
    wait(files.write(0, filled(0, 1)))
    assert version.written.done()
    files.close()


def test_a_drive_that_fails_is_named_and_the_step_never_counts(
    files: SlotFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    version = files.version
    assert version is not None
    monkeypatch.setattr(os, "pwritev", failing)
    for key in SIZES:
        files.write(key, filled(key, 1))
    with pytest.raises(StateFileError, match=rf"{tmp_path}/[ab] .* cannot be written: Input/output error"):
        files.sync(version)
    files.close()
