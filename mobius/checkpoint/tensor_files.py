"""The safetensors files of a checkpoint: the stage that writes each, and writing them with checksums.

    model-00001-of-00003.safetensors       NAME                               weights, in the run's dtype
    optimizer-00001-of-00003.safetensors   NAME.exp_avg, NAME.exp_avg_sq      fp32
                                           NAME.master_low                    int16, bf16 runs (split_master.py)
                                           NAME.master                        fp32, fp16 runs
    reduced states have other formats or names (reduced_states.py); those of groups are flat

A run with adapters saves only what is trained, as `trained*.safetensors` in place of `model*.safetensors`. Every tensor
has its parameter's name and shape, and a file has whole parameters of one stage. Weights that the family stores in
pieces, one for each expert, are stored so, but not their optimizer state. A single file of a kind is called
`model.safetensors` or `optimizer.safetensors`. Readers find tensors by name, whatever the number of GPUs or stages that
wrote them.
"""

from __future__ import annotations

import errno
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy.ctypeslib  # noqa: F401  # see write_stage
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mobius.atomic_files import follow_umask, nearest_folder, sync_to_disk
from mobius.engine.reduced_states import codec_for
from mobius.engine.state_codec import StateCodec
from mobius.errors import CheckpointError, reason_of
from mobius.units import format_bytes

MODEL_PREFIX: Final = "model"
"""Prefix of files with all weights of a model, which transformers loads."""
TRAINED_PREFIX: Final = "trained"
"""Prefix of files with only the trained weights: adapters."""

MAX_FILE_BYTES: Final = 5_000_000_000
_HEADER_BYTES: Final = 512
"""Upper bound of the bytes of a tensor's entries in header, index and checkpoint.json."""
_SMALL_FILE_BYTES: Final = 48 * 2**20
"""Tokenizer, configuration and the run's own texts; the largest vocabularies take 40 MB."""
_CHUNK_BYTES: Final = 2**24


