"""Makes the files of a checkpoint from a durable step by sharing its blocks (FICLONERANGE): no tensor is written again.

    slot     | ... a a a a b b b b b c c c | norms | ...      files of states: regions in chunks, perhaps striped
                   | shared blocks       |     | copied
    file     header, a a a a b b b b b c c c                  safetensors, as any checkpoint has

A file has tensors that are neighbours in a region. Blocks can be shared where they begin alike: the header, padded with
spaces as safetensors allows, ends as far behind the begin of a block as the tensors begin in the slot. Small tensors
between gaps are copied. The file system copies a block when either file changes it: the next steps leave it as it is.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from mobius.atomic_files import nearest_folder
from mobius.checkpoint.slot_reader import Region
from mobius.checkpoint.tensor_files import (
    DTYPES,
    MAX_FILE_BYTES,
    MODEL_PREFIX,
    FileRecord,
    header_bytes,
    translate_file_errors,
    write_stage,
)
from mobius.engine.state_files import ALIGNMENT, Key
from mobius.errors import CheckpointError, reason_of
from mobius.regular_files import open_regular

SMALLEST_CLONE = 2**16
"""Bytes of neighbouring tensors below which they are copied."""
_FICLONERANGE: Final = 0x4020940D
"""Linux's request of `ioctl_ficlonerange(2)`."""


@dataclass(frozen=True)
class StepTensors:
    """A rank's part of a durable step: its tensors in the files of a slot."""

    paths: Sequence[Path]
    regions: Mapping[Key, Region]
    checksums: Mapping[str, int]
    """The zlib.crc32 of each tensor."""


def clone_range(source: int, start: int, length: int, target: int, position: int) -> None:
    """Let open file `target` share blocks of `source`; numbers are multiples of a block's size. Raises OSError."""
    fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, start, length, position))


def why_not_cloned(folders: Collection[Path], save_dir: Path) -> str | None:
    """Return why files in `save_dir`, which need not exist, cannot share blocks with those in `folders`, if so."""
    into = nearest_folder(save_dir)
    for folder in folders:
        try:
            with tempfile.TemporaryFile(dir=folder) as source, tempfile.TemporaryFile(dir=into) as target:
                os.pwrite(source.fileno(), bytes(2 * ALIGNMENT), 0)
                clone_range(source.fileno(), ALIGNMENT, ALIGNMENT, target.fileno(), ALIGNMENT)
        except OSError as error:
            return f"{save_dir} shares no blocks with {folder}: {reason_of(error)}"
    return None


def clone_tensors(
    folder: Path, step: StepTensors, weights: Collection[str], *, progress: Callable[[], None] = lambda: None
) -> list[FileRecord]:
    """Make safetensors files of a step's tensors in `folder`, synced; those of `weights` apart. Raises CheckpointError.

    Names are KIND-STAGE-NUMBER. `progress` is called with each file.
    """
    records = []
    for key, region in step.regions.items():
        stage, copied = key if isinstance(key, int) else key[0], dict[str, list[str]]()
        for number, names in enumerate(_neighbours(region, weights)):
            kind = MODEL_PREFIX if names[0] in weights else "optimizer"
            start, stop = region.span(names[0])[0], region.span(names[-1])[1]
            if stop - start < SMALLEST_CLONE:
                copied.setdefault(f"{kind}-{stage}-small.safetensors", []).extend(names)
                continue
            path = folder / f"{kind}-{stage}-{number}.safetensors"
            progress()
            with translate_file_errors("clone", path):
                size = _clone(path, step.paths, region, names, start, stop)
            records.append(FileRecord(path.name, size, {name: step.checksums[name] for name in names}))

        def read(name: str, region: Region = region) -> Tensor:
            with translate_file_errors("read", step.paths[0]):
                return _read(step.paths, region, name)

        records += write_stage(folder, copied, read, progress=progress)
    for record in records:
        if damaged := [name for name, found in record.checksums.items() if found != step.checksums[name]]:
            raise CheckpointError(f"{step.paths[0]}: {damaged[0]!r} has another checksum than when it was written.")
    return records


def _neighbours(region: Region, weights: Collection[str]) -> Iterator[list[str]]:
    """Names of tensors of one kind without a gap between them, as many as a file may have."""
    names, first, end = list[str](), 0, 0
    for name in sorted(region.tensors, key=region.span):
        start, stop = region.span(name)
        is_alike = not names or (name in weights) is (names[0] in weights)
        if names and not (is_alike and start == end and stop - first <= MAX_FILE_BYTES):
            yield names
            names = []
        first, end = first if names else start, stop
        names.append(name)
    if names:
        yield names


def _parts(region: Region, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """File, offset, position in the region and length of the parts of chunks that hold bytes of a region."""
    position = 0
    for file, offset, length, _ in region.chunks:
        first, last = max(start, position), min(stop, position + length)
        if first < last:
            yield file, offset + first - position, first, last - first
        position += length


def _clone(path: Path, paths: Sequence[Path], region: Region, names: Sequence[str], start: int, stop: int) -> int:
    """Make a safetensors file of the bytes of a region, synced; returns its size. Raises OSError."""
    entries = {}
    for name in names:
        (_, word, shape), (own_start, own_stop) = region.tensors[name], region.span(name)
        entries[name] = word, shape, own_start - start, own_stop - start
    header = header_bytes(entries, begin=start, alignment=ALIGNMENT)
    data = len(header)
    first, last = start // ALIGNMENT * ALIGNMENT, -(-stop // ALIGNMENT) * ALIGNMENT
    with path.open("xb") as target, ExitStack() as opened:
        sources = [opened.enter_context(open_regular(path)).fileno() for path in paths]
        for file, offset, position, length in _parts(region, first, last):
            clone_range(sources[file], offset, length, target.fileno(), data + position - start)
        os.pwrite(target.fileno(), header, 0)
        os.ftruncate(target.fileno(), data + stop - start)
        os.fsync(target.fileno())
    return data + stop - start


def _read(paths: Sequence[Path], region: Region, name: str) -> Tensor:
    """Return a tensor of a region. Raises OSError."""
    (_, word, shape), values = region.tensors[name], bytearray()
    for file, offset, _, length in _parts(region, *region.span(name)):
        with open_regular(paths[file]) as source:
            values += os.pread(source.fileno(), length, offset)
    return torch.frombuffer(values, dtype=DTYPES[word]).view(shape)
