"""Reads regular files that the user or other programs wrote; errors of text and JSON are one line.

A pipe, a socket or a device is refused before it is opened: it may have no end, opening it may block forever, and other
ranks or a resumed run could not read it again.
"""

import dataclasses
import difflib
import functools
import json
import os
import stat
from collections.abc import Mapping
from enum import EnumType
from errno import EFBIG, EINVAL
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, BinaryIO, Final, TypeVar, cast, get_args, get_origin, get_type_hints

from mobius.errors import CheckpointError, MobiusError, excerpt, listed, quoted, reason_of

T = TypeVar("T")

MAX_BYTES: Final = 256 * 2**20
"""Maximum size of a text file that is read into memory; the largest vocabularies take 40 MB."""
_MOST: Final = 2**62
"""Bound of whole numbers in typed objects: a few digits more than the number of parameters of any model."""
_TYPE_NAMES: Final = {
    int: "a whole number from 0 on",
    float: "a number",
    bool: "true or false",
    str: "a text",
    tuple: "a list",
    list: "a list",
    frozenset: "a list",
    Mapping: "an object",
}


def similar_path(path: Path, *, folders_only: bool = False) -> str:
    """Return the question whether the user meant the name closest to the missing `path`; empty without a close name."""
    try:
        names = [entry.name for entry in os.scandir(path.parent) if entry.is_dir() or not folders_only]
    except (OSError, ValueError):  # ValueError: an impossible folder name
        return ""
    near = difflib.get_close_matches(path.name, sorted(names), 1)
    return f" (did you mean {excerpt(str(path.with_name(near[0])), 300)}?)" if near else ""


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read its bytes. Raises OSError with the reason, also for a pipe or device."""
    if problem := _special_kind(os.stat(path).st_mode):
        raise OSError(EINVAL, problem, str(path))
    return open(path, "rb")


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Contents of a regular file. Raises OSError, also if it has more than `max_bytes` bytes."""
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
    except (OSError, ValueError) as problem:  # ValueError: an impossible file name
        raise error(f"{path} cannot be read: {reason_of(problem)}.") from problem


def read_json(path: Path, error: type[MobiusError] = CheckpointError) -> Any:
    """Value of a JSON file. Raises `error`, which names the file and the reason."""
    return parse_json(read_text(path, error), path, error)


def parse_json(text: str, path: Path, error: type[MobiusError] = CheckpointError) -> Any:
    """Value of the JSON text that `path` holds. Raises `error` if it is not JSON."""
    if not text.strip():
        raise error(f"{path} is empty. Get the file again.")
    try:
        return json.loads(text)
    except ValueError as problem:  # JSONDecodeError is a ValueError; so is the error for numbers of thousands of digits
        raise error(f"{path} is no JSON: {excerpt(str(problem), 200)}. Repair it, or get the file again.") from problem


def typed_object(kind: type[T], values: object, place: str = "", **others: Any) -> T:
    """Return an instance of the dataclass `kind` from a JSON object that has exactly its fields, each of its type.

    `place` is the object's place in its file, for messages; empty for the whole file. `others` gives the types of
    fields that JSON stores in another type. Raises ValueError, whose text completes "it ...", for anything else.
    """
    if not isinstance(values, dict):
        raise ValueError(f"has {quoted(values)} for `{place}`, not an object" if place else f"is {quoted(values)}")
    types = {**_field_types(cast(Any, kind)), **others}
    where = f" in `{place}`" if place else ""
    if missing := [name for name in types if name not in values]:
        raise ValueError(f"lacks {listed(missing)}{where}")
    if unknown := [str(key) for key in values if key not in types]:
        raise ValueError(f"has {listed(unknown)}{where}")
    prefix = f"{place}." if place else ""
    return kind(**{name: typed_value(types[name], values[name], prefix + name) for name in types})


def typed_value(kind: Any, value: object, place: str) -> Any:
    """Return a JSON value as the type of a field: a plain type, an enum, a dataclass, or a container of these types.

    A whole number is a count below 2^62, and valid as a float, too; a flag is not a valid number. `Annotated`
    adds bounds to a number, with the methods of `config.options.Bounds`. Raises ValueError like `typed_object`, with
    the value, its `place` in the file, and the allowed values.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        number, bounds = typed_value(parts[0], value, place), parts[1]
        if not bounds.allow(number):
            raise ValueError(f"has {quoted(value)} for `{place}`, which must be {bounds.demand(number)}")
        return number
    if NoneType in parts:
        return None if value is None else typed_value(parts[0], value, place)
    if origin in (tuple, list, frozenset) and isinstance(value, list):
        return origin(typed_value(parts[0], each, f"{place}[{index}]") for index, each in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {key: typed_value(parts[1], each, f"{place}.{excerpt(str(key))}") for key, each in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return value if isinstance(value, kind) else typed_object(kind, value, place)
    if isinstance(kind, EnumType):
        if value in list(kind):
            return kind(value)
        raise ValueError(f"has {quoted(value)} for `{place}`, not one of {', '.join(map(str, kind))}")
    is_right = type(value) in (int, float) if kind is float else type(value) is kind
    if kind is not Any and (not is_right or (kind is int and not 0 <= cast(int, value) < _MOST)):
        raise ValueError(f"has {quoted(value)} for `{place}`, not {_TYPE_NAMES.get(origin or kind, kind)}")
    return value


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _special_kind(mode: int) -> str | None:
    """Description of a special file; None for a regular file, and for a folder, which `open` refuses."""
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    kinds = (("a pipe", stat.S_ISFIFO), ("a socket", stat.S_ISSOCK))
    kind = next((name for name, is_kind in kinds if is_kind(mode)), "a device")
    return f"it is not a file but {kind}"
