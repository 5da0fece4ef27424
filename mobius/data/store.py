"""Owns tokenized samples as arrays, in memory or memory-mapped from a folder of .npy files."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mobius.errors import DataError

Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""Token ids, and whether each is a target."""

_ARRAYS = ("input_ids", "is_target", "offsets")
_FACTS = "facts.json"


@dataclass(frozen=True)
class TokenizedDataset:
    """Samples of different lengths in flat arrays: sample i is `[offsets[i], offsets[i + 1])` of the other two."""

    input_ids: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> "TokenizedDataset":
        """The rows in flat arrays; at least one is needed."""
        assert rows, "a dataset without samples must be refused before"
        input_ids, is_target = zip(*rows, strict=True)
        offsets = np.cumsum([0, *map(len, input_ids)], dtype=np.int64)
        return cls(np.concatenate(input_ids), np.concatenate(is_target), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each sample, int32[len(self)]."""
        return np.diff(self.offsets).astype(np.int32)

    def sample(self, index: int) -> Row:
        """Token ids int32[n] and whether each is a target bool[n]; views, not copies."""
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.input_ids[span], self.is_target[span]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock that belongs to `folder` among all processes of this machine; a process that dies gives it back."""
    with _explained(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_name(folder.name + ".lock").open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def save(folder: Path, dataset: TokenizedDataset, facts: Mapping[str, object]) -> None:
    """Write dataset and facts (JSON) so that `folder` appears complete or not at all; the caller holds the lock."""
    partial = folder.with_name(folder.name + ".partial")
    with _explained(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for name in _ARRAYS:
            np.save(partial / f"{name}.npy", getattr(dataset, name))
        (partial / _FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        partial.rename(folder)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot keep the tokenized dataset in {folder.parent}: {error.strerror}. Make that folder writable, free "
            "some space, or choose another place with the environment variable XDG_CACHE_HOME"
        ) from error


def load(folder: Path) -> tuple[TokenizedDataset, dict[str, Any]] | None:
    """The dataset memory-mapped, so that ranks share its pages, and its facts; None if `folder` is not there.

    A damaged one is removed, and then not there either; the caller holds the lock.
    """
    if not folder.is_dir():
        return None
    try:
        arrays: dict[str, Any] = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        dataset = TokenizedDataset(**arrays)
        if len(dataset.input_ids) != len(dataset.is_target) or len(dataset.input_ids) != dataset.offsets[-1]:
            raise ValueError("arrays of different lengths")
        return dataset, dict(facts)
    except (OSError, ValueError, EOFError, TypeError, IndexError):
        shutil.rmtree(folder, ignore_errors=True)
        return None
