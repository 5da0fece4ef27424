"""Owns YAML files of options: reading one, with every problem and its line, and writing a config as one."""

import difflib
import os
import re
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import yaml

from mobius.config.config import Columns, Config, DatasetEntry, Datasets
from mobius.config.options import (
    Option,
    OptionSource,
    OptionValue,
    Spelling,
    dataset_spellings,
    option_values,
    options,
    section_titles,
    spellings,
)
from mobius.config.value_parsing import is_plain
from mobius.errors import ConfigError, first_line, reason_of
from mobius.excerpt import excerpt, quoted
from mobius.regular_files import read_bytes

_MOST_BYTES: Final = 1 << 18
"""Two hundred times all options; PyYAML reads it in seconds."""
_MOST_DIGITS: Final = 1000
_SHOWN_OF_PATH: Final = 200
_MOST_PROBLEMS: Final = 100
_MOST_ITEMS: Final = 1000
"""Datasets of a list and columns of a mapping; aliases, which cost nothing to write, can make many of them."""
_FOREIGN_KEYS: Final = {
    **dict.fromkeys(("probability", "ratio", "proportion", "interleave_prob", "sampling_weight"), "weight"),
    **dict.fromkeys(("num_samples", "samples", "limit", "max_train_samples"), "max_samples"),
    **dict.fromkeys(("config", "config_name", "configuration", "dataset_config", "dataset_config_name"), "subset"),
    **dict.fromkeys(("file", "file_name", "data_files", "hf_hub_url", "url", "id", "repo", "repo_id"), "path"),
    **dict.fromkeys(("mapping", "column_mapping", "field_messages"), "columns"),
}
"""Keys of other tools' datasets and what they are here."""
_TAG: Final = "tag:yaml.org,2002:"
_PLAIN_KINDS: Final = ("null", "bool", "int", "float", "str")
"""Tags of the values that an option can have."""


def read_yaml(path: str) -> OptionSource:
    """Read a flat mapping of option names; problems carry the file's name and the line."""
    result, shown = OptionSource(), excerpt(path, _SHOWN_OF_PATH)
    try:
        root = _parse(_read_text(path), shown)
    except ConfigError as error:
        result.problems += error.problems
        result.invalid_options.update(options())
        return result
    if isinstance(root, yaml.MappingNode):
        _put_mapping(result, shown, root)
    elif root is not None:
        result.problems.append(f"{shown}: expected lines of `option: value`")
    return result


def _read_text(path: str) -> str:
    """The file's text; raises ConfigError. A pipe or device could have no end, and each rank reads it anew."""
    shown, file = excerpt(path, _SHOWN_OF_PATH), Path(path)
    try:
        content = b"" if file == Path(os.devnull) else read_bytes(file, _MOST_BYTES)
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        reason = reason_of(error)
        place = excerpt(str(file.absolute()), _SHOWN_OF_PATH)
        raise ConfigError(
            f"`--config {shown}` cannot be read ({reason}, looked at {place}); give the path of a YAML file of options"
        ) from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{shown}, line {line}: not a UTF-8 text file; save it as UTF-8") from error


def _parse(text: str, path: str) -> yaml.Node | None:
    """The file's root, of which nothing is made yet; raises ConfigError with the line."""
    loader = None
    try:
        loader = _YamlLoader(text)
        return loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line, reason = text.count("\n", 0, error.position), f"the character U+{error.character:04X} is not allowed"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line if mark else 0
        # A context such as "while scanning a simple key" says less than the problem; the other kind belongs to it.
        is_sentence = error.context is not None and not error.context.startswith("while ")
        reason = f"{error.context}, {error.problem}" if is_sentence else str(error.problem)
    except RecursionError:
        line, reason = loader.line if loader else 0, "lists or mappings are nested too deeply"
    except Exception as error:  # PyYAML's parts raise what comes: ValueError of a number, OverflowError of an escape
        line, reason = loader.line if loader else 0, first_line(error)
    raise ConfigError(f"{path}, line {line + 1}: not valid YAML: {excerpt(reason, 200)}")


def to_yaml(config: Config) -> str:
    """All options of a config as a flat YAML file with a heading per section; `--config` reads it back unchanged."""
    sections: dict[str, dict[str, object]] = {section: {} for section in section_titles()}
    for name, value in option_values(config).items():
        if name == "num_iterations" and config.optim.num_train_epochs is not None:
            value = None  # what a run makes of its epochs is not what it was told
        sections[options()[name].section][name] = _written(options()[name], value)
    return "\n".join(
        f"# {section_titles()[section]}\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10_000)}"
        for section, values in sections.items()
    )


