"""Stores tokenized samples as arrays in memory-mapped files, written part by part.

    folder.partial/   input_ids.bin  is_target.bin  offsets.bin    appended to, part by part
                      journal.jsonl                                one line per finished part: sizes and progress
    folder/           the files above, with facts.json instead of the journal: complete, created by one rename

The journal line of a part is written after the part's data is on disk. Bytes after the sizes in the last line belong to
an unfinished part of a killed process; the next process removes these bytes.
"""

import fcntl
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from mobius.errors import DataError, first_line, reason_of
from mobius.files.atomic_files import sync_to_disk
from mobius.files.regular_files import read_json
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

TokenizedSample = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""Token ids, and whether each token is a target."""

_DTYPES: Final = {"input_ids": np.int32, "is_target": np.bool_, "offsets": np.int64}
_FACTS: Final = "facts.json"
_JOURNAL: Final = "journal.jsonl"
_OFFSETS_AT_ONCE: Final = 1 << 20
_ABANDONED_SECONDS: Final = 7 * 24 * 3600


@dataclass(frozen=True)
class TokenizedDataset:
    """Samples of different lengths in flat arrays: sample i is `[offsets[i], offsets[i + 1])` of the other arrays."""

    input_ids: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Token count of each sample, int32[len(self)]; in memory, not memory-mapped."""
        return np.diff(self.offsets).astype(np.int32)

    def sample(self, index: int) -> TokenizedSample:
        """Return views of a sample's token ids int32[n] and target mask bool[n]."""
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.input_ids[span], self.is_target[span]


