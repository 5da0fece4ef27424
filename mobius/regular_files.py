"""Reading of files that the user or other programs wrote: regular files only, and text and JSON with one-line errors.

A pipe, a socket or a device is refused before it is opened: it may have no end, opening it may block forever, and it
cannot be read again by each rank and by a resumed run.
"""

import json
import os
import re
import stat
from collections.abc import Iterable
from errno import EFBIG, EINVAL
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, Final, TypeVar, get_args, get_type_hints

from mobius.errors import CheckpointError, MobiusError, excerpt, listed, quoted, reason_of

T = TypeVar("T")

MAX_BYTES: Final = 256 * 2**20
"""Maximum size of a text file that is read into memory; the largest vocabularies take 40 MB."""
_SURROGATE: Final = re.compile(r"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read its bytes, without waiting. Raises OSError with the reason, also for a pipe or device."""
    if problem := _special_kind(os.stat(path).st_mode):
        raise OSError(EINVAL, problem, str(path))
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 -- the caller closes it
    if problem := _special_kind(os.fstat(file.fileno()).st_mode):  # replaced since
        file.close()
        raise OSError(EINVAL, problem, str(path))
    return file


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Contents of a regular file. Raises OSError, also where it has more than `max_bytes` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(EFBIG, f"it is too large: {max_bytes:,} bytes are allowed", str(path))
        return file.read()


def read_text(path: Path, error: type[MobiusError] = CheckpointError, *, max_bytes: int = MAX_BYTES) -> str:
    """Contents of a UTF-8 file. Raises `error`, which names the file and the reason."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is no UTF-8 text: byte {problem.start} is wrong. Get the file again.") from problem
    except (OSError, ValueError) as problem:  # ValueError: no file can have this name
        raise error(f"{path} cannot be read: {reason_of(problem)}.") from problem


def read_json(path: Path, error: type[MobiusError] = CheckpointError) -> Any:
    """Value of a JSON file. Raises `error`, which names the file and the reason."""
    return parse_json(read_text(path, error), path, error)


def parse_json(text: str, path: Path, error: type[MobiusError] = CheckpointError) -> Any:
    """Value of the text that `path` holds.

    Raises `error` for no JSON, and for half characters, which could not even be shown in a message.
    """
    if not text.strip():
        raise error(f"{path} is empty. Get the file again.")
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as problem:
        raise error(f"{path} is nested too deeply to be read.") from problem
    except ValueError as problem:  # JSONDecodeError is one; so are numbers of thousands of digits
        raise error(f"{path} is no JSON: {excerpt(str(problem), 200)}. Repair it, or get the file again.") from problem
    return value


def typed_object(kind: type[T], values: object, **others: type) -> T:
    """Return an instance of the dataclass `kind` from a JSON object that has exactly its fields, each of its type.

    `others` gives the types of fields that JSON stores in another type. Raises ValueError, whose text completes
    "it ...", for anything else. An integer is accepted as a float, a flag is not accepted as a number.
    """
    if not isinstance(values, dict):
        raise ValueError(f"is {quoted(values)}")
    hints = {**get_type_hints(kind), **others}
    if missing := [name for name in hints if name not in values]:
        raise ValueError(f"lacks {listed(missing)}")
    if unknown := [str(name) for name in values if name not in hints]:
        raise ValueError(f"has {listed(unknown)}")
    for name, own in hints.items():
        if not _is_of_kind(values[name], own):
            raise ValueError(f"has {quoted(values[name])} for {name}")
    return kind(**values)


def _is_of_kind(value: object, kind: Any) -> bool:
    if get_args(kind) and NoneType in get_args(kind):
        return value is None or any(_is_of_kind(value, part) for part in get_args(kind) if part is not NoneType)
    return type(value) in (int, float) if kind is float else type(value) is kind


def refuse_special_files(paths: Iterable[Path]) -> None:
    """Raise CheckpointError for the first pipe, socket or device: libraries that read a folder would wait for it."""
    for path in paths:
        try:
            problem = _special_kind(os.stat(path).st_mode)
        except OSError:  # a dangling link, reported where it is read
            continue
        if problem:
            raise CheckpointError(f"{path} cannot be read: {problem}. Remove it, or get the file again.")


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _special_kind(mode: int) -> str | None:
    """Description of a special file; None for a regular file, and for a folder, which `open` refuses."""
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    kinds = (("a pipe", stat.S_ISFIFO), ("a socket", stat.S_ISSOCK))
    kind = next((name for name, is_kind in kinds if is_kind(mode)), "a device")
    return f"it is not a file but {kind}"
