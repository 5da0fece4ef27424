"""The teacher's numbers of a distillation run: files with the most likely tokens of each target, and their places.

Targets are numbered through the sequences that the run needs, so prompts and padding take no room. The files stay in
the cache folder: another run on the same samples finds them there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap

from mobius.checkpoint.tensor_files import free_disk_bytes
from mobius.config.objective import teacher_bytes
from mobius.data.batches import IGNORE_INDEX, Batch
from mobius.data.token_store import TokenizedDataset
from mobius.errors import CheckpointError, reason_of
from mobius.files.atomic_files import publish_folder, sync_tree
from mobius.objectives.distillation import TEACHER_IDS, TEACHER_LOGPS
from mobius.units import format_bytes

_IDS, _LOGPS = "ids.npy", "logps.npy"
_ANOTHER_PLACE: Final = "Free some space, or choose another place with the environment variable XDG_CACHE_HOME."


@dataclass(frozen=True)
class TargetPlaces:
    """Places of the targets of sequences, which are numbered through one or more datasets."""

    starts: npt.NDArray[np.int64]
    """Place of each sequence's first target; -1 for a sequence that the run does not need."""
    num_targets: npt.NDArray[np.int64]
    """Number of targets of each sequence."""

    @classmethod
    def of(cls, datasets: Sequence[TokenizedDataset], needed: Sequence[npt.NDArray[np.bool_]]) -> list[Self]:
        """Return the places of each dataset, one after the other; `needed` tells of each sequence if it has places."""
        found, end = list[Self](), 0
        for dataset, is_needed in zip(datasets, needed, strict=True):
            firsts = dataset.all_sequence_offsets[:-1]
            # Nothing predicts a sequence's first token.
            numbers = np.add.reduceat(dataset.is_target, firsts, dtype=np.int64) - dataset.is_target[firsts]
            starts = end + np.cumsum(numbers * is_needed) - numbers * is_needed
            found.append(cls(np.where(is_needed, starts, -1), numbers))
            end += int(numbers[is_needed].sum())
        return found

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the places of the sequences of several datasets, which are numbered one after the other."""
        return cls(
            np.concatenate([each.starts for each in parts]), np.concatenate([each.num_targets for each in parts])
        )

    def in_batch(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Return the place of each token of a batch that is a target, [rows, L]; -1 for none."""
        numbers, sequences, is_target = batch.sequence_numbers, batch.sequences, batch.labels != IGNORE_INDEX
        assert numbers is not None, "the rows of a student have sequences"
        assert sequences is not None, "the rows of a student have sequences"
        counts = np.where(numbers < 0, 0, self.num_targets[numbers])
        shifts = np.where(numbers < 0, 0, self.starts[numbers]) - (np.cumsum(counts, axis=1) - counts)
        shifts = np.take_along_axis(np.pad(shifts, ((0, 0), (0, 1))), sequences, 1)
        return np.where(is_target, shifts + np.cumsum(is_target, axis=1) - 1, -1)


@dataclass(frozen=True)
class TeacherFiles:
    """Tokens int32 [targets, K] and log-probabilities fp16 [targets, K + 1] in a folder of the cache."""

    folder: Path
    num_targets: int
    num_logprobs: int

    @property
    def num_bytes(self) -> int:
        return self.num_targets * teacher_bytes(self.num_logprobs)

    @property
    def exists(self) -> bool:
        """Whether the folder is complete."""
        return self.folder.is_dir()

    def partial(self, word: str) -> Path:
        """Return the folder for files that are being written; `word` keeps runs apart that write at once."""
        return self.folder.with_name(f"{self.folder.name}.{word}.partial")

    def create(self, partial: Path) -> None:
        """Create empty files with all their space on the disk. Raises CheckpointError."""
        try:
            partial.mkdir(parents=True)
            if (free := free_disk_bytes(partial)) < self.num_bytes:
                raise OSError(f"{format_bytes(free)} is free")
            for array in self._open(partial, "w+"):
                descriptor = os.open(str(array.filename), os.O_RDWR)
                try:  # a write into a mapped file on a full disk would kill the process
                    os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size)
                finally:
                    os.close(descriptor)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"the teacher's numbers of {self.num_targets:,} targets need {format_bytes(self.num_bytes)} in "
                f"{self.folder.parent}: {reason_of(error)}. Lower --top_k_logprobs or the number of samples. "
                f"{_ANOTHER_PLACE}"
            ) from error

    def write(self, partial: Path, places: npt.NDArray[np.int64], numbers: npt.NDArray[np.float32]) -> None:
        """Write `numbers` [n, 2 K + 1] (`teacher_numbers`) at `places` [n]."""
        ids, logps = self._open(partial, "r+")
        ids[places], logps[places] = np.split(numbers, [self.num_logprobs], axis=1)

    def publish(self, partial: Path) -> None:
        """Give the complete files their name. Raises OSError."""
        sync_tree(partial)
        if self.exists:  # another run was faster
            shutil.rmtree(partial, ignore_errors=True)
        else:
            publish_folder(partial, self.folder)

    def read(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
        """Return both arrays, mapped. Raises CheckpointError."""
        try:
            ids, logps = self._open(self.folder, "r")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the teacher's numbers in {self.folder} cannot be read: {reason_of(error)}. Remove the folder; then "
                "the teacher makes them again. With several nodes, all must see one folder: set XDG_CACHE_HOME to it."
            ) from error
        if (ids.shape, logps.shape) != self._shapes:
            raise CheckpointError(f"the teacher's numbers in {self.folder} are of other data: remove the folder.")
        return ids, logps

    @property
    def _shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.num_targets, self.num_logprobs), (self.num_targets, self.num_logprobs + 1)

    def _open(self, folder: Path, mode: str) -> tuple[np.memmap, np.memmap]:
        shapes = self._shapes if mode == "w+" else (None, None)
        ids = open_memmap(folder / _IDS, mode, np.int32 if mode == "w+" else None, shapes[0])
        return ids, open_memmap(folder / _LOGPS, mode, np.float16 if mode == "w+" else None, shapes[1])


@dataclass(frozen=True)
class Teacher:
    """The teacher's numbers, for the rows of training and of each evaluation dataset."""

    ids: npt.NDArray[np.int32]
    logps: npt.NDArray[np.float16]
    training: TargetPlaces
    evaluation: Sequence[TargetPlaces]
    """Places of each evaluation dataset, in the order of `RunData.evaluation_parts`."""

    def teach(self, batch: Batch, places: TargetPlaces, *, has_head: bool) -> Batch:
        """Return `batch` with the teacher's numbers, which only a rank with the head needs."""
        batch, at = replace(batch, sequences=None, sequence_numbers=None), places.in_batch(batch)
        if not has_head:
            return batch
        of_token, exists = np.where(at < 0, 0, at), (at >= 0)[..., None]
        values: dict[str, npt.NDArray[Any]] = {
            TEACHER_IDS: self.ids[of_token] * exists,
            TEACHER_LOGPS: self.logps[of_token] * exists,
        }
        return replace(batch, token_values={**batch.token_values, **values})


class TaughtBatches:
    """Batches of a run's steps with the teacher's numbers."""

    def __init__(self, batches: Iterator[Batch], teacher: Teacher, *, has_head: bool) -> None:
        self._batches, self._teacher, self._has_head = batches, teacher, has_head

    def __iter__(self) -> TaughtBatches:
        return self

    def __next__(self) -> Batch:
        return self._teacher.teach(next(self._batches), self._teacher.training, has_head=self._has_head)
