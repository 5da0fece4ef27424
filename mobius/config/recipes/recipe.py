"""A tool whose files are read: the answer to each of its keys, and a file on its way to Mobius' options."""

import fnmatch
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mobius.config.options import shown
from mobius.config.recipes.answers import IGNORED, SHARED, TAKEN, Row, asks_for_nothing, find_row, read_table
from mobius.errors import excerpt


@dataclass(frozen=True)
class Launch:
    """Facts about the run that the file does not hold."""

    num_processes: int = 1
    """Processes that the tool's own launcher would start, each with a batch of its own: those of this run."""
    pipeline_ranks: int = 1
    typed: Collection[str] = ()
    """Options that the command line sets, which replace those of the file."""


@dataclass(frozen=True)
class Recipe:
    """One tool: how its files are known, its tables, and the function for keys that are taken together."""

    name: str
    signs: str
    """Sets of keys that only its files have, separated by spaces, the keys of a set joined by +."""
    tables: tuple[str, ...]
    translate: "Callable[[TheirFile], None]"

    @cached_property
    def rows(self) -> Mapping[str, Row]:
        """Rows by key, `key=value` or pattern; those of the last table come first."""
        return {name: row for table in self.tables for name, row in read_table(table).items()}

    def row(self, key: str, value: object = None) -> Row | None:
        """Row of a key with this value: the tool's own before the shared one; None for an unknown key."""
        patterns = (row for name, row in self.rows.items() if "*" in name and fnmatch.fnmatch(key, name))
        return find_row(self.rows, key, value) or next(patterns, None) or find_row(read_table(SHARED), key, value)

    def sign(self, keys: Collection[str]) -> list[str]:
        """Keys of the first of its signs that a file has; empty if the file is not its own."""
        signs = (sign.split("+") for sign in self.signs.split())
        return next((sign for sign in signs if set(sign) <= set(keys)), [])


@dataclass
class TheirFile:
    """The keys of a file, and the options that they become; nothing here raises."""

    keys: Mapping[str, object]
    launch: Launch
    given: dict[str, tuple[object, str]] = field(default_factory=dict)
    """Option -> its value as YAML has it, and the lines of the file that say so."""
    said: set[str] = field(default_factory=set)
    """Options among them that the file says, not the tool's defaults."""
    notices: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def put(self, option: str, value: object, *keys: str) -> None:
        """Set an option to what `keys` of the file say, or the tool's defaults."""
        lines = [f"{key}: {shown(self.keys[key])}" for key in keys if key in self.keys]
        self.given[option] = (value, ", ".join(lines) or f"{option}: {shown(value)}")
        self.said |= {option} if lines else set()

    def refuse(self, key: str, reason: str) -> None:
        """Record why a key cannot be taken."""
        if (problem := f"`{key}: {shown(self.keys.get(key))}`: {reason}") not in self.problems:
            self.problems.append(problem)

    def text(self, key: str, default: str = "") -> str:
        """Text of a key, `default` where it has none."""
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
        """Number of a key, `default` where it has none."""
        try:
            if math.isfinite(number := float(self.text(key) or default)):
                return number
        except ValueError:
            pass
        self.refuse(key, "it must be a number")
        return default

    def names(self, key: str) -> list[str]:
        """Names of a list, or of a text with commas."""
        value = self.keys.get(key)
        parts = value if isinstance(value, list) else value.split(",") if isinstance(value, str) else []
        return [part.strip() for part in parts if isinstance(part, str) and part.strip()]

    def mappings(self, key: str) -> list[Mapping[str, object]]:
        """Mappings of a list, or the one that stands for a list."""
        value = self.keys.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(item, dict) for item in items):
            self.refuse(key, "each entry must be a mapping")
        return [item for item in items if isinstance(item, dict)]


def translate(recipe: Recipe, keys: Mapping[str, object], launch: Launch) -> tuple[TheirFile, dict[str, object]]:
    """Options of a file of `recipe`, and the keys that are none of the tool's."""
    file, others, ignored = TheirFile(keys, launch), dict[str, object](), dict[str, list[str]]()
    for key, value in keys.items():
        row = recipe.row(key, value)
        if row is None:
            others[key] = value
        elif row.option is not None:
            if value is not None:
                file.put(row.option, value, key)
        elif row.answer.startswith(TAKEN) or value is None or asks_for_nothing(value):
            pass
        elif row.answer.startswith(IGNORED):
            ignored.setdefault(row.answer.removeprefix(IGNORED), []).append(f"`{excerpt(key)}`")
        else:
            file.refuse(key, row.answer)
    for row in recipe.rows.values():
        if row.option is not None and row.default is not None and row.option not in file.given:
            file.put(row.option, row.default)
    recipe.translate(file)
    for reason, names in ignored.items():
        file.notices.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} ignored{reason}")
    return file, others