@contextmanager
def tokenized_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` against all other processes of this machine; the end of a process releases it."""
    with _explained(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_name(folder.name + ".lock").open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot keep the tokenized dataset in {folder.parent}: {reason_of(error)}. Make that folder writable, "
            "free some space, or choose another place with the environment variable XDG_CACHE_HOME"
        ) from error


def load_tokenized(folder: Path) -> tuple[TokenizedDataset, dict[str, Any]] | None:
    """Return the dataset, memory-mapped so that ranks share its pages, and its facts; None if `folder` does not exist.

    A damaged dataset is removed with a warning, and None is returned. The caller holds the lock.
    """
    if not folder.is_dir():
        return None
    try:
        facts, checksum = read_json(folder / _FACTS, DataError)
        if checksum != _checksum(facts):
            raise ValueError("the checksum of the facts is wrong")
        arrays: dict[str, Any] = {name: np.memmap(_path(folder, name), kind, "r") for name, kind in _DTYPES.items()}
        dataset = TokenizedDataset(**arrays)
        sizes = [len(dataset.input_ids), len(dataset.is_target), int(dataset.offsets[-1]), len(dataset)]
        if sizes != [facts["num_tokens"]] * 3 + [facts["num_samples"]] or dataset.lengths.min() < 1:
            raise ValueError("file sizes do not match the facts")
        return dataset, dict(facts)
    except (DataError, OSError, ValueError, EOFError, TypeError, IndexError, KeyError, AttributeError) as error:
        logger.warning("the tokenized dataset in %s is damaged and is made again: %s", folder, first_line(error))
        shutil.rmtree(folder, ignore_errors=True)
        return None


def remove_abandoned(parent: Path) -> None:
    """Delete unfinished datasets in `parent` that are at least a week old, unless a run holds their lock."""
    for partial in parent.glob("*.partial"):
        # Skip a dataset that a run has locked, that is already gone, or that may not be removed.
        with suppress(OSError), partial.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            facts = [path.stat() for path in (partial, *partial.iterdir())]
            last = max(fact.st_mtime for fact in facts)
            if time.time() - last > _ABANDONED_SECONDS:
                shutil.rmtree(partial)
                size = format_bytes(sum(fact.st_size for fact in facts))
                day = time.strftime("%Y-%m-%d", time.gmtime(last))
                logger.info("removed %s (%s), which a run left unfinished on %s", partial, size, day)


class DatasetWriter:
    """Owns the files of a growing dataset; the caller holds the lock of `folder`.

    `progress` is the progress at the last part that this or an earlier process has committed; None before the first
    part. As a context manager, the writer closes the files, and deletes them if no part was committed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._partial = folder, _partial(folder)
        self.progress: dict[str, Any] | None = None
        self.num_tokens = self.num_samples = 0
        self._files = ExitStack()
        with _explained(folder):
            self._partial.mkdir(exist_ok=True)
            journal_bytes = self._resume()
            self._journal = self._open(self._partial / _JOURNAL, journal_bytes)
            sizes = _sizes(self.num_tokens, self.num_samples)
            self._arrays = {name: self._open(_path(self._partial, name), size) for name, size in sizes.items()}

    def append(
        self, input_ids: npt.NDArray[np.int32], is_target: npt.NDArray[np.bool_], lengths: Sequence[int]
    ) -> None:
        """Append samples to the arrays; with empty `lengths`, append tokens that `finish` splits into rows."""
        starts = self.num_tokens + np.cumsum([0, *lengths], dtype=np.int64)[:-1]
        with _explained(self._folder):
            for name, array in (("input_ids", input_ids), ("is_target", is_target), ("offsets", starts)):
                self._arrays[name].write(np.ascontiguousarray(array, _DTYPES[name]).tobytes())
        self.num_tokens += len(input_ids)
        self.num_samples += len(lengths)

    def commit_part(self, progress: Mapping[str, object]) -> None:
        """Sync all data to disk, then record the part with `progress` (JSON); after that, the part survives a crash."""
        with _explained(self._folder):
            for file in self._arrays.values():
                self._sync(file)
            line = {"num_tokens": self.num_tokens, "num_samples": self.num_samples, "progress": progress}
            self._journal.write(json.dumps(line).encode() + b"\n")
            self._sync(self._journal)
        self.progress = dict(progress)

    def finish(self, facts: Mapping[str, object], *, row_length: int | None = None) -> None:
        """Complete the dataset with `facts` (JSON) and rename it to `folder`; `row_length` splits all tokens into rows.

        The last row may be shorter; a single remaining token is dropped, because nothing predicts a row's first token.
        """
        with _explained(self._folder):
            if row_length is not None:
                self._cut(row_length)
            self._arrays["offsets"].write(np.int64(self.num_tokens).tobytes())
            for file in self._arrays.values():
                self._sync(file)
            all_facts = {**facts, "num_tokens": self.num_tokens, "num_samples": self.num_samples}
            with (self._partial / _FACTS).open("wb") as file:
                file.write(json.dumps([all_facts, _checksum(all_facts)], indent=1).encode())
                self._sync(file)
            self._files.close()
            (self._partial / _JOURNAL).unlink()
            self._partial.rename(self._folder)
            sync_to_disk(self._folder.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk was reported before; buffered data belong to no committed part
            self._files.close()
        if self.progress is None:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _resume(self) -> int:
        """Adopt the committed parts on disk; return the journal's size up to the last committed part."""
        journal = self._partial / _JOURNAL
        if not journal.is_file():
            return 0
        try:
            text = journal.read_bytes()
            text = text[: text.rfind(b"\n") + 1]
            if not text:
                return 0
            last = json.loads(text.splitlines()[-1])
            num_tokens, num_samples = int(last["num_tokens"]), int(last["num_samples"])
            for name, size in _sizes(num_tokens, num_samples).items():
                if _path(self._partial, name).stat().st_size < size:
                    raise ValueError(f"{name}.bin is too short")
            self.progress, self.num_tokens, self.num_samples = dict(last["progress"]), num_tokens, num_samples
            return len(text)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            logger.warning("unfinished data in %s is damaged and is made again: %s", self._partial, first_line(error))
            return 0

    def _open(self, path: Path, size: int) -> Any:
        file = self._files.enter_context(path.open("ab"))
        file.truncate(size)
        return file

    def _sync(self, file: Any) -> None:
        file.flush()
        os.fsync(file.fileno())

    def _cut(self, row_length: int) -> None:
        if self.num_tokens % row_length == 1:
            self.num_tokens -= 1
            for name in ("input_ids", "is_target"):
                self._arrays[name].flush()
                self._arrays[name].truncate(self.num_tokens * np.dtype(_DTYPES[name]).itemsize)
        self.num_samples = -(-self.num_tokens // row_length)
        for first in range(0, self.num_samples, _OFFSETS_AT_ONCE):
            rows = np.arange(first, min(first + _OFFSETS_AT_ONCE, self.num_samples), dtype=np.int64)
            self._arrays["offsets"].write((rows * row_length).tobytes())


def _checksum(facts: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _sizes(num_tokens: int, num_samples: int) -> dict[str, int]:
    """Return the bytes of each file, without the last offset, which is written at the end."""
    return {"input_ids": 4 * num_tokens, "is_target": num_tokens, "offsets": 8 * num_samples}


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.bin"


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")
