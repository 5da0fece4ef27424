"""The options, read off the table in `config.py`: their names and spellings, and the value that a text stands for.

The command line and YAML files give the same texts; YAML also has lists and mappings (`Option.read`).
"""

import ast
import dataclasses
import difflib
import enum
import functools
import inspect
import itertools
import os
import re
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mobius.config.config import BestMetric, Columns, Config, DatasetEntry, Datasets
from mobius.config.fields import Bounds, FieldRules, rules_of
from mobius.config.foreign_options import foreign_dataset_key
from mobius.errors import ConfigError
from mobius.excerpt import excerpt, quoted

OptionValue = bool | int | float | str | Datasets | Columns | None

_TRUTH: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_WEIGHT: Final = re.compile(r"[-+]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|nan|inf)", re.ASCII | re.IGNORECASE)
_MOST_ITEMS: Final = 1001
"""Datasets of a list or pairs of a mapping that are read; aliases of YAML, which cost nothing to write, can make more.
"""
_MOST_SHOWN: Final = 5
_SURELY_ALIKE: Final = 0.85
"""Likeness of a word and its misspelling: letters left out, doubled or swapped leave more, min and max less."""


@dataclass(frozen=True)
class Option:
    """One field of one section, or of a dataset.

    `value_type` is bool, int, float, str, a StrEnum, tuple for pairs, or DatasetEntry for one or more of them.
    """

    name: str
    section: str
    text: str
    default: OptionValue
    value_type: type
    is_optional: bool
    rules: FieldRules

    @property
    def bounds(self) -> Bounds | None:
        """Numbers that are allowed; None where the value is no number."""
        return self.rules.bounds

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, or nothing where any value of the type may do."""
        return tuple(member.value for member in self.value_type) if issubclass(self.value_type, enum.Enum) else ()

    @property
    def expectation(self) -> str:
        """Words for what may be given, as they read in a message."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        pairs = f"text such as {self.rules.pair[1].partition(',')[0]}"
        kind = {bool: "true or false", int: "a whole number", float: "a number", tuple: pairs}.get(self.value_type)
        return f"{kind or 'text'} {self.bounds or ''}".rstrip() + (", or auto" if self.allows_auto else "")

    @property
    def is_list(self) -> bool:
        """Whether several words may follow the option."""
        return self.value_type is DatasetEntry

    @property
    def is_name(self) -> bool:
        """Whether the text names something: a file, a folder, or what may be one."""
        return self.value_type is str and not self.rules.is_text and self.rules.form is None

    @property
    def allows_auto(self) -> bool:
        """Whether the word auto is a value; in a config it is None."""
        return self.bounds is not None and self.bounds.allows_auto

    def read(self, given: object) -> OptionValue:
        """Value that a text means, or what YAML makes of a file: also None, lists and mappings.

        Raises ValueError for what does not have the type, ConfigError for what is wrong inside of a list or mapping.
        """
        if given is None and self.is_optional and not self.allows_auto:
            return None
        if self.is_list and isinstance(given, list | dict):
            return _read_datasets(given if isinstance(given, list) else [given])
        if self.value_type is tuple and isinstance(given, str | dict):
            return _read_pairs(given, *self.rules.pair)
        # `--model_path --` is a slip of the shell; no name consists of dashes.
        if not isinstance(given, str) or (self.value_type in (str, DatasetEntry) and not given.strip().strip("-")):
            raise ValueError(given)
        if self.is_list:
            return (_read_dataset(given),)
        if given == "auto" and self.allows_auto:
            return None
        if self.value_type is bool:
            return read_truth(given)
        return typing.cast(OptionValue, self.value_type(self._as_choice(given)))

    def _as_choice(self, text: str) -> str:
        """The choice that is meant by another word for it."""
        if self.value_type is BestMetric:
            return text.removeprefix("eval_")  # as Trainer names it
        if self.choices and text not in self.choices and text.lower() in _TRUTH:
            words = ("on",) if _TRUTH[text.lower()] else ("off", "no")
            return next((word for word in words if word in self.choices), text)
        return text


