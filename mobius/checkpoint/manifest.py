"""The manifest of a checkpoint, `checkpoint.json`: its format, its files with checksums, and the progress of the run.

The manifest is written last: a folder without a valid manifest is no checkpoint. The manifest has a checksum of its
fields. If the fields, their meaning or the listed files change, `FORMAT` must change.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from mobius.checkpoint.tensor_files import FileRecord
from mobius.errors import CheckpointError, quoted
from mobius.files.regular_files import typed_object

FORMAT: Final = 1
_SUM: Final = "checksum"
_DTYPES: Final = ("float32", "bfloat16", "float16")

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file without tensors: its path within the folder, its size, and the zlib.crc32 of its bytes."""

    file_name: str
    num_bytes: int
    checksum: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of a manifest; mappings hold only types of JSON, and finite numbers."""

    format: int = FORMAT
    step: int
    """Number of steps that the run has done."""
    save_number: int
    """Number that grows by one with each save into a folder; the largest is the newest, whatever clocks say."""
    num_parameters: int
    dtype: str
    """Weights' dtype in torch's words, such as bfloat16."""
    has_optimizer: bool
    files: tuple[FileRecord, ...]
    """Weights and states of the optimizer."""
    others: tuple[OtherFile, ...] = ()
    """All other files in the folder; `folders.with_others` adds them."""
    training: JsonObject
    """Counters and loss scale of the optimizer steps (`StepCounts`)."""
    data: JsonObject
    """Position in the data, the fingerprint of the data, and the state of the loop."""
    options: JsonObject
    """Value by option name."""
    versions: JsonObject
    """Version by package name."""
    metric: float | None = None
    """Value of metric_for_best_model in this step's evaluation; None without an evaluation or if it was not finite."""

    @property
    def tensor_files(self) -> dict[str, FileRecord]:
        """File of each tensor, by the tensor's full name."""
        return {name: record for record in self.files for name in record.checksums}

    def to_json(self) -> str:
        """Text of `checkpoint.json`. Raises ValueError or TypeError for values that JSON cannot hold."""
        values = json.loads(json.dumps(asdict(self), allow_nan=False))  # turns keys into text, as JSON does
        return json.dumps({**values, _SUM: _sum_of(values)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, values: JsonObject) -> Manifest:
        """Return the manifest of an object from a file, after checks. Raises CheckpointError, which names no file."""
        if type(found := values.get("format")) is not int or _SUM not in values:
            raise CheckpointError("it is not from Mobius: it has no format number")
        if found != FORMAT:
            age = "an older" if found < FORMAT else "a newer"
            raise CheckpointError(
                f"it has format {found}, this version of Mobius reads format {FORMAT}: it is from {age} version"
            )
        own = {name: value for name, value in values.items() if name != _SUM}
        if values[_SUM] != _sum_of(own):
            raise CheckpointError("it was changed or damaged: its checksum is wrong")
        try:
            manifest = typed_object(cls, own)
        except ValueError as error:
            raise CheckpointError(f"it {error}, which is not of format {FORMAT}") from None
        if manifest.dtype not in _DTYPES:
            raise CheckpointError(f"it has a dtype that no run saves: {quoted(manifest.dtype)}")
        records: list[FileRecord | OtherFile] = [*manifest.files, *manifest.others]
        for record in records:
            _check_file(record)
        stored = [record.file_name for record in records]
        tensors = [name for record in manifest.files for name in record.checksums]
        for what, every in (("file", stored), ("tensor", tensors)):
            if len(set(every)) != len(every):
                raise CheckpointError(f"it lists a {what} twice")
        return manifest


def file_record(entry: object) -> FileRecord:
    """Check a record in JSON's form (`dataclasses.asdict`), and return it. Raises CheckpointError with the reason."""
    try:
        record = typed_object(FileRecord, entry)
    except ValueError as error:
        raise CheckpointError(f"it has a wrong entry of a file, which {error}") from None
    _check_file(record)
    return record


def _check_file(record: FileRecord | OtherFile) -> None:
    """Raise CheckpointError for a file outside the folder, and for missing or impossible checksums."""
    sums = record.checksums.values() if isinstance(record, FileRecord) else [record.checksum]
    if not sums or max(sums) >= 2**32 or not _stays_inside(record.file_name):
        raise CheckpointError(f"it has a wrong entry of a file: {quoted(record)}")


def _stays_inside(name: str) -> bool:
    """Whether a file's path, in its shortest form, stays inside the folder."""
    path = PurePosixPath(name)
    return not {"\0", "\\"} & {*name} and not path.is_absolute() and ".." not in path.parts and str(path) == name != "."


def _sum_of(values: JsonObject) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())
