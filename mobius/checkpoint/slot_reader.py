"""Reads a durable step as a checkpoint. Its tensors are parts of regions, whose chunks are in the files of all ranks.

stages-RANK.json    files: paths, relative to the slot, and sizes; one file in each folder of states
                    regions: chunks [file, offset, length, zlib.crc32], tensors {name: [offset, dtype, shape]}
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from mobius.checkpoint.manifest import Manifest
from mobius.checkpoint.reader import CheckpointReader
from mobius.checkpoint.tensor_files import chunks_of, translate_file_errors
from mobius.errors import CheckpointError
from mobius.files.regular_files import open_regular, read_json
from mobius.models.tensor_file import DTYPES, StoredTensor

STAGES_FILES: Final = "stages-*.json"
"""Pattern of the files that mark a folder as a durable step."""
_CACHED_CHUNKS: Final = 16
_MAX_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class Region:
    """Contiguous bytes of a rank's memory, which were written as chunks, one after the other."""

    chunks: Sequence[tuple[int, int, int, int]]
    """File, offset, length and zlib.crc32 of each chunk."""
    tensors: Mapping[str, tuple[int, str, tuple[int, ...]]]
    """Offset, dtype in the words of safetensors, and shape of each tensor, by its name."""

    @classmethod
    def of(cls, chunks: Sequence[tuple[int, int, int, int]], tensors: Mapping[str, Tensor]) -> Region:
        """Describe `tensors`, which are contiguous views of the memory that starts with the first chunk."""
        words = {dtype: word for word, dtype in DTYPES.items()}
        located = {}
        for name, tensor in tensors.items():
            assert tensor.is_contiguous(), f"{name}: its bytes are not consecutive"
            start = int(tensor.storage_offset()) * tensor.element_size()
            located[name] = (start, words[tensor.dtype], tuple(tensor.shape))
        return cls(chunks, located)


def is_durable_step(path: Path) -> bool:
    """Whether a checkpoint is a durable step, so that its tensors are in the files of states."""
    return any(path.glob(STAGES_FILES))


def stages_to_json(slot: Path, paths: Sequence[Path], regions: Sequence[Region]) -> dict[str, Any]:
    """Return the contents of a rank's `STAGES_FILES` in the folder `slot`. Raises OSError."""
    files = [[os.path.relpath(path.resolve(), slot.resolve()), path.stat().st_size] for path in paths]
    return {"files": files, "regions": [asdict(region) for region in regions]}


class SlotReader(CheckpointReader):
    """Tensors of a durable step."""

    def __init__(self, path: Path, manifest: Manifest, *, hint: Callable[[], str]) -> None:
        """Read the tables of all ranks. Raises CheckpointError if a file of states is missing or has another size."""
        super().__init__(path, manifest, hint=hint)
        self._regions: list[tuple[list[Path], Region]] = []
        self._places: dict[str, tuple[int, StoredTensor]] = {}
        for file in sorted(path.glob(STAGES_FILES)):
            try:
                self._add(read_json(file))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(f"{file} is no table of a durable step: {error!r}.") from error
        self._chunk = lru_cache(_CACHED_CHUNKS)(self._read_chunk)

    def _add(self, table: Any) -> None:
        slot = self.path.resolve()
        files = [Path(os.path.normpath(slot / name)) for name, _ in table["files"]]
        for file, (_, size) in zip(files, table["files"], strict=True):
            if not file.is_file() or file.stat().st_size != size:
                raise CheckpointError(f"{self.path} is incomplete: {file} is missing or does not have {size:,} bytes.")
        for entry in table["regions"]:
            region = Region([(*map(int, chunk),) for chunk in entry["chunks"]], {})  # type: ignore[misc]
            for name, (start, word, shape) in entry["tensors"].items():
                self._places[name] = len(self._regions), StoredTensor(name, self.path, word, (*shape,), start)
            self._regions.append((files, region))

    @property
    def files(self) -> set[Path]:
        """Files that hold the tensors."""
        return {file for files, _ in self._regions for file in files}

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Format and shape of each tensor."""
        return {name: stored for name, (_, stored) in self._places.items()}

    def dtype_of(self, full_name: str) -> torch.dtype | None:
        """Return the dtype of a tensor; None if there is no tensor of this name."""
        return self._places[full_name][1].dtype if full_name in self._places else None

    def read(self, full_name: str, out: Tensor) -> Tensor:
        """Fill `out` as `CheckpointReader.read` does; reads whole chunks, to compare their checksums."""
        if full_name not in self._places:
            raise CheckpointError(f"{self.path} has no tensor {full_name!r}: it is a durable step of another model.")
        number, stored = self._places[full_name]
        self.check_format(stored, out)
        is_in_place = out.device.type == "cpu" and out.is_contiguous()
        values = out if is_in_place else torch.empty(out.shape, dtype=out.dtype)
        position = stored.start
        for target in chunks_of(values):
            filled = 0
            while filled < len(target):
                length = self._regions[number][1].chunks[0][2]  # all chunks except the last have this length
                part = self._chunk(number, position // length)[position % length :][: len(target) - filled]
                target[filled : filled + len(part)] = part
                filled, position = filled + len(part), position + len(part)
        return out if is_in_place else out.copy_(values)

    def verify_all(self) -> None:
        """Read all chunks once. Raises CheckpointError for the first damaged chunk."""
        chunks = [
            (number, index) for number, (_, region) in enumerate(self._regions) for index in range(len(region.chunks))
        ]
        with ThreadPoolExecutor(_MAX_THREADS, "verify") as threads:
            for _ in threads.map(lambda chunk: self._read_chunk(*chunk) and None, chunks):
                pass
        self.verify_texts()

    def _read_chunk(self, number: int, index: int) -> memoryview:
        files, region = self._regions[number]
        file_number, offset, length, saved = region.chunks[index]
        path = files[file_number]
        with translate_file_errors("read", path), open_regular(path) as file:
            file.seek(offset)
            values = file.read(length)
        if (found := zlib.crc32(values)) != saved:
            text = f"the checksum of its bytes from {offset:,} on is {found:08x}, saved was {saved:08x}"
            raise self._damaged(path, text)
        return memoryview(values)
