"""Files with a JSON object in each line; writing them tolerates a full disk and a removed file."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Final

from mobius.errors import reason_of
from mobius.files.atomic_files import atomic_write
from mobius.files.regular_files import open_regular

logger = logging.getLogger(__name__)

_NO_JSON_NUMBERS: Final = ("nan", "inf", "-inf")


class JsonLines:
    """A file with one line of JSON per step; if the disk is full, lines wait in memory."""

    def __init__(self, path: Path) -> None:
        """Take the file to append to; it is opened by the first `append`."""
        self._path = path
        self._file: FileIO | None = None  # unbuffered, so that a killed run loses no metrics
        self._num_bytes = 0
        self._waiting: list[bytes] = []
        self._has_warned = False

    def append(self, numbers: Mapping[str, object]) -> None:
        """Write one line, in the format of `json_text`."""
        self._waiting.append(json_text(numbers).encode() + b"\n")
        try:
            self._write()
        except OSError as error:
            if not self._has_warned:
                then = "the run goes on, and the file is completed when there is space again"
                logger.warning("cannot write %s (%s); %s", self._path, reason_of(error), then)
            self._has_warned = True

    def _write(self) -> None:
        """Write all waiting lines or none: if the disk becomes full, a partly written text is cut off again."""
        if self._file is None:
            self._file = FileIO(self._path, "a+")
            self._num_bytes = self._file.seek(0, os.SEEK_END)
        self._write_anew_if_removed(self._file)
        text = b"".join(self._waiting)
        try:
            written = 0
            while written < len(text):
                written += self._file.write(text[written:])
        except OSError:
            self._file.truncate(self._num_bytes)
            raise
        self._num_bytes += len(text)
        self._waiting.clear()

    def _write_anew_if_removed(self, opened: FileIO) -> None:
        """Write the file again if it was removed; its lines can still be read while it is open."""
        if self._path.exists():
            return
        opened.seek(0)
        with atomic_write(self._path) as temporary, temporary.open("wb") as file:
            shutil.copyfileobj(opened, file)
        self._file = FileIO(self._path, "a+")
        self._num_bytes = self._file.seek(0, os.SEEK_END)
        opened.close()

    def flush(self) -> None:
        """Write all waiting lines to the file. Raises OSError."""
        if self._file is not None or self._waiting:
            self._write()

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards."""
        if self._waiting:
            logger.warning("%s lacks the last %d lines", self._path, len(self._waiting))
        if self._file is not None:
            self._file.close()


def filter_lines(path: Path, keeps: Callable[[Mapping[str, Any]], bool]) -> int:
    """Remove lines from a file of JSON lines, atomically and synced; returns their number. Raises OSError.

    `keeps` is called once per line, in order; if it returns False, the line is removed. A line that is no complete JSON
    object is removed, too, for example if a power cut truncated it. A missing file counts as empty.
    """
    if not path.exists():
        return 0
    with open_regular(path) as file:
        retained = bytearray(_keeps_line(line, keeps) for line in file)
    if not all(retained):
        with atomic_write(path) as temporary, path.open("rb") as file, temporary.open("wb") as shorter:
            shorter.writelines(line for line, stays in zip(file, retained, strict=True) if stays)
    return retained.count(0)


def _keeps_line(line: bytes, keeps: Callable[[Mapping[str, Any]], bool]) -> bool:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return line.endswith(b"\n") and isinstance(record, dict) and keeps(record)


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return JSON of plain values; non-finite numbers become "nan", "inf" and "-inf", strings that `float` reads."""
    return json.dumps(_as_json(value), allow_nan=False, indent=indent)


def _as_json(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def as_numbers(value: Any) -> Any:
    """Return `value` with the strings of non-finite numbers (`json_text`) turned into numbers again."""
    if isinstance(value, dict):
        return {name: as_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_numbers(item) for item in value]
    return float(value) if value in _NO_JSON_NUMBERS else value
