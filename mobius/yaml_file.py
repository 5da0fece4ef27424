"""Owns YAML files of options: reading one, with every problem and its line, and writing a config as one.

Does not own what the options are (`options.py`) or what goes before a file (`cli.py`).
"""

import re
from enum import Enum
from pathlib import Path

import yaml

from mobius.config import Config
from mobius.options import (
    OptionValue,
    Source,
    Spelling,
    nearest_name,
    option_values,
    options,
    section_titles,
    spellings,
)


def read_yaml(path: str) -> Source:
    """Read a flat mapping of option names; problems carry the file's name and the line."""
    result = Source()
    try:
        text = Path(path).read_text(encoding="utf-8")
        loader = _YamlLoader(text)
        root = loader.get_single_node()
    except OSError as error:
        reason = f"{error.strerror}, looked at {Path(path).absolute()}"
        result.problems.append(f"`--config {path}` cannot be read ({reason}); give the path of a YAML file of options")
    except UnicodeDecodeError:
        result.problems.append(f"{path}: not a UTF-8 text file; save it as UTF-8")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        result.problems.append(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or error}")
    else:
        if isinstance(root, yaml.MappingNode):
            _put_mapping(result, path, loader, root)
        elif root is not None:
            result.problems.append(f"{path}: expected lines of `option: value`")
        return result
    result.unreadable.update(options())
    return result


def to_yaml(config: Config) -> str:
    """All options of a config as a flat YAML file with a heading per section; `--config` reads it back unchanged."""
    blocks = []
    for section, title in section_titles().items():
        values = {
            name: value.value if isinstance(value, Enum) else _auto_if_none(name, value)
            for name, value in option_values(config).items()
            if options()[name].section == section
        }
        blocks.append(f"# {title}\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10_000))
    return "\n".join(blocks)


def _auto_if_none(name: str, value: OptionValue) -> OptionValue:
    return "auto" if value is None and options()[name].allows_auto else value


class _YamlLoader(yaml.SafeLoader):
    """YAML as people write it: `1e-5` is a number, which YAML 1.1 takes for text."""


# Adding a resolver to a subclass copies the table of its base first, so that other users of PyYAML see no change.
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _put_mapping(result: Source, path: str, loader: yaml.SafeLoader, root: yaml.MappingNode) -> None:
    lines: dict[str, int] = {}
    for key_node, value_node in root.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        place = f"{path}, line {line}"
        if key in lines:
            result.problems.append(f"{place}: `{key}` is already set on line {lines[key]}; keep one")
            continue
        lines[key] = line
        spelling = spellings().get(key)
        if spelling is None:
            result.reject_unknown(f"{place}: unknown key `{key}`", nearest_name(key))
            continue
        _put_yaml_value(result, spelling, loader.construct_object(value_node, deep=True), place=place)


def _put_yaml_value(result: Source, spelling: Spelling, value: object, *, place: str) -> None:
    option = spelling.option
    if spelling.is_flag:
        if not isinstance(value, bool):
            result.reject(spelling, f"{place}: `{spelling.name}: {value!r}`; true or false is needed")
        elif value:
            result.put(spelling, spelling.flag_value, place=place)
        elif option.value_type is bool:
            result.put(spelling, not spelling.flag_value, place=place)
        # `fp16: false` says nothing about which of the other formats is wanted.
        return
    try:
        result.put(spelling, option.from_yaml(value), place=place)
    except ValueError:
        quotes = " in quotes" if option.value_type is str and isinstance(value, int | float) else ""
        result.reject(spelling, f"{place}: `{spelling.name}: {value!r}`; {option.expectation}{quotes} is needed")
