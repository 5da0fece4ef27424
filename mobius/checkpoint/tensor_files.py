"""Plans which stage writes which safetensors file of a checkpoint, and writes the files with checksums.

    model-00001-of-00003.safetensors       NAME                               weights, in the run's dtype
    optimizer-00001-of-00003.safetensors   NAME.exp_avg, NAME.exp_avg_sq      fp32
                                           NAME.master_low                    int16, bf16 runs (split_master.py)
                                           NAME.master                        fp32, fp16 runs
    reduced states have other formats or names (reduced_states.py); parts with a value per group are flat

A run with adapters saves only trained weights, as `trained*.safetensors` instead of `model*.safetensors`. Every tensor
has its parameter's name and shape, and a file has whole parameters of one stage. A checkpoint stores weights in pieces,
one for each expert, if the family does, but never their optimizer state. A single file of a kind is called
`model.safetensors` or `optimizer.safetensors`. Readers find tensors by name, whatever number of GPUs or stages wrote
them.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy.ctypeslib  # noqa: F401  # see write_stage
import torch
from torch import Tensor

from mobius.engine.reduced_states import codec_for
from mobius.engine.stage_memory import parts_of
from mobius.engine.state_codec import StateCodec
from mobius.errors import CheckpointError, reason_of
from mobius.files.atomic_files import nearest_folder
from mobius.models.tensor_file import DTYPES
from mobius.units import format_bytes

MODEL_PREFIX: Final = "model"
"""Prefix of files with all weights of a model, which transformers loads."""
TRAINED_PREFIX: Final = "trained"
"""Prefix of files with only the trained weights: adapters."""

MAX_FILE_BYTES: Final = 5_000_000_000
_HEADER_BYTES: Final = 512
"""Upper bound of the bytes of a tensor's entries in header, index and checkpoint.json, without its name."""
_SMALL_FILE_BYTES: Final = 48 * 2**20
"""Bytes allowed for tokenizer, configuration and texts of the run; the largest vocabularies take 40 MB."""


@dataclass(frozen=True, slots=True)
class StageParameter:
    """One parameter of the model and its stage; a tied head is not listed."""

    name: str
    shape: tuple[int, ...]
    stage: int
    is_trained: bool = True
    """Whether there is an optimizer state; frozen parameters have only weights."""
    reduced_format: str = ""
    """Format of the optimizer state if it is reduced; else empty."""
    pieces: tuple[str, ...] | None = None
    """Names of the tensors that store the weights; None: one tensor with the parameter's name."""
    weight_dtype: torch.dtype | None = None
    """Format of the weights if it is not the run's."""

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Names of the tensors that store the weights."""
        return (self.name,) if self.pieces is None else self.pieces

    def codec(self, dtype: torch.dtype) -> StateCodec:
        """Format of the optimizer state next to weights in `dtype`."""
        return codec_for(self.weight_dtype or dtype, self.reduced_format)

    def state_names(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Names of the tensors that store the optimizer state."""
        return tuple(f"{self.name}.{part}" for part in self.codec(dtype).parts)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights."""
        return self.num_elements * (self.weight_dtype or dtype).itemsize

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the optimizer state."""
        return self.codec(dtype).bytes_of(self.num_elements)


Files = Mapping[str, Sequence[str]]
"""Names of the tensors of each file, by the file's name."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that was written: its size, and the zlib.crc32 of each of its tensors' bytes."""

    file_name: str
    num_bytes: int
    checksums: Mapping[str, int]


