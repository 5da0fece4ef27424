"""Reads options from command lines and YAML files, and writes a config as YAML.

A source collects its values and all their problems; no function raises an error about a single option.
"""

import itertools
import os
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from mobius.config.config import (
    Config,
    nearest_name,
    option_values,
    options,
    sections,
    spellings,
)
from mobius.config.options import DatasetEntry, Option, OptionValue, Spelling, dataset_options, read_truth, shown
from mobius.config.recipes.answers import IGNORED, foreign_option
from mobius.config.recipes.recipe import Launch, translate
from mobius.config.recipes.tools import find_recipe
from mobius.errors import ConfigError, excerpt, first_line, listed, reason_of
from mobius.files.regular_files import read_bytes

_SHOWN_OF_PATH: Final = 200
_NOTHING: Final = ("", "~", "null", "Null", "NULL")
"""Unquoted values that mean None."""


@dataclass
class OptionSource:
    """Values by the options' main names, problems, and notices about options that are ignored."""

    values: dict[str, OptionValue] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    """Log lines about the file that are not warnings."""
    invalid_options: set[str] = field(default_factory=set)
    """Options whose given value could not be read."""
    place: str = ""
    """Beginning of every problem."""
    said: set[str] | None = None
    """Options that another trainer's file itself sets (no defaults); None for a file in Mobius' format."""
    dashes: str = ""
    _spelled: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, given: object, *, written: str, begun: str | None = None) -> None:
        """Read `given` as the value of the option `name` and record it; messages show the user's text, `written`.

        `begun` is a spelling that begins with `name`, but that the user may not have meant.
        """
        if (spelling := spellings().get(name)) is None:
            self._reject_unknown(name, given, begun)
            return
        option = spelling.option
        try:
            if not spelling.is_flag:
                self._put(spelling, option.read(given))
            elif given is None and option.value_type is not bool:
                pass  # `fp16:` without a value sets nothing
            elif read_truth(given):
                self._put(spelling, spelling.flag_value)
            elif spelling.opposite is not None:
                self._put(spelling, spelling.opposite)
        except ValueError:
            needed = "true or false" if spelling.is_flag else option.expectation
            self.reject(spelling, f"`{written}`: it must be {needed}")
        except ConfigError as error:
            self.reject(spelling, *(f"`{self.dashes}{name}`: {problem}" for problem in error.problems))

    def reject(self, spelling: Spelling, *problems: str) -> None:
        """Record that the option was given with an invalid value."""
        self.problems += [self.place + problem for problem in problems]
        self.invalid_options.add(spelling.option.name)

    def _put(self, spelling: Spelling, value: OptionValue) -> None:
        """Record a value. Two spellings of an option must agree; of a repeated spelling, the last value counts."""
        name = spelling.option.name
        earlier = self._spelled.setdefault(name, spelling.name)
        if earlier != spelling.name and self.values[name] != value:
            names = f"`{self.dashes}{earlier}` and `{self.dashes}{spelling.name}`"
            self.reject(spelling, f"{names} set the same option differently; keep one")
        self.values[name] = value

    def _reject_unknown(self, name: str, given: object, begun: str | None) -> None:
        """Record a problem for an unknown name, or a notice if it is another trainer's option that Mobius can ignore.

        Options that the user probably meant are recorded as invalid.
        """
        typed = f"{'option' if self.dashes else 'key'} `{excerpt(name)}`"
        # `deepspeed: null` switches nothing on; a list or mapping does, and so does `--deepspeed` without a value.
        value = given if isinstance(given, str) else "" if given is None else None
        name = name.lstrip("-")
        if answer := foreign_option(name, value):
            if answer.startswith(IGNORED):
                self.notices.append(f"{self.place}{typed} is ignored{answer.removeprefix(IGNORED)}")
            else:
                self.problems.append(f"{self.place}unknown {typed}: {answer}")
                self.invalid_options.update(_options_in(answer))
            return
        nearest = begun or nearest_name(name)
        hint = f"; did you mean `{self.dashes}{nearest}`?" if nearest else ""
        self.problems.append(f"{self.place}unknown {typed}{hint}")
        if meant := spellings().get(nearest or ""):
            self.invalid_options.add(meant.option.name)


