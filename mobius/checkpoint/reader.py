"""Reads a checkpoint tensor by tensor into memory of the caller, and verifies each checksum.

Files are read instead of mapped, so that a disk error is an exception and not a signal that ends the process.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from mobius.checkpoint.manifest import Manifest
from mobius.checkpoint.tensor_files import chunks_of, translate_file_errors
from mobius.errors import CheckpointError, quoted
from mobius.files.regular_files import open_regular, read_bytes
from mobius.models.tensor_file import StoredTensor, read_header

_MAX_THREADS: Final = 8


class CheckpointReader:
    """Tensors of one complete checkpoint, opened by `folders.open_checkpoint`; several threads may read at once."""

    def __init__(self, path: Path, manifest: Manifest, *, hint: Callable[[], str]) -> None:
        """Take the manifest; `hint` returns a sentence about another checkpoint, for messages about damaged files."""
        self.path = path
        self.manifest = manifest
        self._files = manifest.tensor_files
        self._hint = hint
        self._tensors_in = functools.cache(self._read_header)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        dtype: torch.dtype = getattr(torch, self.manifest.dtype)
        return dtype

    def is_in(self, folder: Path) -> bool:
        """Whether this checkpoint is in `folder`, perhaps through a link."""
        return folder.resolve() in (self.path.resolve().parent, self.path.parent.resolve())

    def dtype_of(self, full_name: str) -> torch.dtype | None:
        """Return the dtype of a tensor; None if the checkpoint has no tensor of this name."""
        return self._find(full_name).dtype if full_name in self._files else None

    def read(self, full_name: str, out: Tensor) -> Tensor:
        """Fill `out`, on any device, with a tensor of its shape and dtype; returns `out`.

        A contiguous `out` on the CPU is filled without another copy. Raises CheckpointError if the tensor is missing,
        damaged, or of another shape or dtype; `out` is then undefined.
        """
        stored = self._find(full_name)
        path = stored.path
        self.check_format(stored, out)
        is_in_place = out.device.type == "cpu" and out.is_contiguous()
        values = out if is_in_place else torch.empty(out.shape, dtype=out.dtype)
        found, position = 0, stored.start
        with translate_file_errors(f"read {full_name!r} of", path), open_regular(path) as file:
            for chunk in chunks_of(values):
                filled = 0
                while filled < len(chunk) and (count := os.preadv(file.fileno(), [chunk[filled:]], position)):
                    filled, position = filled + count, position + count
                if filled < len(chunk):
                    raise self._damaged(path, f"it ends in the middle of {full_name!r}")
                found = zlib.crc32(chunk, found)
        if found != (saved := self._files[full_name].checksums[full_name]):
            raise self._damaged(path, f"the checksum of {full_name!r} is {found:08x}, but {saved:08x} was saved")
        return out if is_in_place else out.copy_(values)

    @staticmethod
    def check_format(stored: StoredTensor, out: Tensor) -> None:
        """Raise CheckpointError if `out` does not have the shape and dtype of the stored tensor."""
        if (stored.shape, stored.dtype) != (out.shape, out.dtype):
            raise CheckpointError(
                f"{stored.path}: {stored.name!r} is {_text(stored.dtype or stored.word, stored.shape)}, this run needs "
                f"{_text(out.dtype, out.shape)}: the checkpoint is from another model or precision."
            )

    def verify_all(self) -> None:
        """Read everything once. Raises CheckpointError that names the first damaged file and tensor."""

        def verify_tensor(full_name: str) -> None:
            stored = self._find(full_name)
            self.read(full_name, torch.empty(stored.shape, dtype=stored.dtype))

        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "verify") as threads:
            for _ in threads.map(verify_tensor, self._files):
                pass
        self.verify_texts()

    def verify_texts(self) -> None:
        """Compare all files without tensors with their checksums. Raises CheckpointError for the first that differs."""
        for other in self.manifest.others:
            path = self.path / other.file_name
            with translate_file_errors("read", path):
                found = zlib.crc32(read_bytes(path))
            if found != other.checksum:
                raise self._damaged(
                    path,
                    f"it was changed after it was saved (its checksum is {found:08x}, saved was {other.checksum:08x}). "
                    "Restore the file. To change options of a resumed run, give them at its start, with "
                    "--resume_changes if they change what is trained",
                )

    def _find(self, full_name: str) -> StoredTensor:
        if full_name not in self._files:
            raise CheckpointError(
                f"{self.path} has no tensor {full_name!r}: it is a checkpoint of another model, or of a run that "
                "trained other parameters."
            )
        return self._tensors_in(self._files[full_name].file_name)[full_name]

    def _read_header(self, file_name: str) -> dict[str, StoredTensor]:
        path = self.path / file_name
        try:
            with translate_file_errors("read", path):
                tensors = read_header(path)
        except ValueError as error:
            raise self._damaged(path, str(error)) from error
        expected = next(record.checksums for record in self.manifest.files if record.file_name == file_name)
        if stray := sorted(tensors.keys() ^ expected.keys()):
            raise self._damaged(path, f"it and checkpoint.json disagree about {quoted(stray[0])}")
        return tensors

    def _damaged(self, path: Path, reason: str) -> CheckpointError:
        return CheckpointError(f"{path} is damaged: {reason}. {self._hint()}".rstrip())


def _text(dtype: torch.dtype | str, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