def plan_files(
    parameters: Sequence[StageParameter],
    *,
    dtype: torch.dtype,
    has_optimizer: bool,
    weights_prefix: str = MODEL_PREFIX,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Files]:
    """Divide `parameters` into files of one stage each, of at most `max_file_bytes` unless one parameter is larger.

    Names of files with weights begin with `weights_prefix`. Returns the files of each stage, weights first, up to the
    last stage that has a parameter; equal on all ranks.
    """
    assert len({parameter.name for parameter in parameters}) == len(parameters), "a parameter is saved twice"
    by_stage = sorted(parameters, key=lambda parameter: parameter.stage)  # stable: keeps the order within a stage
    weights = [(each.stage, each.weight_names, each.num_bytes(dtype)) for each in by_stage if each.weight_names]
    trained = [each for each in by_stage if each.is_trained and has_optimizer]
    states = [(each.stage, each.state_names(dtype), each.state_bytes(dtype)) for each in trained]
    files: list[dict[str, Sequence[str]]] = [{} for _ in range(by_stage[-1].stage + 1 if by_stage else 0)]
    for kind, named in ((weights_prefix, weights), ("optimizer", states)):
        groups = _divide(named, max_file_bytes)
        for number, (stage, names) in enumerate(groups, start=1):
            suffix = f"-{number:05}-of-{len(groups):05}" if len(groups) > 1 else ""
            files[stage][f"{kind}{suffix}.safetensors"] = names
    return list[Files](files)


def _divide(named: Sequence[tuple[int, tuple[str, ...], int]], max_file_bytes: int) -> list[tuple[int, list[str]]]:
    """Return stage and tensor names of each file. `named`: stage, tensor names and bytes of parameters, by stage."""
    groups: list[tuple[int, list[str]]] = []
    num_bytes = 0
    for stage, names, more in named:
        if not groups or groups[-1][0] != stage or num_bytes + more > max_file_bytes:
            groups.append((stage, []))
            num_bytes = 0
        groups[-1][1].extend(names)
        num_bytes += more
    return groups


def weight_bytes(parameters: Iterable[StageParameter], dtype: torch.dtype) -> int:
    """Return the bytes of the weights of all `parameters`."""
    return sum(each.num_bytes(dtype) for each in parameters if each.weight_names)


def checkpoint_disk_bytes(parameters: Sequence[StageParameter], dtype: torch.dtype, has_optimizer: bool) -> int:
    """Maximum bytes that a checkpoint takes on the disk, including its small files."""
    num_bytes = _SMALL_FILE_BYTES
    for parameter in parameters:
        has_state = has_optimizer and parameter.is_trained
        num_bytes += parameter.num_bytes(dtype) + (parameter.state_bytes(dtype) if has_state else 0)
        names = (*parameter.weight_names, *(parameter.state_names(dtype) if has_state else ()))
        num_bytes += sum(_HEADER_BYTES + len(name) for name in names)
    return num_bytes


def check_disk_space(save_dir: Path, num_bytes: int) -> None:
    """Raise CheckpointError if the disk of `save_dir`, which need not exist yet, has less than `num_bytes` free."""
    if (free := free_disk_bytes(save_dir)) < num_bytes:
        raise CheckpointError(
            f"a checkpoint in {save_dir} needs {format_bytes(num_bytes)}, {format_bytes(free)} is free. Free some "
            "space, choose another --save_dir, or keep fewer with --save_total_limit."
        )


def free_disk_bytes(save_dir: Path) -> int:
    """Free bytes on the disk of `save_dir`, which need not exist yet."""
    return shutil.disk_usage(nearest_folder(save_dir)).free


def chunks_of(values: Tensor) -> Iterator[memoryview]:
    """Bytes of a contiguous CPU tensor, without copying them, some MiB at a time."""
    for part in parts_of(values.detach()):
        yield part.view(torch.uint8).numpy().data


Parts = Callable[[str, Tensor], Iterable[Tensor]]
"""Function of a name and its tensor; yields the tensor's elements, flat and in order, as `StageMemory.parts` does."""


def write_stage(
    folder: Path,
    files: Files,
    read: Callable[[str], Tensor],
    *,
    parts: Parts = lambda name, tensor: parts_of(tensor),
    progress: Callable[[], None] = lambda: None,
) -> list[FileRecord]:
    """Write the files of one stage into `folder`, synced to the disk. Raises CheckpointError that names the file.

    `read` returns a tensor by its full name. It is called once per tensor; the tensor is kept in memory until its file
    is written; the values come from `parts`. `progress` is called before and after each file. Several threads may write
    stages at once. This module imports numpy.ctypeslib because a thread that needs it while another thread imports it
    may end in a RecursionError (python/cpython#149728).
    """
    records = []
    for file_name, names in files.items():
        path = folder / file_name
        progress()
        tensors = {name: read(name) for name in names}
        with translate_file_errors("write", path, sum(tensor.nbytes for tensor in tensors.values())):
            checksums = save_file(tensors, path, parts)
            size = path.stat().st_size
        progress()
        records.append(FileRecord(file_name, size, checksums))
    return records