@dataclass
class CommandLine(OptionSource):
    """Typed options, and --config and --help, which are not part of a Config."""

    dashes: str = "--"
    config_path: str | None = None
    wants_help: bool = False

    def take_words(self, typed: str, words: list[str]) -> None:
        """Record an option as typed, and the words after it."""
        meant = _meant_names(typed)
        name = meant[0] if len(meant) == 1 and typed.startswith("--") else typed.removeprefix("--")
        spelling = spellings().get(name)
        if typed == "-h" or name == "help":
            self.wants_help = True
        elif name == "config":
            self.config_path = words[0] if words else None
            self.problems += [] if words else ["`--config` has no value; give a YAML file"]
        elif spelling is not None:
            self._take_known(spelling, words)
        elif len(meant) > 1 and typed.startswith("--"):
            names = ", ".join(f"--{each}" for each in meant)
            self.problems.append(f"`{typed}` could be any of {names}; type more letters of it")
        else:
            given = " ".join(words) if words else []
            self.take(typed, given, written=typed, begun=meant[0] if meant else None)
        takes_many = spelling.option.is_list if spelling else name not in ("config", "help")
        self.problems += [] if takes_many else map(_stray, words[1:])

    def _take_known(self, spelling: Spelling, words: list[str]) -> None:
        bare = "true" if spelling.is_flag else spelling.option.bare
        if not words and bare is None:
            self.reject(spelling, f"`--{spelling.name}` has no value; it must be {spelling.option.expectation}")
            return
        given: object = words if spelling.option.is_list else words[0] if words else bare
        shown = words if spelling.option.is_list else words[:1]
        self.take(spelling.name, given, written=f"--{spelling.name} {excerpt(' '.join(shown))}")


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Typed options and their problems; reads no file and raises nothing."""
    result = CommandLine()
    found, strays = _options_of(argv)
    result.problems += map(_stray, strays)
    for typed, words, _ in found:
        result.take_words(typed, words)
    return result


def _options_of(argv: Sequence[str]) -> tuple[list[tuple[str, list[str], bool]], list[str]]:
    """Return each typed option, its words and whether an equals sign precedes them; and the words of no option."""
    found, strays = list[tuple[str, list[str], bool]](), list[str]()
    for token in argv:
        typed, equals, word = token.partition("=")
        if re.match(r"--?[A-Za-z]", token):
            found.append((typed, [word] if equals else [], bool(equals)))
        elif found and not found[-1][2]:
            found[-1][1].append(token)
        else:
            strays.append(token)
    return found, strays


def combinations(argv: Sequence[str]) -> list[tuple[dict[str, str], list[str]]]:
    """Split a command line whose single-value options may have several values: one command line per combination.

    Returns, for each combination, its values by option, and its command line.
    """
    found, strays = _options_of(argv)
    choices = list[list[tuple[dict[str, str], list[str]]]]()
    for typed, words, is_joined in found:
        meant = _meant_names(typed)
        spelling = spellings().get(meant[0]) if len(meant) == 1 else None
        if spelling is None or spelling.is_flag or spelling.option.is_list or len(words) < 2:
            choices.append([({}, [f"{typed}={words[0]}"] if is_joined else [typed, *words])])
        else:
            choices.append([({spelling.option.name: word}, [typed, word]) for word in words])
    if strays:
        return [({}, list(argv))]
    return [
        ({name: value for values, _ in own for name, value in values.items()}, [word for _, own in own for word in own])
        for own in itertools.product(*choices)
    ]


def _stray(word: str) -> str:
    return f"`{excerpt(word)}` belongs to no option"


def _meant_names(typed: str) -> list[str]:
    """Names that equal `typed` or start with it, one per meaning; empty for an option of another trainer."""
    name = typed.lstrip("-").replace("-", "_")
    names = (*spellings(), "config", "help")
    matches = [name] if name in names else [known for known in names if known.startswith(name)]
    meanings: dict[object, str] = {}
    for match in matches:
        # `--model_` begins two spellings of one option, which is not ambiguous; the first spelling is used.
        known = spellings().get(match)
        meanings.setdefault((known.option.name, known.flag_value) if known else match, match)
    answer = None if name in names else foreign_option(name)
    begun = {spellings()[known].option.name for known in matches if known in spellings()}
    return list(meanings.values()) if answer is None or begun <= _options_in(answer) else []


def _options_in(answer: str) -> set[str]:
    """Return the options that the text `answer` names."""
    return {name for name in re.findall(r"--(\w+)", answer) if name in options()}


class _Loader(yaml.BaseLoader):
    """YAML loader that reads every value as text, so that a file means the same as a command line.

    An unquoted null is None, and a duplicate key is an error.
    """

    def construct_scalar(self, node: yaml.ScalarNode) -> str | None:  # type: ignore[override]
        """Return the text of a value; raises ConstructorError if it has a YAML tag."""
        if not node.tag.startswith("tag:yaml.org,2002:str"):
            raise _refusal(node, f"the tag {excerpt(node.tag)} is not supported; remove it")
        return None if node.style is None and node.value in _NOTHING else str(node.value)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[typing.Hashable, typing.Any]:
        """Return a mapping of texts to values; raises ConstructorError for a repeated key or a key that is no word."""
        keys = set[str]()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refusal(key_node, "a key must be a word")
            if key_node.value in keys:
                raise _refusal(key_node, f"`{excerpt(key_node.value)}` is already set; keep one")
            keys.add(key_node.value)
        return super().construct_mapping(node, deep)


def _refusal(node: yaml.Node, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


def read_yaml(path: str, launch: Launch | None = None) -> OptionSource:
    """Read a YAML file of options, or a file of another trainer; problems begin with the file's name.

    `launch` has facts about the run that another trainer's file does not have.
    """
    shown_path = excerpt(path, _SHOWN_OF_PATH)
    result = OptionSource(place=f"{shown_path}: ")
    try:
        root = _parse(_read_text(path), shown_path)
        if not isinstance(root, Mapping | None):
            raise ConfigError(f"{shown_path}: expected lines of `option: value`")
        keys = _translated(result, {str(key): value for key, value in (root or {}).items()}, launch or Launch())
    except ConfigError as error:
        result.problems += error.problems
        result.invalid_options.update(options())
        return result
    for key, value in keys.items():
        result.take(key, value, written=f"{excerpt(key)}: {shown(value)}")
    return result


def _translated(result: OptionSource, keys: dict[str, object], launch: Launch) -> Mapping[str, object]:
    """Translate the keys if they are another trainer's; returns the keys that remain to be read. Raises ConfigError."""
    try:
        if (recipe := find_recipe(keys)) is None:
            return keys
    except ConfigError as error:
        raise ConfigError(*(result.place + problem for problem in error.problems)) from None
    file, others = translate(recipe, keys, launch)
    result.said = file.said
    for option, (given, written) in file.given.items():
        result.take(option, given, written=written)
    told = [f"{result.place}read as a file of {recipe.name} (docs/user/other_trainers.md)", *file.facts]
    result.facts.append("; ".join(told + ([f"no effect here: {listed(file.ignored)}"] if file.ignored else [])))
    result.notices += [f"{result.place}{notice}" for notice in file.notices]
    result.problems += [f"{result.place}{problem}" for problem in file.problems]
    if file.problems:
        result.invalid_options.update(options().keys() - result.values.keys())
    return others