def _written(option: Option, value: OptionValue) -> object:
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
    for key, spelling in dataset_spellings().items():
        value, option = getattr(entry, spelling.option.name), spelling.option
        if option.name != "name" and value != option.default:
            given[key] = _written(option, value)
    return given


class _YamlLoader(yaml.SafeLoader):
    """YAML as people write it: `1e-5` is a number, which YAML 1.1 takes for text, and `2024-01-01` is a name."""


# The loader's own table, so that other users of PyYAML see no change.
_YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.removeprefix(_TAG) in _PLAIN_KINDS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_YamlLoader.add_implicit_resolver(
    f"{_TAG}float", re.compile(r"^[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _put_mapping(result: OptionSource, path: str, root: yaml.MappingNode) -> None:
    for key, place, node in _pairs(result, path, root, "the name of an option"):
        if spelling := spellings().get(key):
            _put_yaml_value(result, spelling, node, path=path, place=place)
        else:
            value = str(node.value) if isinstance(node, yaml.ScalarNode) else None
            result.reject_unknown(key, shown=f"key `{excerpt(key)}`", place=f"{place}: ", value=value)


def _pairs(
    result: OptionSource, path: str, mapping: yaml.MappingNode, meaning: str
) -> Iterator[tuple[str, str, yaml.Node]]:
    """Keys of a mapping, their places and what they are set to; a key that is no word, or doubled, is a problem."""
    lines: dict[str, int] = {}
    for key_node, value_node in mapping.value:
        line = key_node.start_mark.line + 1
        place = f"{path}, line {line}"
        if len(result.problems) >= _MOST_PROBLEMS:
            result.problems[_MOST_PROBLEMS:] = [
                f"{place}: the rest was not read, for there are {_MOST_PROBLEMS} problems"
            ]
            result.invalid_options.update(options())
            return
        if not isinstance(key_node, yaml.ScalarNode):
            result.problems.append(f"{place}: `{_as_written(key_node)}` is given where {meaning} is needed")
            continue
        key = str(key_node.value)
        if key in lines:
            result.problems.append(f"{place}: `{excerpt(key)}` is already set on line {lines[key]}; keep one")
            continue
        lines[key] = line
        yield key, place, value_node


def _put_yaml_value(result: OptionSource, spelling: Spelling, node: yaml.Node, *, path: str, place: str) -> None:
    option = spelling.option
    if option.is_list and not isinstance(node, yaml.ScalarNode):
        _put_datasets(result, spelling, node, path=path, place=place)
        return
    if option.value_type is tuple and isinstance(node, yaml.MappingNode):
        _put_pairs(result, spelling, node, path=path, place=place)
        return
    needed, quotes = "true or false" if spelling.is_flag else option.expectation, ""
    shown = _as_written(node)
    try:
        value = _plain_value(node)
        shown = quoted(value)
        if not spelling.is_flag:
            is_text = option.value_type in (str, DatasetEntry)
            quotes = " in quotes" if is_text and isinstance(value, int | float) else ""
            result.put(spelling, option.from_yaml(value), place=place)
        elif not isinstance(value, bool):
            if value is not None or option.value_type is bool:  # `fp16:` says nothing, either
                raise ValueError(value)
        elif value:
            result.put(spelling, spelling.flag_value, place=place)
        elif option.value_type is bool:  # `fp16: false` says nothing about which of the other formats is wanted
            result.put(spelling, not spelling.flag_value, place=place)
    except ValueError:
        result.reject(spelling, f"{place}: `{spelling.name}: {shown}`; {needed}{quotes} is needed")
    except ConfigError as error:
        result.reject(spelling, *(f"{place}: `{spelling.name}`: {problem}" for problem in error.problems))


def _put_datasets(result: OptionSource, spelling: Spelling, node: yaml.Node, *, path: str, place: str) -> None:
    """Put a list of names and mappings, or one mapping."""
    items = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not 0 < len(items) <= _MOST_ITEMS or any(isinstance(item, yaml.SequenceNode) for item in items):
        needed = f"text, or a list of 1 to {_MOST_ITEMS} texts and mappings"
        result.reject(spelling, f"{place}: `{spelling.name}: {_as_written(node)}`; {needed} is needed")
        return
    entries: list[DatasetEntry] = []
    single = replace(spelling, option=replace(spelling.option, is_optional=False))
    for item in items:
        own = OptionSource()
        if isinstance(item, yaml.MappingNode):
            _put_dataset_keys(own, path, item)
            name = str(own.values.pop("name", ""))
            entries.append(DatasetEntry(name, **typing.cast(dict[str, typing.Any], own.values)))
        else:
            _put_yaml_value(own, single, item, path=path, place=f"{path}, line {item.start_mark.line + 1}")
            entries += typing.cast(Datasets, own.values.get(spelling.option.name, ()))
        if own.problems:
            result.reject(spelling, *own.problems[: _MOST_PROBLEMS - len(result.problems)])
        if len(result.problems) >= _MOST_PROBLEMS:
            break
    result.put(spelling, tuple(entries), place=place)


def _put_dataset_keys(result: OptionSource, path: str, mapping: yaml.MappingNode) -> None:
    known = dataset_spellings()
    for key, place, node in _pairs(result, path, mapping, "a key of a dataset"):
        if spelling := known.get(key):
            _put_yaml_value(result, spelling, node, path=path, place=place)
            continue
        near = [_FOREIGN_KEYS[key]] if key in _FOREIGN_KEYS else difflib.get_close_matches(key[:60], known, 1)
        hint = f"did you mean `{near[0]}`?" if near else f"a dataset has {', '.join(known)}"
        result.problems.append(f"{place}: unknown key `{excerpt(key)}` of a dataset; {hint}")
    if "name" not in result.values and not result.problems:
        line = mapping.start_mark.line + 1
        result.problems.append(f"{path}, line {line}: a dataset without `path`; give its name, file or folder")


def _put_pairs(result: OptionSource, spelling: Spelling, mapping: yaml.MappingNode, *, path: str, place: str) -> None:
    form = spelling.option.pair_form.replace("=", ": ")
    if not 0 < len(mapping.value) <= _MOST_ITEMS:
        told = f"`{spelling.name}` has {len(mapping.value)}; 1 to {_MOST_ITEMS} pairs {form} are needed"
        result.reject(spelling, f"{place}: {told}")
        return
    kinds = ("str", "int", "float") if spelling.option.pair_form.endswith("=NUMBER") else ("str",)
    own, pairs = OptionSource(), []
    for key, key_place, node in _pairs(own, path, mapping, "the key of a pair"):
        if key and node.value and isinstance(node, yaml.ScalarNode) and node.tag.removeprefix(_TAG) in kinds:
            pairs.append((key, str(node.value)))
        else:
            shown = f"{excerpt(key)}: {_as_written(node)}"
            own.problems.append(f"{key_place}: `{shown}` in `{spelling.name}`; a pair {form} is needed")
    if own.problems:
        result.reject(spelling, *own.problems)
    else:
        result.put(spelling, tuple(pairs), place=place)


def _plain_value(node: yaml.Node) -> OptionValue:
    """The value of a word or number; ValueError for lists and mappings, which are not made: aliases can be endless."""
    kind = node.tag.removeprefix(_TAG)
    if not isinstance(node, yaml.ScalarNode) or kind not in _PLAIN_KINDS:
        raise ValueError(node.tag)
    if kind == "str":
        return str(node.value)
    if len(node.value) > _MOST_DIGITS:
        raise ValueError(f"{len(node.value)} digits")
    try:
        return typing.cast(OptionValue, _YamlLoader("").construct_object(node))
    except (KeyError, IndexError, OverflowError) as error:  # `!!bool maybe`, `!!int ''`, `!!float` of 1:1:1...
        raise ValueError(node.value) from error


def _as_written(node: yaml.Node) -> str:
    """A node as it stands in the file, short: its tag where it names one, and what it holds unless that is a list."""
    if not isinstance(node, yaml.ScalarNode):
        return "[...]" if isinstance(node, yaml.SequenceNode) else "{...}"
    loader: typing.Any = _YamlLoader("")
    if node.tag == loader.resolve(yaml.ScalarNode, node.value, (True, False)):
        return excerpt(node.value)
    tag = f"!!{node.tag.removeprefix(_TAG)}" if node.tag.startswith(_TAG) else node.tag
    return f"{excerpt(tag)} {excerpt(node.value)}"