@dataclass(frozen=True)
class Spelling:
    """One way to name an option. A flag stands for a value; `opposite`, if there is one, is what its false means."""

    name: str
    option: Option
    is_flag: bool = False
    flag_value: OptionValue = None
    opposite: OptionValue = None


def read_truth(text: object) -> bool:
    """Meaning of true, false or another word for them; raises ValueError."""
    if not isinstance(text, str) or text.lower() not in _TRUTH:
        raise ValueError(text)
    return _TRUTH[text.lower()]


def _read_dataset(word: str) -> DatasetEntry:
    """`name` or `name:weight`; a file or folder that is there under the whole word is taken as the name."""
    name, _, weight = word.rpartition(":")
    is_weighted = name != "" and _WEIGHT.fullmatch(weight) and not os.path.exists(os.path.expanduser(word))
    entry = DatasetEntry(name, float(weight)) if is_weighted else DatasetEntry(word)
    if not entry.name.strip("-"):
        raise ValueError(word)
    return entry


def is_plain(entry: DatasetEntry) -> bool:
    """Whether the name alone, as a word, means `entry`, whatever files there are."""
    _, colon, end = entry.name.rpartition(":")
    return entry == DatasetEntry(entry.name) and not (colon and _WEIGHT.fullmatch(end))


def _read_datasets(items: list[object]) -> Datasets:
    """Datasets of a list of texts and mappings."""
    entries, problems = list[DatasetEntry](), list[str]()
    for item in items[:_MOST_ITEMS]:
        if len(problems) >= _MOST_SHOWN:
            break
        try:
            if not isinstance(item, str | dict):
                raise ValueError(item)
            entries.append(_read_dataset(item) if isinstance(item, str) else _read_dataset_mapping(item))
        except ValueError:
            problems.append(f"{shown(item)} is given where a text or a mapping is needed")
        except ConfigError as error:
            problems += error.problems
    if problems or not items:
        raise ConfigError(*problems[:_MOST_SHOWN] or ["the list is empty"])
    return tuple(entries)


def _read_dataset_mapping(keys: Mapping[object, object]) -> DatasetEntry:
    known, values, problems = dataset_spellings(), dict[str, Any](), list[str]()
    for key, given in itertools.islice(keys.items(), 2 * len(known)):
        spelling = known.get(str(key))
        try:
            if spelling is None:
                near = foreign_dataset_key(str(key)) or difflib.get_close_matches(str(key)[:60], known, 1)
                hint = f"did you mean `{near[0]}`?" if near else f"a dataset has {', '.join(known)}"
                problems.append(f"unknown key `{excerpt(str(key))}` of a dataset; {hint}")
            elif spelling.option.name in values:
                problems.append(f"`{key}` is the dataset's {spelling.option.name} a second time; keep one")
            else:
                values[spelling.option.name] = spelling.option.read(given)
        except ValueError:
            problems.append(f"`{key}: {shown(given)}`; {spelling.option.expectation if spelling else ''} is needed")
        except ConfigError as error:
            problems += [f"`{key}`: {problem}" for problem in error.problems]
    if "name" not in values and not problems:
        problems.append("a dataset without `path`; give its name, file or folder")
    if problems:
        raise ConfigError(*problems[:_MOST_SHOWN])
    return DatasetEntry(**values)


def _read_pairs(given: str | Mapping[object, object], form: str, example: str) -> Columns:
    """Pairs of a mapping, or of a text such as `key=value,key=value`, spaces around them dropped."""
    problems, pairs = list[str](), list[tuple[str, str]]()
    parts = [part.partition("=")[::2] for part in given.split(",")] if isinstance(given, str) else given.items()
    for key, value in itertools.islice(parts, _MOST_ITEMS):
        if isinstance(key, str) and isinstance(value, str) and key.strip() and value.strip():
            pairs.append((key.strip(), value.strip()) if isinstance(given, str) else (key, value))
        else:
            problems.append(f"{shown(key)} with {shown(value)} is no pair {form}; write them as in {example}")
    counts = Counter(key for key, _ in pairs)
    problems += [f"{quoted(key)} is given {count} times; keep one" for key, count in counts.items() if count > 1]
    if problems or not pairs:
        raise ConfigError(*problems[:_MOST_SHOWN] or [f"is empty; write pairs as in {example}"])
    return tuple(pairs)


