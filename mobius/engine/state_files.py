"""Optimizer states of a rank's streamed stages on disks: files, and host memory for the stages in an update.

    file of each folder   | stage 0, chunks 0, 2, ... | stage 1, chunks 1, 3, ... |      chunks take turns (striping)

    update queue    submit(s) ... waits until gradients and states of s are there | pieces of s | ...
    threads         read(s) into a free buffer                                    |             | write(s), free it

A stage has one of `NUM_STATE_BUFFERS` buffers from the submission of its update until its states are written. Stages
get buffers in the order of submission: one stage is read and another stage written while a third is updated. If updates
wait for no other stage (no clipping), gradients arrive in these buffers, too. Then a stage needs a buffer from the end
of its backward on, and the main thread may have to wait for it. Gradients that wait for the norm of all stages may be
on the disks meanwhile. Weights may be on disks, too: an update reads and writes them with the states, and compute reads
them through engine/weight_loads.py. Reads and writes bypass the page cache (O_DIRECT), because states on disks should
save memory. If a file system refuses O_DIRECT, pages are dropped from the cache after each request. Files are unlinked
at once, so that their space is free however the process ends. Files of durable steps have names, and contain the
weights, too (engine/slot_files.py).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor, uint8

from mobius.engine.host_arena import map_zeros
from mobius.errors import StateFileError, reason_of
from mobius.hardware.disk_traffic import Traffic
from mobius.schedule.memory_layout import BUFFER_ALIGNMENT, StatePool, aligned
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**23
"""Bytes of a request. Offsets and lengths are multiples of `ALIGNMENT`, which all disks accept."""
ALIGNMENT = BUFFER_ALIGNMENT
THREADS_PER_FOLDER = 3
"""Number of threads that read, and number of threads that write."""
READ_AHEAD = 4
"""Number of chunks that are read ahead."""


Key = int | tuple[int, str]
"""A stage, for the stage's optimizer states, or (stage, name) for other data of the stage."""
Move = Callable[[int, list[memoryview], int], int]
"""Type of `os.preadv` and `os.pwritev`."""


class Place(NamedTuple):
    """A chunk of a key's bytes on a disk."""

    folder: int
    offset: int
    length: int
    start: int
    """Number of the key's bytes before this chunk."""


class Awaited(Protocol):
    """Condition that a read or write waits for, such as a future."""

    def result(self) -> None:
        """Wait until the condition is met; raise the error if it failed."""


class Version:
    """States of all stages of a rank at the end of one step, in named files."""

    def __init__(self, slot: int, may_begin: Awaited, num_chunks: Mapping[Key, int]) -> None:
        """Writes wait until `may_begin` allows overwriting the slot. Each key of `num_chunks` is written once."""
        self.slot, self.may_begin = slot, may_begin
        self.checksums: dict[Key, list[int]] = {key: [0] * number for key, number in num_chunks.items()}
        """Key -> zlib.crc32 of each chunk."""
        self.written = Future[None]()
        """Done once all keys are written, or a write has failed."""
        self._left, self._lock = sum(num_chunks.values()), threading.Lock()
        if not self._left:
            self.written.set_result(None)

    def add(self, writes: Sequence[Future[None]]) -> None:
        """Count these writes of a key's chunks when they are done."""
        for write in writes:
            write.add_done_callback(self._count)

    def _count(self, write: Future[None]) -> None:
        with self._lock:
            self._left -= 1
            if self.written.done():
                return
            if (error := write.exception()) is not None:
                self.written.set_exception(error)
            elif not self._left:
                self.written.set_result(None)