def save_file(tensors: Mapping[str, Tensor], path: Path, parts: Parts) -> dict[str, int]:
    """Write a safetensors file, synced to the disk; returns the zlib.crc32 of each tensor's bytes.

    The file equals a file of the safetensors library. At most a part of a tensor is copied at a time. Checksums are
    computed while the disk writes. After an error, such as a full disk, the file is removed.
    """
    words = {dtype: word for word, dtype in DTYPES.items()}
    order = sorted(tensors, key=lambda name: ([*words].index(tensors[name].dtype), name))
    entries, checksums, end = dict[str, tuple[str, Sequence[int], int, int]](), dict.fromkeys(tensors, 0), 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        entries[name] = words[tensors[name].dtype], tensors[name].shape, start, end
    try:
        with path.open("wb") as file, ThreadPoolExecutor(1, thread_name_prefix="saving: sums") as summing:
            file.write(header_bytes(entries))
            for name in order:
                for part in parts(name, tensors[name]):
                    data = part.detach().cpu().contiguous().view(torch.uint8).numpy().data
                    summed = summing.submit(zlib.crc32, data, checksums[name])
                    file.write(data)
                    checksums[name] = summed.result()
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return checksums


def header_bytes(
    tensors: Mapping[str, tuple[str, Sequence[int], int, int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a safetensors file, which has each tensor's format, shape, first byte and end.

    The header is padded with spaces to a multiple of 8 bytes. `metadata`: its free texts, None for those that
    transformers writes.
    """
    entries: dict[str, object] = {"__metadata__": metadata or {"format": "pt"}}
    for name, (word, shape, start, end) in tensors.items():
        entries[name] = {"dtype": word, "shape": [*shape], "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    size = len(text) + -len(text) % 8
    return size.to_bytes(8, "little") + text.ljust(size)


def write_indexes(folder: Path, files: Files, *, num_parameters: int, num_bytes: int) -> None:
    """Write an index (tensor -> file) of the weights and one of the states; a single file of a kind needs no index.

    `num_parameters` and `num_bytes` count all weights. Format: https://huggingface.co/docs/safetensors and
    `save_pretrained` of transformers. Raises CheckpointError.
    """
    weight_maps: dict[str, dict[str, str]] = {}
    for file_name, names in files.items():
        kind, is_one_of_several, _ = file_name.partition("-")
        if is_one_of_several:
            weight_maps.setdefault(kind, {}).update(dict.fromkeys(names, file_name))
    totals = {"total_parameters": num_parameters, "total_size": num_bytes}
    for kind, weight_map in weight_maps.items():
        index = {"metadata": {} if kind == "optimizer" else totals, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_text(folder / f"{kind}.safetensors.index.json", text)


def write_text(path: Path, text: str) -> None:
    """Write a small file, which the caller syncs to the disk. Raises CheckpointError."""
    with translate_file_errors("write", path, len(text)):
        path.write_text(text, encoding="utf-8")


@contextmanager
def translate_file_errors(doing: str, path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turn errors of the file system into CheckpointError: `cannot write PATH: ...`.

    If the disk is full, the message gives the free bytes and the bytes that were to be written.
    """
    try:
        yield
    except OSError as error:
        inner = "" if error.filename is None or Path(error.filename) == path else f" ({error.filename})"
        message = f"cannot {doing} {path}: {reason_of(error)}{inner}"
        if error.errno == errno.ENOSPC:
            needed = "" if num_bytes is None else f"{format_bytes(num_bytes)} were to be written, "
            message += f"; {needed}{format_bytes(free_disk_bytes(path))} is free. Free some space there"
        raise CheckpointError(f"{message}.") from error
