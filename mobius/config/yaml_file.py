"""YAML files of options: reading one into texts, lists and mappings, and writing a config as one."""

import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from mobius.config.config import Columns, Config, DatasetEntry, Datasets
from mobius.config.options import (
    Option,
    dataset_spellings,
    is_plain,
    option_values,
    options,
    section_titles,
    shown,
)
from mobius.config.sources import OptionSource
from mobius.errors import ConfigError, first_line, reason_of
from mobius.excerpt import excerpt
from mobius.regular_files import read_bytes

_MOST_BYTES: Final = 1 << 18
"""Two hundred times all options; PyYAML reads it in seconds."""
_SHOWN_OF_PATH: Final = 200
_MOST_PROBLEMS: Final = 100
_NOTHING: Final = ("", "~", "null", "Null", "NULL")
"""Values that are None where they stand without quotes."""


class _Loader(yaml.BaseLoader):
    """YAML whose every value is the text that it is, so that a file means what the same words mean when typed.

    A plain null is None, and a key that is given twice is an error.
    """

    def construct_scalar(self, node: yaml.ScalarNode) -> str | None:  # type: ignore[override]
        """Text of a value. Raises ConstructorError."""
        if not node.tag.startswith("tag:yaml.org,2002:str"):
            detail = f"the tag {excerpt(node.tag)} has no meaning here; remove it"
            raise yaml.constructor.ConstructorError(problem=detail, problem_mark=node.start_mark)
        return None if node.style is None and node.value in _NOTHING else str(node.value)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[typing.Hashable, typing.Any]:
        """Mapping of texts to values. Raises ConstructorError."""
        keys = set[str]()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    problem="a key must be a word", problem_mark=key_node.start_mark
                )
            if key_node.value in keys:
                detail = f"`{excerpt(key_node.value)}` is already set; keep one"
                raise yaml.constructor.ConstructorError(problem=detail, problem_mark=key_node.start_mark)
            keys.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: str) -> OptionSource:
    """Read a flat mapping of option names; problems carry the file's name."""
    shown_path = excerpt(path, _SHOWN_OF_PATH)
    result = OptionSource(place=f"{shown_path}: ")
    try:
        root = _parse(_read_text(path), shown_path)
        if not isinstance(root, Mapping | None):
            raise ConfigError(f"{shown_path}: expected lines of `option: value`")
    except ConfigError as error:
        result.problems += error.problems
        result.invalid_options.update(options())
        return result
    for key, value in (root or {}).items():
        if len(result.problems) >= _MOST_PROBLEMS:
            result.problems.append(f"{shown_path}: the rest was not read, for there are {_MOST_PROBLEMS} problems")
            result.invalid_options.update(options())
            break
        result.take(str(key), value, written=f"{excerpt(str(key))}: {shown(value)}")
    return result


def _read_text(path: str) -> str:
    """The file's text; raises ConfigError. A pipe or device could have no end, and each rank reads it anew."""
    file = Path(path)
    try:
        content = b"" if file == Path(os.devnull) else read_bytes(file, _MOST_BYTES)
        return content.decode("utf-8")
    except UnicodeDecodeError:
        problem = f"{excerpt(path, _SHOWN_OF_PATH)}: not a UTF-8 text file; save it as UTF-8"
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        shown_path, place = (excerpt(name, _SHOWN_OF_PATH) for name in (path, str(file.absolute())))
        problem = (
            f"`--config {shown_path}` cannot be read ({reason_of(error)}, looked at {place}); give the path of a YAML "
            "file of options"
        )
    raise ConfigError(problem)


def _parse(text: str, path: str) -> object:
    """Texts, lists and mappings of a file; raises ConfigError, with the line where PyYAML names one."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError(f"{path}: not valid YAML: lists or mappings are nested too deeply") from None
    except Exception as error:  # PyYAML's parts raise what comes: ValueError of a number, OverflowError of an escape
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        reason = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(f"{path}{line}: not valid YAML: {excerpt(reason, 200)}") from None


def to_yaml(config: Config) -> str:
    """All options of a config as a flat YAML file with a heading per section; `--config` reads it back unchanged."""
    sections: dict[str, dict[str, object]] = {section: {} for section in section_titles()}
    for name, value in option_values(config).items():
        if name == "num_iterations" and config.optim.num_train_epochs is not None:
            value = None  # the run counts steps from its epochs; the user did not ask for them
        sections[options()[name].section][name] = _written(options()[name], value)
    return "\n".join(
        f"# {section_titles()[section]}\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10_000)}"
        for section, values in sections.items()
    )


def _written(option: Option, value: object) -> object:
    if value is None:
        return "auto" if option.allows_auto else None
    if option.value_type is tuple:
        return dict(typing.cast(Columns, value))
    if not option.is_list:
        return getattr(value, "value", value)
    entries = [entry.name if is_plain(entry) else _written_dataset(entry) for entry in typing.cast(Datasets, value)]
    return entries[0] if len(entries) == 1 and isinstance(entries[0], str) else entries


def _written_dataset(entry: DatasetEntry) -> dict[str, object]:
    given: dict[str, object] = {"path": entry.name}
    for spelling in dataset_spellings().values():
        name, default = spelling.option.name, spelling.option.default
        if name != "name" and (value := getattr(entry, name)) != default:
            given[name] = _written(spelling.option, value)
    return given
