"""Safetensors files (https://huggingface.co/docs/safetensors): names, places and values of the tensors in a file.

Values are memory-mapped, so a page is in memory only once something reads it. Our checkpoints are read without mapping
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
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Supported dtypes by their word in the format, in the order in which the safetensors library writes tensors."""
PLAIN_DTYPES: Final = ("F64", "F32", "F16", "BF16")
"""Trainable dtypes; others are quantized or not weights."""
_MAX_HEADER_BYTES: Final = 100_000_000
"""The safetensors library has the same limit."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of its file describes it; its values begin at byte `start`."""

    name: str
    path: Path
    word: str
    """Word for the dtype in the format; the dtype may be unsupported."""
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the tensor; None if the dtype is not supported."""
        return DTYPES.get(self.word)

    def read(self, rows: slice | None = None) -> Tensor:
        """Map the tensor, or some of its rows. Raises CheckpointError."""
        try:  # map it each time: every touched page of a mapping counts as memory of this process
            tensor = self.of(map_file(self.path))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: cannot read {self.name!r}: {error}") from error
        return tensor if rows is None else tensor[rows]

    def of(self, mapped: mmap.mmap) -> Tensor:
        """Return the tensor as a view of its mapped file. Raises ValueError if the file is too short."""
        if self.dtype is None:
            raise ValueError(f"it is stored as {self.word}")
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(mapped, dtype=self.dtype, offset=self.start, count=count).reshape(self.shape)


def map_file(path: Path) -> mmap.mmap:
    """Map a file into the address space without reading it. Raises OSError, and ValueError for an empty file."""
    with open_regular(path) as file:
        # ACCESS_COPY, because torch requires a writable buffer; nothing writes to it.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a file, by name. Raises OSError, or ValueError with a text that follows "is damaged: "."""
    start, fields = read_header_fields(path)
    return {name: _parse_tensor(name, path, entry, start) for name, entry in fields.items() if name != "__metadata__"}


def read_header_fields(path: Path) -> tuple[int, dict[str, Any]]:
    """Read the first byte of a file's values and the fields of its header, which are checked. Raises as `read_header`.

    Each field is an entry with `dtype`, `shape` and `data_offsets`, or `__metadata__`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= min(_MAX_HEADER_BYTES, size) else b""
    try:
        header = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        for name, entry in entries.items():
            _parse_tensor(name, path, entry, 8 + length)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its header is not a safetensors header: {error}") from error
    for name, entry in entries.items():
        if 8 + length + entry["data_offsets"][1] > size:
            raise ValueError(f"it ends in the middle of {name!r}")
    return 8 + length, header


def _parse_tensor(name: str, path: Path, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    """Return the tensor of a header's `entry`; an invalid one raises an error that `read_header_fields` catches."""
    word, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError("no sizes")
    if (dtype := DTYPES.get(word)) and end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("the number of bytes does not match the shape")
    return StoredTensor(name, path, word, shape, data_start + start)