class StateFiles:
    """Files of a rank: one unlinked file per folder, with places for the bytes of all keys."""

    version: Version | None = None
    """Version that the current step writes, if versions are kept."""

    def __init__(
        self,
        folders: Sequence[Path],
        num_bytes: Mapping[Key, int],
        *,
        shares: Sequence[float] = (),
        traffic: tuple[list[Traffic], list[Traffic]] | None = None,
    ) -> None:
        """Allocate space on the disks now; `traffic` counts reads and writes. Raises StateFileError with the folder.

        `shares`: share of the bytes for each folder, by default equal shares.
        """
        self._folders, self._places = [*folders], dict[Key, list[Place]]()
        # In one queue, reads would wait for the writes of other stages, and loads for compute would wait for updates.
        self._readers, self._writers, self._loaders = (
            ThreadPoolExecutor(THREADS_PER_FOLDER * len(folders), thread_name_prefix=f"states {name}")
            for name in ("read", "written", "loaded")
        )
        self._writes: dict[Key, list[Future[None]]] = {}
        ends = [0] * len(folders)
        for key, size in num_bytes.items():
            places = self._places[key] = []
            for start in range(0, size, CHUNK_BYTES):
                length = min(CHUNK_BYTES, padded(size) - start)
                filled = [(end + length) / share for end, share in zip(ends, shares or [1.0] * len(ends), strict=True)]
                folder = filled.index(min(filled))
                places.append(Place(folder, ends[folder], length, start))
                ends[folder] += length
        self._sizes, self._files, self._is_direct = ends, list[int](), list[bool]()
        self.reads, self.writes = traffic or ([Traffic() for _ in folders], [Traffic() for _ in folders])
        try:
            self._open_files()
        except BaseException:
            self.close()
            raise
        slow = [str(folder) for folder, direct in zip(folders, self._is_direct, strict=True) if not direct]
        if slow:
            logger.warning(
                "--offload_states_to %s: this file system has no direct I/O, so states go through the page cache, "
                "which takes memory and time; use a folder on a local disk with ext4 or xfs",
                ", ".join(slow),
            )

    def _open_files(self) -> None:
        for folder, size in zip(self._folders, self._sizes, strict=True):
            self._files.append(new_file(folder, size))
        self._is_direct = [*map(reads_directly, self._files)]

    def read(self, key: Key, buffer: Tensor, *, is_load: bool = False) -> list[Future[None]]:
        """Start reading a key's bytes into `buffer`, after the key's last write has ended.

        `is_load`: compute waits for this read, so the read does not queue behind the reads of updates.
        """
        threads = self._loaders if is_load else self._readers
        return self._start(threads, os.preadv, key, buffer, self._files_of(key), self._writes.get(key, []))

    def write(self, key: Key, buffer: Tensor, version: Version | None = None) -> list[Future[None]]:
        """Start writing a key's bytes from `buffer`, after the key's last write; `version` is for `SlotFiles`."""
        before = self._writes.get(key, [])
        self._writes[key] = self._start(self._writers, os.pwritev, key, buffer, self._files, before)
        return self._writes[key]

    def parts(self, key: Key, start: int, stop: int) -> Iterator[Tensor]:
        """Yield a key's bytes from `start` to `stop` in uint8 chunks; a chunk is valid until the next is requested.

        Some chunks are read ahead. Raises StateFileError.
        """
        parts = list[tuple[Place, slice]]()
        for folder, offset, length, before_it in self._places[key]:
            first, last = max(start - before_it, 0), min(stop - before_it, length)
            if first < last:
                begin = first // ALIGNMENT * ALIGNMENT
                place = Place(folder, offset + begin, padded(last) - begin, before_it + begin)
                parts.append((place, slice(first - begin, last - begin)))
        before, files = self._writes.get(key, []), self._files_of(key)
        buffers = [map_zeros(max(place.length for place, _ in parts), uint8) for _ in parts[:READ_AHEAD]]

        def start_reading(number: int) -> Future[None]:
            place, view = parts[number][0], buffers[number % READ_AHEAD].numpy().data
            return self._readers.submit(self._move, os.preadv, place, view[: place.length], files, before, None)

        reads = deque(map(start_reading, range(len(buffers))))
        for number, (_, inner) in enumerate(parts):
            reads.popleft().result()
            yield buffers[number % READ_AHEAD][inner]
            if number + READ_AHEAD < len(parts):
                reads.append(start_reading(number + READ_AHEAD))

    def wait_until_written(self, key: Key) -> None:
        """Wait for a key's last write. Raises StateFileError."""
        wait(self._writes.get(key, []))

    def close(self) -> None:
        """Wait for all reads and writes, then free the space on the disks. May be called twice."""
        for threads in (self._loaders, self._readers, self._writers):
            threads.shutdown()
        while self._files:
            os.close(self._files.pop())

    def _files_of(self, key: Key) -> Sequence[int]:
        """Return the files with the latest bytes of a key."""
        return self._files

    def _start(
        self,
        threads: ThreadPoolExecutor,
        move: Move,
        key: Key,
        buffer: Tensor,
        files: Sequence[int],
        before: Sequence[Awaited],
        on_moved: Callable[[int, memoryview], None] | None = None,
    ) -> list[Future[None]]:
        """Start reading or writing all chunks of a key; `on_moved` is called with each chunk's number and bytes."""
        whole = buffer.numpy().data
        return [
            threads.submit(
                self._move,
                move,
                place,
                whole[place.start : place.start + place.length],
                files,
                before,
                on_moved and partial(on_moved, number),
            )
            for number, place in enumerate(self._places[key])
        ]

    def _move(
        self,
        move: Move,
        place: Place,
        view: memoryview,
        files: Sequence[int],
        before: Sequence[Awaited],
        on_moved: Callable[[memoryview], None] | None,
    ) -> None:
        """Wait for `before` (writes that were submitted earlier, so the wait ends), then read or write one chunk."""
        for each in before:
            each.result()
        (folder, offset, length, _), done = place, 0
        try:
            with (self.reads if move is os.preadv else self.writes)[folder].request(length):
                while done < length:
                    count = move(files[folder], [view[done:]], offset + done)
                    if count == 0:
                        raise OSError(errno.EIO, "the file has become shorter")
                    done += count
            if on_moved is not None:
                on_moved(view)
            if not self._is_direct[folder]:
                os.posix_fadvise(files[folder], offset, length, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            doing = "read" if move is os.preadv else "written"
            raise StateFileError(
                f"the states in {self._folders[folder]} (--offload_states_to) cannot be {doing}: "
                f"{reason_of(error)}. Resume from the last checkpoint, with another folder if the disk is damaged."
            ) from error


class Visit:
    """States of a stage in host memory, from the submission of the stage's update until the states are written."""

    def __init__(self, stage: int, version: Version | None = None) -> None:
        """`version`: version as part of which the states are written, if versions are kept."""
        self.stage, self.version = stage, version
        self.reads: list[Future[None]] = []
        self._room = Future[Tensor]()

    @property
    def is_read(self) -> bool:
        """Whether `buffer` would return at once."""
        return self._room.done() and all(read.done() for read in self.reads)

    def room(self) -> Tensor:
        """Wait for the buffer into which the states are read, and return all of it, uint8."""
        return self._room.result()

    def buffer(self) -> Tensor:
        """Wait until the states are read, and return their buffer. Raises StateFileError."""
        room = self.room()
        for read in self.reads:
            read.result()
        return room

    def begin(self, buffer: Tensor, reads: list[Future[None]]) -> None:
        """Give the visit `buffer`, which `reads` fill."""
        self.reads = reads
        self._room.set_result(buffer)


class StateBuffers:
    """Gives buffers to stages in the order in which their updates are submitted."""

    def __init__(
        self,
        files: StateFiles,
        pool: StatePool,
        *,
        gradient_files: StateFiles | None = None,
        waiting: Collection[int] = (),
        allocate: Callable[[int], Tensor] = lambda size: map_zeros(size, uint8),
    ) -> None:
        """Allocate the buffers of `pool`; `allocate` returns uint8 [size] zeros.

        Gradients of the stages in `waiting` are in `gradient_files` (`gradient_key`) until the stage's update.
        """
        self.files, self.waiting, self.gradient_start = files, waiting, pool.states
        self._gradient_files, self._has_weights = gradient_files or files, pool.weights > 0
        self.weights_start = pool.states + pool.gradients
        self._free = [allocate(pool.num_bytes) for _ in range(pool.number)]
        self._waiting: deque[tuple[Visit, bool]] = deque()
        self._lock = threading.Lock()

    def visit(self, stage: int, *, reads: bool = True) -> Visit:
        """Queue for the next free buffer; if `reads`, read the stage's states into it then. Returns at once."""
        visit = Visit(stage, self.files.version)
        with self._lock:
            self._waiting.append((visit, reads))
        self._begin()
        return visit

    def end(self, visit: Visit) -> None:
        """Write the states of a visit, and weights that are on disks; then free the visit's buffer."""
        buffer = visit.buffer()
        writes = self.files.write(visit.stage, buffer, visit.version)
        if self._has_weights:
            writes = writes + self.files.write(weights_key(visit.stage), buffer[self.weights_start :], visit.version)
        self._free_after(writes, buffer)

    def end_with_gradients(self, visit: Visit) -> None:
        """Write the gradients of a visit that reads nothing; then free the visit's buffer."""
        room = visit.room()
        writes = self._gradient_files.write(gradient_key(visit.stage), room[self.gradient_start :])
        self._free_after(writes, room)

    def _free_after(self, writes: Sequence[Future[None]], buffer: Tensor) -> None:
        left, lock = [1 + len(writes)], threading.Lock()

        def written(_: object = None) -> None:
            with lock:
                left[0] -= 1
                is_last = left[0] == 0
            if is_last:  # errors of these writes are raised by the stage's next visit, which waits for them
                with self._lock:
                    self._free.append(buffer)
                self._begin()

        for write in writes:
            write.add_done_callback(written)
        written()  # the extra 1 in `left`, for a stage that has nothing to write

    def drop(self, visit: Visit) -> None:
        """End a visit without writing its states; its buffer is free once the read has ended or failed."""
        room = visit.room()
        self._free_after(visit.reads, room)

    def _begin(self) -> None:
        with self._lock:
            while self._waiting and self._free:
                (visit, reads), buffer = self._waiting.popleft(), self._free.pop()
                found = self.files.read(visit.stage, buffer) if reads else []
                if reads and self._has_weights:
                    found += self.files.read(weights_key(visit.stage), buffer[self.weights_start :])
                if reads and visit.stage in self.waiting:
                    found += self._gradient_files.read(gradient_key(visit.stage), buffer[self.gradient_start :])
                visit.begin(buffer, found)


def weights_key(stage: int) -> Key:
    """Return the key of a stage's weights, which are in files if they are on disks or steps are durable."""
    return stage, "weights"


def gradient_key(stage: int) -> Key:
    """Return the key of a stage's gradients."""
    return stage, "gradients"


def padded(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to a multiple of `ALIGNMENT`, as in buffers and on disks."""
    return aligned(num_bytes, ALIGNMENT)


def wait(moves: Sequence[Future[None]]) -> None:
    """Wait for reads or writes. Raises StateFileError."""
    wait_for_all(moves)
    for move in moves:
        move.result()


def new_file(folder: Path, size: int, name: str | None = None) -> int:
    """Create a file of `size` zero bytes in `folder`; it bypasses the page cache if the file system allows that.

    Without a `name`, the file is unlinked; with a name, it replaces an existing file. Raises StateFileError.
    """
    with explained_for(folder, size):
        folder.mkdir(parents=True, exist_ok=True)
        if name is None:
            file, path = tempfile.mkstemp(prefix="mobius-states-", dir=folder)
            os.unlink(path)  # before the file takes space, because the process may be killed
        else:
            (folder / name).unlink(missing_ok=True)
            file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with suppress(OSError):
                fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
            os.posix_fallocate(file, 0, max(size, 1))
        except OSError:
            os.close(file)
            raise
        return file


@contextmanager
def explained_for(folder: Path, size: int) -> Iterator[None]:
    """Turn OSErrors during the creation of a file of `size` bytes in `folder` into StateFileError."""
    try:
        yield
    except OSError as error:
        detail = reason_of(error)
        if error.errno == errno.ENOSPC:
            free = os.statvfs(folder)
            detail = f"{format_bytes(size)} are needed, {format_bytes(free.f_bavail * free.f_frsize)} is free"
        raise StateFileError(
            f"--offload_states_to {folder}: cannot create a file for optimizer states there: {detail}. Name a folder "
            "on a disk with more space."
        ) from error


def reads_directly(file: int) -> bool:
    """Whether reads and writes of the open `file` bypass the page cache."""
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
