"""Owns how datasets and pairs are written in words: `b.parquet:0.3`, `prompt=document,completion=summary`."""

import os
import re
from collections import Counter
from typing import Final

from mobius.config.config import Columns, DatasetEntry
from mobius.errors import ConfigError
from mobius.excerpt import quoted

_NUMBER: Final = re.compile(r"[-+]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|nan|inf)", re.ASCII | re.IGNORECASE)
_MOST_SHOWN: Final = 5


def parse_dataset(word: str) -> DatasetEntry:
    """`name` or `name:weight`; a file or folder that is there under the whole word is taken as the name.

    Raises ValueError for what is no name at all. Whether the weight is allowed is checked with all other values.
    """
    name, _, weight = word.rpartition(":")
    is_weighted = _NUMBER.fullmatch(weight) is not None and name != "" and not _exists(word)
    entry = DatasetEntry(name, float(weight)) if is_weighted else DatasetEntry(word)
    if not entry.name.strip().strip("-"):
        raise ValueError(word)  # `--dataset --` is a slip of the shell
    return entry


def is_plain(entry: DatasetEntry) -> bool:
    """Whether the name alone, as a word, means `entry`, whatever files there are."""
    _, colon, end = entry.name.rpartition(":")
    return entry == DatasetEntry(entry.name) and not (colon and _NUMBER.fullmatch(end))


def _exists(word: str) -> bool:
    return os.path.exists(os.path.expanduser(word))


def parse_pairs(text: str, *, form: str, example: str) -> Columns:
    """Pairs of `form`, such as KEY=COLUMN, separated by commas, spaces around them dropped.

    Raises ConfigError with the problems.
    """
    parts = [part.partition("=") for part in text.split(",")]
    pairs = [(key.strip(), value.strip()) for key, _, value in parts]
    problems = [
        f"{quoted(''.join(part))} is no pair {form}; write them as in {example}"
        for part, pair in zip(parts, pairs, strict=True)
        if not all(pair)
    ]
    counts = Counter(key for key, value in pairs if key and value)
    problems += [f"{quoted(key)} is given {count} times; keep one" for key, count in counts.items() if count > 1]
    if problems:
        raise ConfigError(*problems[:_MOST_SHOWN])
    return tuple(pairs)