@dataclass(frozen=True, slots=True)
class StageParameter:
    """One parameter of the model and its stage; a tied head is not listed."""

    name: str
    shape: tuple[int, ...]
    stage: int
    is_trained: bool = True
    """Frozen parameters have weights, but no state of the optimizer."""
    reduced_format: str = ""
    """Format of the optimizer's state if it is a reduced one."""
    pieces: tuple[str, ...] | None = None
    """Names of the tensors that its weights are stored as; None: one, by its own name."""

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Names of the tensors that its weights are stored as."""
        return (self.name,) if self.pieces is None else self.pieces

    def codec(self, dtype: torch.dtype) -> StateCodec:
        """Format of the optimizer's state next to weights in `dtype`."""
        return codec_for(dtype, self.reduced_format)

    def state_names(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Names of the tensors that the optimizer's state is stored as."""
        return tuple(f"{self.name}.{part}" for part in self.codec(dtype).parts)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights."""
        return self.num_elements * dtype.itemsize

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the optimizer's state."""
        return self.codec(dtype).bytes_of(self.num_elements)


Files = Mapping[str, Sequence[str]]
"""Names of tensors by the name of their file."""


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

    `weights_prefix` begins the names of those with weights. Returns the files of each stage, weights first, up to the
    last stage that has a parameter; the same on all ranks.
    """
    assert len({parameter.name for parameter in parameters}) == len(parameters), "a parameter is saved twice"
    by_stage = sorted(parameters, key=lambda parameter: parameter.stage)  # stable: their order within a stage stays
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
    """Stage and names of tensors of each file, for parameters by stage, names and bytes, in the order of the stages."""
    groups: list[tuple[int, list[str]]] = []
    num_bytes = 0
    for stage, names, more in named:
        if not groups or groups[-1][0] != stage or num_bytes + more > max_file_bytes:
            groups.append((stage, []))
            num_bytes = 0
        groups[-1][1].extend(names)
        num_bytes += more
    return groups


def checkpoint_disk_bytes(parameters: Sequence[StageParameter], dtype: torch.dtype, has_optimizer: bool) -> int:
    """Bytes that a checkpoint takes on the disk at the most, with its small files."""
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
    """Bytes that are free on the disk of `save_dir`, which need not exist yet."""
    return shutil.disk_usage(nearest_folder(save_dir)).free


def checksum(values: Tensor) -> int:
    """The zlib.crc32 of a contiguous CPU tensor's bytes; other threads run meanwhile."""
    assert values.is_contiguous(), "its bytes in memory are not those of its values in order"
    value = 0
    for chunk in chunks_of(values):
        value = zlib.crc32(chunk, value)
    return value


def chunks_of(values: Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous CPU tensor, in place, some MiB at a time."""
    view: memoryview = values.detach().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(view), _CHUNK_BYTES):
        yield view[start : start + _CHUNK_BYTES]


def write_stage(
    folder: Path, files: Files, read: Callable[[str], Tensor], *, progress: Callable[[], None] = lambda: None
) -> list[FileRecord]:
    """Write the files of one stage into `folder`, synced to the disk. Raises CheckpointError that names the file.

    `read` returns a CPU tensor by its full name, asked for once: a contiguous view is written without a copy, anything
    else is held until its file is written. Checksums are computed while the disk writes. `progress` is called before
    and after each file. Several threads may write stages at once; numpy.ctypeslib is imported with this module because
    a thread that needs it while another one imports it may end in a RecursionError (python/cpython#149728).
    """
    records = []
    with ThreadPoolExecutor(1, thread_name_prefix="saving: sums") as summing:
        for file_name, names in files.items():
            path = folder / file_name
            progress()
            values = {name: read(name).contiguous() for name in names}
            sums = {name: summing.submit(checksum, value) for name, value in values.items()}
            num_bytes = sum(value.nbytes for value in values.values())
            with translate_file_errors("write", path, num_bytes):
                save_file(values, path, metadata={"format": "pt"})
                follow_umask(path)  # safetensors makes it readable for its owner alone
                sync_to_disk(path)
                size = path.stat().st_size
            progress()
            records.append(FileRecord(file_name, size, {name: each.result() for name, each in sums.items()}))
    return records


def write_indexes(folder: Path, files: Files, *, num_parameters: int, dtype: torch.dtype) -> None:
    """Write which file has which tensor, for weights and states apart; a single file needs no index.

    Format: https://huggingface.co/docs/safetensors and `save_pretrained` of transformers. Raises CheckpointError.
    """
    weight_maps: dict[str, dict[str, str]] = {}
    for file_name, names in files.items():
        kind, is_one_of_several, _ = file_name.partition("-")
        if is_one_of_several:
            weight_maps.setdefault(kind, {}).update(dict.fromkeys(names, file_name))
    totals = {"total_parameters": num_parameters, "total_size": num_parameters * dtype.itemsize}
    for kind, weight_map in weight_maps.items():
        index = {"metadata": {} if kind == "optimizer" else totals, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_text(folder / f"{kind}.safetensors.index.json", text)


def write_text(path: Path, text: str) -> None:
    """Write a small file, which the caller syncs. Raises CheckpointError."""
    with translate_file_errors("write", path, len(text)):
        path.write_text(text, encoding="utf-8")


@contextmanager
def translate_file_errors(doing: str, path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turn errors of the file system and of safetensors into CheckpointError: `cannot write PATH: ...`.

    If the disk is full, the message gives the free bytes, and those that were to be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = reason_of(error)
        message = f"cannot {doing} {path}: {reason}"
        is_full = getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC})" in str(error)
        if is_full:
            needed = "" if num_bytes is None else f"{format_bytes(num_bytes)} were to be written, "
            message += f"; {needed}{format_bytes(free_disk_bytes(path))} is free. Free some space there"
        raise CheckpointError(f"{message}.") from error
