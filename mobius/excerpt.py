"""Owns how foreign text is quoted in a message: short, whatever its length and depth."""

import reprlib
from collections.abc import Iterable
from typing import Final

_SHOWN: Final = 60
"""Characters of a quotation: a path or a name as people give them fits."""


def excerpt(text: str, most: int = _SHOWN) -> str:
    """`text` itself, or its two ends with three dots between them where it is longer than `most`."""
    return text if len(text) <= most else f"{text[: most - most // 3]}...{text[len(text) - most // 3 :]}"


def quoted(value: object, most: int = _SHOWN) -> str:
    """`repr(value)`, short; nothing of the value is walked through that is not shown."""
    if isinstance(value, str) and len(value) <= most:
        return repr(value)
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = shortener.maxlong = most
    return excerpt(shortener.repr(value), most + 2)


def listed(names: Iterable[str]) -> str:
    """Names joined with commas, each short, and no more than a line holds; `(none)` if there are none."""
    every = list(names)
    more = [f"and {len(every) - 12} more"] if len(every) > 12 else []
    return ", ".join([*map(excerpt, every[:12]), *more]) or "(none)"
