"""Optimizer states on disks: what is written is read, stages take turns, and a disk that fails is named."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import threading
from concurrent.futures import wait as wait_for_all
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mobius.engine import state_files
from mobius.engine.host_arena import map_zeros
from mobius.engine.state_files import ALIGNMENT, StateBuffers, StateFiles, padded, wait
from mobius.errors import StateFileError
from mobius.schedule.memory_layout import StatePool

SIZES = {0: 5, 1: 3 * ALIGNMENT, 2: 10 * ALIGNMENT + 1, 3: 0, 5: 7 * ALIGNMENT}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "CHUNK_BYTES", 2 * ALIGNMENT)


def filled(stage: int, value: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * stage + value)
    random_bytes = torch.randint(0, 256, (padded(SIZES[stage]),), dtype=torch.uint8, generator=generator)
    return map_zeros(padded(SIZES[stage]), torch.uint8).copy_(random_bytes)


@pytest.mark.parametrize("num_folders", [1, 3])
def test_what_is_written_is_read_again(tmp_path: Path, num_folders: int) -> None:
    files = StateFiles([tmp_path / str(number) for number in range(num_folders)], SIZES)
    for value in range(3):
        for stage in SIZES:
            wait(files.write(stage, filled(stage, value)))
        for stage in SIZES:
            buffer = map_zeros(padded(SIZES[stage]), torch.uint8)
            wait(files.read(stage, buffer))
            assert torch.equal(buffer, filled(stage, value))
    assert not any(path.is_file() for path in tmp_path.rglob("*")), "a file has a name"
    files.close()
    files.close()


@pytest.mark.parametrize("num_folders", [1, 3])
def test_any_part_is_read_in_order_with_few_chunks_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_folders: int
) -> None:
    files = StateFiles([tmp_path / str(number) for number in range(num_folders)], {2: SIZES[2]}, shares=())
    content, taken, map_pages = filled(2, 1), list[int](), state_files.map_zeros
    files.write(2, content)  # which is waited for
    monkeypatch.setattr(state_files, "map_zeros", lambda size, kind: taken.append(size) or map_pages(size, kind))
    cuts = [0, 7, 64, ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT - 1, 9 * ALIGNMENT, SIZES[2]]
    for start in cuts:
        for stop in (stop for stop in cuts if stop >= start):
            found = torch.cat(
                [torch.empty(0, dtype=torch.uint8), *(part.clone() for part in files.parts(2, start, stop))]
            )
            assert torch.equal(found, content[start:stop]), (start, stop)
            assert sum(taken) <= min(state_files.READ_AHEAD * 2 * ALIGNMENT, stop - start + 2 * ALIGNMENT)
            taken.clear()
    files.close()


def test_a_faster_drive_gets_more_of_each_stage(tmp_path: Path) -> None:
    sizes = dict.fromkeys(range(4), 80 * ALIGNMENT)
    files = StateFiles([tmp_path / "fast", tmp_path / "slow"], sizes, shares=(0.8, 0.2))
    for stage in sizes:
        before = [each.num_bytes for each in files.writes]
        wait(files.write(stage, map_zeros(80 * ALIGNMENT, torch.uint8)))
        fast, slow = (each.num_bytes - old for each, old in zip(files.writes, before, strict=True))
        assert fast + slow == 80 * ALIGNMENT
        assert abs(fast - 64 * ALIGNMENT) <= 2 * ALIGNMENT, "within a chunk"
    files.close()


def test_bytes_are_counted_for_each_folder_and_direction(tmp_path: Path) -> None:
    files = StateFiles([tmp_path / "a", tmp_path / "b"], {0: 5 * ALIGNMENT})
    for _ in range(3):
        wait(files.write(0, map_zeros(5 * ALIGNMENT, torch.uint8)))
    wait(files.read(0, map_zeros(5 * ALIGNMENT, torch.uint8)))
    files.close()
    assert [each.num_bytes for each in files.writes] == [9 * ALIGNMENT, 6 * ALIGNMENT]  # chunks of two: 2 + 1, 2
    assert [each.num_bytes for each in files.reads] == [3 * ALIGNMENT, 2 * ALIGNMENT]
    assert sum(span.num_bytes for span in files.writes[0].spans) == 9 * ALIGNMENT


def test_a_stage_is_read_while_another_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, write, may_write = StateFiles([tmp_path], SIZES), os.pwritev, threading.Event()

    def waiting(*arguments: Any) -> int:
        may_write.wait()
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", waiting)
    writes = files.write(2, filled(2, 0))
    assert len(writes) > state_files.THREADS_PER_FOLDER
    reads = wait_for_all(files.read(5, map_zeros(padded(SIZES[5]), torch.uint8)), timeout=10)
    is_writing = not any(each.done() for each in writes)
    may_write.set()
    wait(writes)
    files.close()
    assert not reads.not_done
    assert is_writing


def test_new_files_are_zeros(tmp_path: Path) -> None:
    files = StateFiles([tmp_path], SIZES)
    buffer = filled(2, 0)
    wait(files.read(2, buffer))
    assert not buffer.any()
    files.close()


def test_stages_take_turns_in_the_buffers_and_each_finds_what_it_wrote(tmp_path: Path) -> None:
    sizes = dict.fromkeys(range(7), 5 * ALIGNMENT)
    files, draw = StateFiles([tmp_path / "a", tmp_path / "b"], sizes), random.Random(0)
    buffers = StateBuffers(files, StatePool(3, 5 * ALIGNMENT))

    for step in range(20):
        visits = [buffers.visit(stage) for stage in draw.sample(range(7), 7)]
        while visits:  # the first one always has a buffer; of the others, some may be used sooner
            here = [visit for visit in visits if visit.is_read] or visits[:1]
            visit = draw.choice(here)
            visits.remove(visit)
            buffer = visit.buffer()
            assert buffer.tolist() == [step * 10 + visit.stage if step else 0] * len(buffer)
            buffer.fill_((step + 1) * 10 + visit.stage)
            buffers.end(visit)
    files.close()


def test_a_disk_without_space_is_refused_with_the_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        StateFileError, match=r"--offload_states_to .*: 88\.0 KiB are needed, .* is free\. Name a folder"
    ):
        StateFiles([tmp_path], SIZES)
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateFileError, match="file/folder: cannot create a file for optimizer states there: "):
        StateFiles([tmp_path / "file" / "folder"], SIZES)


@pytest.mark.parametrize(("move", "doing"), [("preadv", "read"), ("pwritev", "written")])
def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: str, doing: str) -> None:
    files = StateFiles([tmp_path], SIZES)

    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, move, failing)
    buffers = StateBuffers(files, StatePool(2, padded(SIZES[2])))

    def visit_twice() -> None:  # what could not be written shows at the stage's next visit
        for _ in range(2):
            visit = buffers.visit(2)
            visit.buffer()
            buffers.end(visit)

    with pytest.raises(StateFileError, match=rf"{tmp_path.name} \(--offload_states_to\) cannot be {doing}: Input/out"):
        visit_twice()
    files.close()


def test_without_direct_io_states_go_through_the_page_cache_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual = fcntl.fcntl

    def without_direct(file: int, command: int, *flags: int) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return usual(file, command, *flags)

    monkeypatch.setattr(fcntl, "fcntl", without_direct)
    with caplog.at_level(logging.WARNING):
        files = StateFiles([tmp_path], SIZES)
    assert "has no direct I/O, so states go through the page cache" in caplog.text
    wait(files.write(2, filled(2, 1)))
    buffer = map_zeros(padded(SIZES[2]), torch.uint8)
    wait(files.read(2, buffer))
    assert torch.equal(buffer, filled(2, 1))
    files.close()
