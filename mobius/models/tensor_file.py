"""Safetensors files (https://huggingface.co/docs/safetensors): which tensors a file holds and where, and their values.

Values are memory-mapped: they are in memory while they are touched. Checkpoints are read instead
(`checkpoint/reader.py`).
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from mobius.errors import CheckpointError
from mobius.files.regular_files import open_regular

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Dtype words of the format that are read and written, in the order in which its library writes tensors."""
_MAX_HEADER_BYTES: Final = 100_000_000
"""safetensors has this limit too."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as described by its file's header; `start` is the byte at which its values begin."""

    name: str
    path: Path
    word: str
    """The format's word for the dtype, which may be a dtype that is not read."""
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the tensor; None if such tensors are not read."""
        return DTYPES.get(self.word)

    def read(self, rows: slice | None = None) -> Tensor:
        """The tensor or some of its rows, mapped. Raises CheckpointError."""
        try:  # map it each time: every touched page of a mapping counts as memory of this process
            tensor = self.of(map_file(self.path))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: cannot read {self.name!r}: {error}") from error
        return tensor if rows is None else tensor[rows]

    def of(self, mapped: mmap.mmap) -> Tensor:
        """The tensor in its mapped file. Raises ValueError if the file is too short."""
        if self.dtype is None:
            raise ValueError(f"it is stored as {self.word}")
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(mapped, dtype=self.dtype, offset=self.start, count=count).reshape(self.shape)


def map_file(path: Path) -> mmap.mmap:
    """File mapped into the address space, without reading it. Raises OSError, and ValueError for an empty file."""
    with open_regular(path) as file:
        # ACCESS_COPY only because torch wants a writable buffer; nobody writes.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a file, by name. Raises OSError, and ValueError whose text completes "is damaged: ..."."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= min(_MAX_HEADER_BYTES, size) else b""
    try:
        header = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        tensors = {name: _parse_tensor(name, path, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its header is not a safetensors header: {error}") from error
    for name, entry in header.items():
        if 8 + length + entry["data_offsets"][1] > size:
            raise ValueError(f"it ends in the middle of {name!r}")
    return tensors


def _parse_tensor(name: str, path: Path, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    """Return the tensor of a header's `entry`; raises one of the usual errors if the entry violates the format."""
    word, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError("no sizes")
    if (dtype := DTYPES.get(word)) and end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("its bytes are not those of its shape")
    return StoredTensor(name, path, word, shape, data_start + start)
