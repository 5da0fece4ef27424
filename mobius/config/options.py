"""Defines an option: its bounds, other names, modes and kind of value, and the conversion of a text to a value.

A section of `config.py` reads `seq_length: int = option(512, Bounds(minimum=2), aliases=("cutoff_len",))`. The command
line and YAML files give the same texts; YAML also has lists and mappings (`Option.read`).
"""

import ast
import dataclasses
import difflib
import enum
import functools
import inspect
import itertools
import math
import os
import re
import sys
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mobius.config.recipes.answers import foreign_dataset_key
from mobius.errors import ConfigError, excerpt, quoted

Columns = tuple[tuple[str, str], ...]
"""Pairs of a field and the column that holds it, such as (("prompt", "document"), ("completion", "summary"))."""
OptionValue = bool | int | float | str | tuple[Any, ...] | None
"""Value of an option; a tuple holds datasets, or is `Columns`."""

COLUMNS_EXAMPLE: Final = "prompt=document,completion=summary"
MOST_SHOWN: Final = 5
"""Largest number of reported problems of one option."""
_TRUTH: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_WEIGHT: Final = re.compile(r"[-+]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|nan|inf)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Numbers that an option allows; `minimum` is allowed, `above` and `below` are not."""

    minimum: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    allows_auto: bool = False
    """Whether auto is allowed, for a number that is chosen later; then the config has None."""
    share_of: str | None = None
    """Unit of a whole number, such as steps; a number below 1 is a share of the total."""
    ceiling: float = 2.0**31
    """Upper bound if `below` is missing: larger than any useful number; only messages about larger numbers name it."""

    def allow(self, value: float) -> bool:
        """Whether `value` is finite and within the bounds; integers may have any number of digits."""
        is_inside = value >= self.minimum and value > self.above and -math.inf < value < self._limit
        return is_inside and (self.share_of is None or value <= 1 or value == int(value))

    def demand(self, value: float) -> str:
        """Text for a message: the values that are allowed instead of `value`."""
        if replace(self, share_of=None).allow(value):
            return f"a whole number of {self.share_of}, or a number below 1 for a share"
        return str(self if value < self._limit else replace(self, below=self._limit))

    @property
    def _limit(self) -> float:
        return self.below if math.isfinite(self.below) else self.ceiling

    def __str__(self) -> str:
        limits = (("at least", self.minimum), ("above", self.above), ("below", self.below))
        return " and ".join(f"{word} {limit:.15g}" for word, limit in limits if math.isfinite(limit))


COUNT: Final = Bounds(minimum=1)
POSITIVE: Final = Bounds(above=0)
NON_NEGATIVE: Final = Bounds(minimum=0)
DECAY_RATE: Final = Bounds(minimum=0, below=1)
# These numbers have low ceilings: plans and schedules hold each layer, stage, rank and microbatch, and loop over them.
RANKS: Final = Bounds(minimum=1, ceiling=257)
LAYERS: Final = Bounds(minimum=1, ceiling=1025)
STAGES: Final = Bounds(minimum=1, ceiling=1025, allows_auto=True)
PARTS: Final = Bounds(minimum=1, ceiling=10_000, allows_auto=True)


@dataclass(frozen=True)
class Need:
    """Mode without which an option has no effect."""

    decided_by: str
    """Names of the options that enable the mode, separated by spaces."""
    is_met: Callable[[Any], bool]
    """Function that returns whether the run has the mode; its argument has the values of all options."""
    otherwise: str
    """Text that completes "`--x` has no effect ..."."""
    instead: str = ""
    """Advice on how to make the option effective; empty if `otherwise` implies it."""
    is_strict: bool = False
    """Whether the option is an error even in a file, if a typed option switches off the mode."""


@dataclass(frozen=True)
class Option:
    """One field of a section, or of a dataset, and its rules."""

    default: OptionValue
    bounds: Bounds | None = None
    """Allowed numbers; None if the value is not a number."""
    aliases: tuple[str, ...] = ()
    """Other names that take the same values."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags, such as `--bf16`, and the value of the option that each flag sets."""
    needs: tuple[Need, ...] = ()
    bare: str | None = None
    """Value of the option if it is typed without a value; None if the option needs a value."""
    form: tuple[Callable[[Any], object], str] | None = None
    """Function that returns whether a text, or pairs, are valid, and a description of valid values; None: no check."""
    is_text: bool = False
    """Whether the value is free text, which is never the name of a file."""
    example: str = ""
    """Example of pairs, for an option that takes pairs."""

    # `options_of` fills in the following from the field.
    name: str = ""
    section: str = ""
    text: str = ""
    value_type: type = str
    """bool, int, float, str, a StrEnum, tuple for pairs, or DatasetEntry for one or more of them."""
    is_optional: bool = False

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed words; empty if any value of the type is allowed."""
        return tuple(member.value for member in self.value_type) if issubclass(self.value_type, enum.Enum) else ()

    @property
    def expectation(self) -> str:
        """Text for a message: the values that are allowed."""
        if self.form is not None:
            return self.form[1]
        if self.choices:
            return "one of " + ", ".join(self.choices)
        pairs = f"text such as {self.example.partition(',')[0]}"
        kind = {bool: "true or false", int: "a whole number", float: "a number", tuple: pairs}.get(self.value_type)
        return f"{kind or 'text'} {self.bounds or ''}".rstrip() + (", or auto" if self.allows_auto else "")

    @property
    def is_list(self) -> bool:
        """Whether several words may follow the option."""
        return self.value_type is DatasetEntry

    @property
    def is_name(self) -> bool:
        """Whether the value names a file, a folder, or something on the Hub."""
        return self.value_type is str and not self.is_text and self.form is None

    @property
    def allows_auto(self) -> bool:
        """Whether auto is a value; in a config it is None."""
        return self.bounds is not None and self.bounds.allows_auto

    def read(self, given: object) -> OptionValue:
        """Return the value of a text or of a YAML node, which may be None, a list or a mapping.

        Raises ValueError for a wrong type, ConfigError for a problem inside a list or mapping.
        """
        if given is None and self.is_optional and not self.allows_auto:
            return None
        if self.is_list:
            return _read_datasets(given)
        if self.value_type is tuple and isinstance(given, str | dict):
            return _read_pairs(given, self.example)
        # `--model_path --` is a typing error; no name consists of dashes.
        if not isinstance(given, str) or (self.value_type is str and not given.strip().strip("-")):
            raise ValueError(given)
        if given == "auto" and self.allows_auto:
            return None
        return read_truth(given) if self.value_type is bool else self.value_type(self._as_choice(given))

    def _as_choice(self, text: str) -> str:
        """Return the choice that a word for true or false means."""
        if self.choices and text not in self.choices and text.lower() in _TRUTH:
            words = ("on",) if _TRUTH[text.lower()] else ("off", "no")
            return next((word for word in words if word in self.choices), text)
        return text


def option(default: Any = dataclasses.MISSING, bounds: Bounds | None = None, **rules: Any) -> Any:
    """A dataclass field with `default` and the rules of its `Option`."""
    return field(default=default, metadata={"option": Option(default, bounds, **rules)})


@dataclass(frozen=True)
class DatasetEntry:
    """One dataset of a mixture; None means the value of the option for all datasets."""

    name: str = option(aliases=("path", "dataset"))
    """Known name, Hugging Face id, or a local file or folder."""
    weight: float = option(1.0, Bounds(above=0, ceiling=1001))
    """Average number of times that a sample appears in an epoch: floor(weight) or ceil(weight) times."""
    max_samples: int | None = option(None, COUNT)
    """Number of samples to use from the start of the dataset."""
    columns: Columns | None = option(None, example=COLUMNS_EXAMPLE)
    """Columns of a table in another format."""
    split: str = "train"
    """Split of a hub dataset, or of a folder with files of several splits."""
    subset: str | None = None
    """Configuration of a hub dataset."""

    @classmethod
    def from_word(cls, word: str) -> "DatasetEntry":
        """Parse `name` or `name:weight`; if a file or folder has the full word as its name, the word is the name.

        Raises ValueError if there is no name.
        """
        name, _, weight = word.rpartition(":")
        is_weighted = name != "" and _WEIGHT.fullmatch(weight) and not os.path.exists(os.path.expanduser(word))
        entry = cls(name, float(weight)) if is_weighted else cls(word)
        if not entry.name.strip().strip("-"):
            raise ValueError(word)
        return entry

    @property
    def is_plain(self) -> bool:
        """Whether parsing the name always gives this entry, whatever files exist."""
        _, colon, end = self.name.rpartition(":")
        return self == DatasetEntry(self.name) and not (colon and _WEIGHT.fullmatch(end))


Datasets = tuple[DatasetEntry, ...]


@dataclass(frozen=True)
class Spelling:
    """One name of an option. A flag sets `flag_value`; `flag: false` sets `opposite`, or nothing if that is None."""

    name: str
    option: Option
    is_flag: bool = False
    flag_value: OptionValue = None
    opposite: OptionValue = None


def options_of(section: type, section_name: str = "") -> list[Option]:
    """Options of a dataclass, in the order of its fields."""
    texts, hints, found = _field_texts(section), typing.get_type_hints(section), []
    fields: Any = dataclasses.fields(section)
    for known in fields:
        hint = hints[known.name]
        is_optional = type(None) in typing.get_args(hint)
        value_type = typing.get_args(hint)[0] if is_optional else hint
        if typing.get_origin(value_type) is tuple:
            value_type = DatasetEntry if value_type == Datasets else tuple
        rules = known.metadata.get("option") or Option(known.default)
        found.append(
            replace(
                rules,
                name=known.name,
                section=section_name,
                text=texts[known.name],
                value_type=value_type,
                is_optional=is_optional,
            )
        )
    return found


def spellings_of(known: Iterable[Option]) -> Mapping[str, Spelling]:
    """All accepted names, without dashes; an option's own name comes before its aliases and flags."""
    found: list[Spelling] = []
    for option in known:
        if option.value_type is bool:
            negative = "no_" + option.name.removeprefix("use_")
            found += [Spelling(option.name, option, True, True, False), Spelling(negative, option, True, False, True)]
        else:
            found += [Spelling(name, option) for name in (option.name, *option.aliases)]
        # Flags have no opposite: `fp16: false` does not say which other format is wanted.
        found += [Spelling(word, option, True, value) for word, value in option.flags.items()]
    return {spelling.name: spelling for spelling in found}


@functools.cache
def dataset_options() -> Mapping[str, Option]:
    """Fields of a dataset by name."""
    return {option.name: option for option in options_of(DatasetEntry)}


def read_truth(text: object) -> bool:
    """Return the value of true, false or a synonym; raises ValueError."""
    if not isinstance(text, str) or text.lower() not in _TRUTH:
        raise ValueError(text)
    return _TRUTH[text.lower()]


def shown(value: object) -> str:
    """Return a short text of a YAML value, without the items of lists and mappings."""
    return "[...]" if isinstance(value, list) else "{...}" if isinstance(value, dict) else quoted(value)


def _read_datasets(given: object) -> Datasets:
    """Datasets of a text, a mapping, or a list of both."""
    if isinstance(given, str):
        return (DatasetEntry.from_word(given),)
    if not isinstance(given, list | dict):
        raise ValueError(given)
    entries, problems, items = list[DatasetEntry](), list[str](), given if isinstance(given, list) else [given]
    for item in items:
        try:
            if not isinstance(item, str | dict):
                raise ValueError(item)
            entries.append(_read_dataset(item) if isinstance(item, dict) else DatasetEntry.from_word(item))
        except ValueError:
            problems.append(f"{shown(item)}: it must be a text or a mapping")
        except ConfigError as error:
            problems += error.problems
    if problems or not items:
        raise ConfigError(*problems[:MOST_SHOWN] or ["the list is empty; give at least one"])
    return tuple(entries)


def _read_dataset(keys: Mapping[object, object]) -> DatasetEntry:
    known, values, problems = spellings_of(dataset_options().values()), dict[str, Any](), list[str]()
    for key, given in keys.items():
        spelling = known.get(str(key))
        if spelling is None:
            near = foreign_dataset_key(str(key)) or difflib.get_close_matches(str(key)[:60], known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"a dataset has {', '.join(known)}"
            problems.append(f"unknown key `{excerpt(str(key))}` of a dataset; {hint}")
            continue
        option = spelling.option
        if option.name in values:
            problems.append(f"`{key}` is the dataset's {option.name} a second time; keep one")
            continue
        try:
            values[option.name] = option.read(given)
        except ValueError:
            problems.append(f"`{key}: {shown(given)}`: it must be {option.expectation}")
        except ConfigError as error:
            problems += [f"`{key}`: {problem}" for problem in error.problems]
    if "name" not in values and not problems:
        problems.append("a dataset without `path`; give its name, file or folder")
    if problems:
        raise ConfigError(*problems[:MOST_SHOWN])
    return DatasetEntry(**values)


def _read_pairs(given: str | Mapping[object, object], example: str) -> Columns:
    """Return the pairs of a mapping, or of a text such as `key=value,key=value`, without spaces around words."""
    problems, pairs = list[str](), list[tuple[str, str]]()
    parts = [part.partition("=")[::2] for part in given.split(",")] if isinstance(given, str) else given.items()
    for key, value in parts:
        if isinstance(key, str) and isinstance(value, str) and key.strip() and value.strip():
            pairs.append((key.strip(), value.strip()) if isinstance(given, str) else (key, value))
        else:
            problems.append(f"{shown(key)} with {shown(value)} is no pair; write them as in {example}")
    counts = Counter(key for key, _ in pairs)
    problems += [f"{quoted(key)} is given {count} times; keep one" for key, count in counts.items() if count > 1]
    if problems or not pairs:
        raise ConfigError(*problems[:MOST_SHOWN] or [f"is empty; write pairs as in {example}"])
    return tuple(pairs)


@functools.cache
def _definitions(module: str) -> dict[str, ast.ClassDef]:
    """Classes of a module by name; the module's source is parsed only once."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _field_texts(section: type) -> dict[str, str]:
    """Field name -> the string literal under it, on one line; Python itself drops these literals."""
    definition, texts = _definitions(section.__module__)[section.__name__], {}
    for statement, following in itertools.pairwise(definition.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(following, ast.Expr), f"{section.__name__}.{statement.target.id} has no text under it"
            texts[statement.target.id] = " ".join(ast.literal_eval(following.value).split())
    return texts
