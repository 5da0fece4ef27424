"""Owns how foreign text is quoted in a message: short, whatever its length and depth."""

import reprlib
from collections.abc import Iterable
from typing import Final

_SHOWN: Final = 60
"""Characters of a quotation: a path or a name as people give them fits."""


def excerpt(text: str, max_length: int = _SHOWN) -> str:
    """`text` itself, or its two ends with three dots between them where it is longer than `max_length`."""
    return (
        text
        if len(text) <= max_length
        else f"{text[: max_length - max_length // 3]}...{text[len(text) - max_length // 3 :]}"
    )


def quoted(value: object, max_length: int = _SHOWN) -> str:
    """`repr(value)`, short; nothing of the value is walked through that is not shown."""
    if isinstance(value, str) and len(value) <= max_length:
        return repr(value)
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = shortener.maxlong = max_length
    return excerpt(shortener.repr(value), max_length + 2)


def listed(names: Iterable[str]) -> str:
    """Names joined with commas, each short, and no more than a line holds; `(none)` if there are none."""
    every = list(names)
    more = [f"and {len(every) - 12} more"] if len(every) > 12 else []
    return ", ".join([*map(excerpt, every[:12]), *more]) or "(none)"
