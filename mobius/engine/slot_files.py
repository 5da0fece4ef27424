"""Named files of optimizer states and weights in two slots. Steps overwrite the slots in turn, so one slot is complete.

    step     1              2              3                       writes of step 3 begin once step 2 is on the disks
    slot 0                  states 2 ....................          of all ranks
    slot 1   states 1 ....................  states 3 ....              (`Overwriting`)

    FOLDER/NAME/slot-0/states-RANK.raw      in each folder (`--offload_states_to`), with checksums of all chunks
    FOLDER/NAME/slot-1/states-RANK.raw

`checkpoint/durable_steps.py` decides when a slot is a checkpoint, and writes the checkpoint's other files.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from mobius.engine.state_files import (
    Awaited,
    Key,
    StateFiles,
    Version,
    explained_for,
    new_file,
    reads_directly,
    wait,
)
from mobius.files.atomic_files import sync_to_disk

NUM_SLOTS = 2
LOOK_SECONDS = 1.0


class SlotPlace(NamedTuple):
    """Place of a run's slots."""

    parents: Sequence[Path]
    name: str
    """Name of the run's folder in each parent folder."""
    rank: int
    first_slot: int = 0
    """Slot to which the run first writes states; the other slot may be the checkpoint from which the run resumed."""

    def folders(self, slot: int) -> list[Path]:
        """Return the folders of a slot; the first folder also has the checkpoint's other files."""
        return [parent / self.name / f"slot-{slot}" for parent in self.parents]

    def slot_of(self, checkpoint: Path) -> int | None:
        """Return the slot that holds `checkpoint`; None if it is not a slot of this run."""
        found = (slot for slot in range(NUM_SLOTS) if self.folders(slot)[0].resolve() == checkpoint.resolve())
        return next(found, None)


@dataclass(frozen=True)
class DiskFolders:
    """Folders for the parts that a rank's memory layout places on disks."""

    folders: Sequence[Path] = ()
    shares: Sequence[float] = ()
    """Share of the bytes for each folder; empty: equal shares."""
    slots: SlotPlace | None = None
    """Place of the kept versions of the states; None if no versions are kept."""


class Overwriting:
    """Waits until the other slot's step is durable, then invalidates this slot's checkpoint, to overwrite the slot."""

    def __init__(self, other_is_durable: Future[None], invalidate: Callable[[], None]) -> None:
        """`invalidate` is called once, before the first write; until then both slots are complete."""
        self._other_is_durable, self._invalidate, self._lock = other_is_durable, invalidate, threading.Lock()
        self._has_begun = False

    def result(self) -> None:
        """Wait until the slot may be overwritten; raises the previous step's error if that step failed."""
        self._other_is_durable.result()
        with self._lock:
            if not self._has_begun:
                self._invalidate()
                self._has_begun = True


class SlotFiles(StateFiles):
    """Files with one file per folder and slot; each slot has a place for the bytes of every key."""

    def __init__(
        self,
        num_bytes: Mapping[Key, int],
        *,
        place: SlotPlace,
        kind: str = "states",
        shares: Sequence[float] = (),
    ) -> None:
        """Create the files of the first slot; `open_slot` creates others. Raises StateFileError with the folder."""
        self._place, self._kind = place, kind
        self._slots, self._slot_of = dict[int, list[int]](), dict[Key, int]()
        self._unchanging = dict[Key, list[int]]()
        """Checksums of the bytes that no step changes; both slots hold these bytes."""
        super().__init__(place.parents, num_bytes, shares=shares)
        self.begin_version(place.first_slot, done())

    def _open_files(self) -> None:
        self.open_slot(self._place.first_slot)

    def open_slot(self, slot: int) -> None:
        """Create the files of a slot, full of zeros, in place of existing files. Raises StateFileError."""
        files = self._slots[slot] = []
        for path, size in zip(self.paths(slot), self._sizes, strict=True):
            files.append(new_file(path.parent, size, path.name))
            with explained_for(path.parent, size):
                for folder in path.parents[:3]:
                    sync_to_disk(folder)
        self._is_direct = [*map(reads_directly, files)]

    def paths(self, slot: int) -> list[Path]:
        """Return the files of a slot, by folder."""
        return [folder / f"{self._kind}-{self._place.rank}.raw" for folder in self._place.folders(slot)]

    def begin_version(self, slot: int, may_begin: Awaited) -> None:
        """Direct all later writes to `slot`; these writes wait for `may_begin`."""
        changing = {key: len(places) for key, places in self._places.items() if key not in self._unchanging}
        self.version = Version(slot, may_begin, changing)
        self.version.checksums.update(self._unchanging)

    def chunks(self, version: Version) -> dict[Key, list[tuple[int, int, int, int]]]:
        """Return folder, offset, length and checksum of each key's chunks."""
        return {
            key: [
                (place.folder, place.offset, place.length, checksum)
                for place, checksum in zip(places, version.checksums[key], strict=True)
            ]
            for key, places in self._places.items()
        }

    def _files_of(self, key: Key) -> Sequence[int]:
        return self._slots[self._slot_of.get(key, self._place.first_slot)]

    def write(self, key: Key, buffer: Tensor, version: Version | None = None) -> list[Future[None]]:
        """Start writing a key's bytes to the slot of `version` (default: the current version), once that may begin."""
        version = version or self.version
        assert version is not None, "one has begun"
        before: list[Awaited] = [*self._writes.get(key, []), version.may_begin]
        slot = version.slot
        files, summing = self._slots[slot], _summing(version.checksums[key])
        writes = self._start(self._writers, os.pwritev, key, buffer, files, before, summing)
        version.add(writes)
        self._writes[key], self._slot_of[key] = writes, slot
        return writes

    def write_unchanging(self, key: Key, buffer: Tensor) -> None:
        """Write bytes that no step changes to both slots, which must be open. Raises StateFileError."""
        sums = self._unchanging[key] = [0] * len(self._places[key])
        for files in self._slots.values():
            wait(self._start(self._writers, os.pwritev, key, buffer, files, [], _summing(sums)))

    def sync(self, version: Version, check: Callable[[], None] = lambda: None) -> None:
        """Wait until all keys of a version are written and on the disks. Raises StateFileError.

        During the wait, `check` is called each second; it may raise the error of a failed writer.
        """
        while not wait_for_all([version.written], LOOK_SECONDS).done:
            check()
        version.written.result()
        for folder, file in zip(self._folders, self._slots[version.slot], strict=True):
            with explained_for(folder, 0):
                os.fdatasync(file)

    def close(self) -> None:
        super().close()
        for files in self._slots.values():
            while files:
                os.close(files.pop())


def _summing(sums: list[int]) -> Callable[[int, memoryview], None]:
    """Return the function that stores a chunk's checksum in `sums`."""

    def add(number: int, chunk: memoryview) -> None:
        sums[number] = zlib.crc32(chunk)

    return add


def done() -> Future[None]:
    """Return a future that is already done."""
    future = Future[None]()
    future.set_result(None)
    return future