def shown(value: object) -> str:
    """A value of a YAML file, short; the items of lists and mappings are not shown."""
    return "[...]" if isinstance(value, list) else "{...}" if isinstance(value, dict) else quoted(value)


def section_titles() -> Mapping[str, str]:
    """Section name -> its title in the help."""
    return {name: str(section.__doc__) for name, section in _sections().items()}


@functools.cache
def options() -> Mapping[str, Option]:
    """All options by name, in the order of the config's fields."""
    return {option.name: option for name, section in _sections().items() for option in _options_of(name, section)}


@functools.cache
def dataset_spellings() -> Mapping[str, Spelling]:
    """Keys of a dataset that YAML gives as a mapping; a path is what it is usually named by."""
    keys = {option.name: Spelling(option.name, option) for option in _options_of("dataset", DatasetEntry)}
    return {"path": Spelling("path", keys["name"].option), "dataset": Spelling("dataset", keys["name"].option), **keys}


@functools.cache
def spellings() -> Mapping[str, Spelling]:
    """All accepted names, without dashes; the option's own name comes before its aliases and flags."""
    found: list[Spelling] = []
    for option in options().values():
        if option.value_type is bool:
            negative = "no_" + option.name.removeprefix("use_")
            found += [Spelling(option.name, option, True, True, False), Spelling(negative, option, True, False, True)]
        else:
            found += [Spelling(name, option) for name in (option.name, *option.rules.aliases)]
        # `fp16: false` says nothing about which of the other formats is wanted.
        found += [Spelling(word, option, True, value) for word, value in option.rules.flags.items()]
    return {spelling.name: spelling for spelling in found}


def nearest_name(name: str) -> str | None:
    """The known spelling that `name` is a misspelling of, or None: no hint is better than one of another meaning."""
    typed = name.replace("-", "_").lower()[:60]
    alike = [known for known in spellings() if re.findall(r"\d", known) == re.findall(r"\d", typed)]
    return next(iter(difflib.get_close_matches(typed, alike, 1, _SURELY_ALIKE)), None)


def option_values(config: Config) -> dict[str, OptionValue]:
    """The flat form of a config: option name -> value."""
    return {option.name: getattr(getattr(config, option.section), option.name) for option in options().values()}


def config_from(values: Mapping[str, OptionValue]) -> Config:
    """A config with `values` in place of defaults; neither types nor bounds are checked."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in _sections()}
    for name, value in values.items():
        sections[options()[name].section][name] = value
    return Config(**{name: section(**sections[name]) for name, section in _sections().items()})


def _sections() -> dict[str, type]:
    return typing.get_type_hints(Config)


def _options_of(section_name: str, section: type) -> list[Option]:
    texts, hints, found = _field_texts(section), typing.get_type_hints(section), []
    fields: Any = dataclasses.fields(section)
    for known in fields:
        *own_types, end = typing.get_args(hints[known.name]) or (hints[known.name],)
        is_optional = end is type(None)
        value_type = own_types[0] if is_optional else hints[known.name]
        if typing.get_origin(value_type) is tuple:
            value_type = DatasetEntry if value_type == Datasets else tuple
        facts = (texts[known.name], known.default, value_type, is_optional, rules_of(known))
        found.append(Option(known.name, section_name, *facts))
    return found


def _field_texts(section: type) -> dict[str, str]:
    """Field name -> the string literal under it, on one line; Python itself drops these literals."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, following in itertools.pairwise(definition.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(following, ast.Expr), f"{section.__name__}.{statement.target.id} has no text under it"
            texts[statement.target.id] = " ".join(ast.literal_eval(following.value).split())
    return texts