def _read_text(path: str) -> str:
    """Return the file's text; raises ConfigError, also for a pipe or device, which only one rank could read."""
    file, shown_path = Path(path), excerpt(path, _SHOWN_OF_PATH)
    try:
        return "" if file == Path(os.devnull) else read_bytes(file).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{shown_path}: not a UTF-8 text file; save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: not a possible file name
        place = excerpt(str(file.absolute()), _SHOWN_OF_PATH)
        model = "" if file.suffix else f"; a model is given with --model_path {shown_path}"
        raise ConfigError(
            f"`--config {shown_path}` cannot be read ({reason_of(error)}, looked at {place}); give the path of a YAML "
            f"file of options{model}"
        ) from None


def _parse(text: str, path: str) -> object:
    """Texts, lists and mappings of a file; raises ConfigError, with the line if PyYAML gives one."""
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # PyYAML does not wrap all errors: ValueError of a number, OverflowError of an escape
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        reason = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(f"{path}{line}: not valid YAML: {excerpt(reason, 200)}") from None


def to_yaml(config: Config) -> str:
    """All options of a config as a flat YAML file with a heading per section; `--config` reads it back unchanged."""
    values, parts = written_options(config), list[str]()
    for title, own in sections().items():
        written = {option.name: values[option.name] for option in own}
        parts.append(f"# {title}\n{yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=10_000)}")
    return "\n".join(parts)


def written_options(config: Config) -> dict[str, Any]:
    """Values of all options in the types of YAML: texts, numbers, lists and mappings."""
    values = option_values(config)
    if config.optim.num_train_epochs is not None:
        values["num_iterations"] = None  # the run computed the steps from its epochs; the user did not give them
    return {option.name: _written(option, values[option.name]) for own in sections().values() for option in own}


def _written(option: Option, value: Any) -> object:
    if value is None:
        return "auto" if option.allows_auto else None
    if option.value_type is tuple:
        return dict(value)
    if not option.is_list:
        return getattr(value, "value", value)
    entries = [entry.name if entry.is_plain else _written_dataset(entry) for entry in value]
    return entries[0] if len(entries) == 1 and isinstance(entries[0], str) else entries


def _written_dataset(entry: DatasetEntry) -> dict[str, object]:
    written: dict[str, object] = {"path": entry.name}
    for name, option in dataset_options().items():
        value = getattr(entry, name)
        if name != "name" and value != option.default:
            written[name] = _written(option, value)
    return written
