"""The manifest of a checkpoint, `checkpoint.json`: its format, files and sums, and where the run stood.

It is the last file to be written: a folder without a valid one is no checkpoint. Its own sum is in it. A change of its
fields, of their meaning or of the files around it takes a new `FORMAT`.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import PurePosixPath
from typing import Any, Final, cast

from mobius.checkpoint.tensor_files import FileRecord
from mobius.errors import CheckpointError
from mobius.excerpt import listed, quoted

FORMAT: Final = 1
MANIFEST_FILE: Final = "checkpoint.json"
_SUM: Final = "checksum"
_DTYPES: Final = ("float32", "bfloat16", "float16")

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file without tensors: its path within the folder, its size, and the zlib.crc32 of all of it."""

    file_name: str
    num_bytes: int
    checksum: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that a checkpoint says of itself; mappings hold what JSON can, with finite numbers."""

    format: int = FORMAT
    step: int
    """Steps of the run that were made."""
    save_number: int
    """Grows by one with each save into a folder; the largest is the newest, whatever clocks say."""
    num_parameters: int
    dtype: str
    """Weights' dtype in torch's words, such as bfloat16."""
    has_optimizer: bool
    files: tuple[FileRecord, ...]
    """Weights and states of the optimizer."""
    others: tuple[OtherFile, ...] = ()
    """Everything else in the folder; `folders.complete` fills it in."""
    training: JsonObject
    """Counters, loss scale, random generators: whatever the loop needs to go on."""
    data: JsonObject
    """Position in the data, and what tells whether it is the same data."""
    options: JsonObject
    """Value by option name."""
    versions: JsonObject
    """Version by package name."""
    metric: float | None = None
    """metric_for_best_model of this step's evaluation, if there was one and it was finite."""

    @property
    def tensor_files(self) -> dict[str, FileRecord]:
        """The file of each tensor, by the tensor's full name."""
        return {name: record for record in self.files for name in record.checksums}

    def to_json(self) -> str:
        """The text of `checkpoint.json`. Raises ValueError or TypeError for what JSON cannot hold."""
        values = json.loads(json.dumps(asdict(self), allow_nan=False))  # keys are text from here on
        return json.dumps({**values, _SUM: _sum_of(values)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, values: JsonObject) -> Manifest:
        """Check and take over an object as it was read. Raises CheckpointError with the reason, without a file name."""
        if type(found := values.get("format")) is not int or _SUM not in values:
            raise CheckpointError("it is not of Mobius: it has no format number")
        if found != FORMAT:
            age = "an older" if found < FORMAT else "a newer"
            raise CheckpointError(
                f"it has format {found}, this version of Mobius reads format {FORMAT}: it is of {age} version"
            )
        own = {name: value for name, value in values.items() if name != _SUM}
        if values[_SUM] != _sum_of(own):
            raise CheckpointError("it was changed or damaged: its checksum is another one")
        names = [field.name for field in fields(cls)]
        if wrong := set(names) ^ set(own):
            raise CheckpointError(f"it has other fields than format {FORMAT}: {listed(sorted(wrong))}")
        for name, (is_valid, allowed) in _RULES.items():
            if not is_valid(own[name]):
                raise CheckpointError(f"its {name!r} is {quoted(own[name])}; it must be {allowed}")
        files = tuple(file_record(entry) for entry in own["files"])
        others = tuple(_other_file(entry) for entry in own["others"])
        stored = [*(record.file_name for record in files), *(other.file_name for other in others)]
        tensors = [name for record in files for name in record.checksums]
        for what, every in (("file", stored), ("tensor", tensors)):
            if len(set(every)) != len(every):
                raise CheckpointError(f"it has a {what} twice")
        return cls(**{**own, "files": files, "others": others})


def file_record(entry: object) -> FileRecord:
    """A record as JSON has it (`dataclasses.asdict`), checked. Raises CheckpointError with the reason."""
    if isinstance(entry, dict) and entry.keys() == {"file_name", "num_bytes", "checksums"}:
        sums = entry["checksums"]
        is_summed = isinstance(sums, dict) and sums and all(map(_is_sum, sums.values()))
        if is_summed and _is_place(entry["file_name"]) and _is_count(entry["num_bytes"]):
            return FileRecord(**cast(dict[str, Any], entry))
    raise CheckpointError(f"it has a wrong entry of a file: {quoted(entry)}")


def _other_file(entry: object) -> OtherFile:
    if isinstance(entry, dict) and entry.keys() == {"file_name", "num_bytes", "checksum"}:
        is_counted = _is_count(entry["num_bytes"]) and _is_sum(entry["checksum"])
        if is_counted and _is_place(entry["file_name"]):
            return OtherFile(**cast(dict[str, Any], entry))
    raise CheckpointError(f"it has a wrong entry of a file: {quoted(entry)}")


def _sum_of(values: JsonObject) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_sum(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _is_place(value: object) -> bool:
    """Whether it is a path that stays inside the folder."""
    if not isinstance(value, str) or not value or "\0" in value or "\\" in value:
        return False
    path = PurePosixPath(value)
    return not path.is_absolute() and ".." not in path.parts and str(path) == value != "."


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_metric(value: object) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(cast(float, value)))


_COUNT: Final = (_is_count, "a whole number of at least 0")
_OBJECT: Final = (_is_object, "an object")
_RULES: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "step": _COUNT,
    "save_number": _COUNT,
    "num_parameters": _COUNT,
    "dtype": (lambda value: value in _DTYPES, f"one of {', '.join(_DTYPES)}"),
    "has_optimizer": (lambda value: type(value) is bool, "true or false"),
    "files": (_is_list, "a list"),
    "others": (_is_list, "a list"),
    "training": _OBJECT,
    "data": _OBJECT,
    "options": _OBJECT,
    "versions": _OBJECT,
    "metric": (_is_metric, "a finite number or null"),
}
