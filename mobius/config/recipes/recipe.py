"""Defines a tool (another trainer) whose files Mobius reads, and translates the keys of its files to options."""

import fnmatch
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from mobius.config.options import shown
from mobius.config.recipes.answers import IGNORED, OTHER, SHARED, TAKEN, Row, asks_for_nothing, find_row, read_table

_QUANTIZED: Final = re.compile(
    r"[-_](gptq|awq|aqlm|hqq|nvfp4|mxfp4|bnb|gguf|fp8|int[48]|[48]bit)(?![a-z])", re.IGNORECASE
)
"""Part of a hub id that names quantized weights."""


@dataclass(frozen=True)
class Launch:
    """Facts about the run that are not in the file."""

    num_processes: int = 1
    """Processes that the tool's launcher would start, each with a separate batch: the ranks of this run."""
    pipeline_ranks: int = 1
    typed: Mapping[str, object] = field(default_factory=dict)
    """Options that the command line sets, which replace those of the file."""


@dataclass(frozen=True)
class Recipe:
    """One tool: the keys that identify its files, its tables, and the function for keys that depend on each other."""

    name: str
    signs: str
    """Sets of keys that only this tool's files have, separated by spaces; + joins the keys of a set."""
    tables: tuple[str, ...]
    translate: "Callable[[TheirFile], None]"

    @cached_property
    def rows(self) -> Mapping[str, Row]:
        """Rows by key, `key=value` or pattern; rows of the last table have priority."""
        return {name: row for table in self.tables for name, row in read_table(table).items()}

    def row(self, key: str, value: object = None) -> Row | None:
        """Row of a key with this value, from the tool's table or else the shared table; None for an unknown key."""
        patterns = (row for name, row in self.rows.items() if "*" in name and fnmatch.fnmatch(key, name))
        return find_row(self.rows, key, value) or next(patterns, None) or find_row(read_table(SHARED), key, value)

    def sign(self, keys: Collection[str]) -> list[str]:
        """Keys of the tool's first sign that a file has; empty for another tool's file."""
        return first_sign(self.signs, keys)


def first_sign(signs: str, keys: Collection[str]) -> list[str]:
    """Keys of the first sign that a file has; empty if it has none."""
    return next((sign for sign in (text.split("+") for text in signs.split()) if set(sign) <= set(keys)), [])


@dataclass
class TheirFile:
    """Keys of a file, and the options that they become; no method raises."""

    keys: Mapping[str, object]
    launch: Launch
    given: dict[str, tuple[object, str]] = field(default_factory=dict)
    """Option -> its YAML value, and the lines of the file that set it."""
    said: set[str] = field(default_factory=set)
    """Options that the file itself sets, not the tool's defaults."""
    ignored: list[str] = field(default_factory=list)
    """Keys that have no effect in Mobius."""
    facts: list[str] = field(default_factory=list)
    """Log lines about what the file means in Mobius."""
    notices: list[str] = field(default_factory=list)
    """Warnings about differences from the tool."""
    problems: list[str] = field(default_factory=list)
    purpose: str = ""
    """Reason why the file is not for training with Mobius, if so; then it is the only problem that is reported."""

    def put(self, option: str, value: object, *keys: str) -> None:
        """Set an option to `value`, which comes from `keys` of the file or from the tool's defaults."""
        lines = [f"{key}: {shown(self.keys[key])}" for key in keys if key in self.keys]
        self.given[option] = (value, ", ".join(lines) or f"{option}: {shown(value)}")
        self.said |= {option} if lines else set()

    def refuse(self, key: str, reason: str) -> None:
        """Record why a key is refused."""
        if (problem := f"`{key}: {shown(self.keys.get(key))}`: {reason}") not in self.problems:
            self.problems.append(problem)

    def tell(self, notice: str) -> None:
        """Record a difference from the tool, once."""
        if notice not in self.notices:
            self.notices.append(notice)

    def stop(self, key: str, reason: str) -> None:
        """Record that the file has another purpose than training here; the first reason counts."""
        self.purpose = self.purpose or f"`{key}: {shown(self.keys.get(key))}`: {reason}"

    def asks_for(self, key: str) -> bool:
        """Whether a key is given and switches something on."""
        return not asks_for_nothing(self.keys.get(key))

    def text(self, key: str, default: str = "") -> str:
        """Text of a key, or `default`."""
        value = self.keys.get(key)
        if isinstance(value, list | dict):
            self.refuse(key, "it must be a word or a number")
        return value.strip() if isinstance(value, str) else default

    def is_on(self, key: str) -> bool:
        """Whether a switch is on."""
        return self.text(key).lower() in ("true", "yes", "on", "1")

    def is_off(self, key: str) -> bool:
        """Whether a switch is given and off."""
        return key in self.keys and asks_for_nothing(self.text(key))

    def number(self, key: str, default: float) -> float:
        """Number of a key, or `default`."""
        try:
            if math.isfinite(number := float(self.text(key) or default)):
                return number
        except ValueError:
            pass
        self.refuse(key, "it must be a number")
        return default

    def names(self, key: str) -> list[str]:
        """Names in a list, or in a text with commas."""
        value = self.keys.get(key)
        parts = value if isinstance(value, list) else value.split(",") if isinstance(value, str) else []
        return [part.strip() for part in parts if isinstance(part, str) and part.strip()]

    def mappings(self, key: str) -> list[Mapping[str, object]]:
        """Mappings in a list, or a single mapping in place of a list."""
        value = self.keys.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(item, dict) for item in items):
            self.refuse(key, "each entry must be a mapping")
        return [item for item in items if isinstance(item, dict)]


def translate(recipe: Recipe, keys: Mapping[str, object], launch: Launch) -> tuple[TheirFile, dict[str, object]]:
    """Translate the keys of a file of `recipe`; returns the file, and the keys that the tool does not have."""
    file, others = TheirFile(keys, launch), dict[str, object]()
    for key, value in keys.items():
        row = recipe.row(key, value)
        if row is None:
            others[key] = value
        elif row.option is not None:
            if value is not None:
                file.put(row.option, value, key)
        elif row.answer.startswith(TAKEN) or asks_for_nothing(value):
            pass
        elif row.answer.startswith(IGNORED):
            file.ignored.append(key)
        elif row.answer.startswith(OTHER):
            file.stop(key, row.answer)
        else:
            file.refuse(key, row.answer)
    for row in recipe.rows.values():
        if row.option is not None and row.default is not None and row.option not in file.given:
            file.put(row.option, row.default)
    recipe.translate(file)
    model, written = file.given.get("model_path", ("", ""))
    if _QUANTIZED.search(str(model)) and not Path(str(model)).is_dir():
        file.purpose = file.purpose or f"`{written}`: a quantized model; give the unquantized original"
    trains = not asks_for_nothing(file.given.get("do_train", ("true", ""))[0])
    if trains and not file.problems and "dataset" not in {*file.given, *others, *launch.typed}:
        file.problems.append("the file names no dataset to train on; give one with --dataset")
    if file.purpose:
        file.given, file.problems = {}, [file.purpose]
        return file, {}
    return file, others
