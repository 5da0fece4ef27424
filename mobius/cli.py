"""Owns reading: the command line and a YAML file become one Config, defaults < YAML < command line.

Does not own what the options are (`options.py`), the file itself (`yaml_file.py`) or whether values fit together
(`validation.py`). Nothing here
stops at the first mistake: every source collects its problems, and all of them are told in one ConfigError.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from mobius.config import Config
from mobius.errors import ConfigError
from mobius.options import (
    Option,
    OptionValue,
    Source,
    Spelling,
    config_from,
    nearest_name,
    options,
    section_titles,
    spellings,
)
from mobius.ranks import Ranks
from mobius.validation import find_problems
from mobius.yaml_file import read_yaml, to_yaml

__all__ = ["CommandLine", "given_options", "parse_args", "read_command_line", "resolve", "to_yaml"]

_SHORT_MODEL_NAMES: Final[Mapping[str, str]] = {
    "llama-2-7b-hf": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b-hf": "meta-llama/Llama-2-13b-hf",
}
_GENERAL_FLAGS: Final = ("help",)
_HINT: Final = "Run with `--help` to see all options."
_DESCRIPTION: Final = (
    "Fine-tune all parameters of a language model on one node with a few memory-limited GPUs. An option may also be "
    "a key of a YAML file (--config); the command line goes before the file, the file before the defaults. Options "
    "may be shortened while they stay unambiguous."
)


@dataclass
class CommandLine(Source):
    """The typed options, and the two that are not part of a Config."""

    dashes: str = "--"
    config_path: str | None = None
    wants_help: bool = False


def parse_args(argv: Sequence[str], *, num_ranks: int | None = None) -> Config:
    """Read `argv` (without the program's name) and the YAML file it names.

    Raises ConfigError with every problem of both sources and of their combination; with `num_ranks`, also of that.
    `--help` prints on the first rank only and raises SystemExit, as argparse does.
    """
    command_line = read_command_line(argv)
    if command_line.wants_help:
        if Ranks.from_environment().is_first:
            _make_parser().print_help()
        raise SystemExit(0)
    return resolve(command_line, num_ranks=num_ranks)


def resolve(command_line: CommandLine, *, num_ranks: int | None = None) -> Config:
    """Put the command line over the file it names and that over the defaults; raises ConfigError like `parse_args`."""
    file = read_yaml(command_line.config_path) if command_line.config_path is not None else Source()
    config = config_from(_with_full_model_name({**file.values, **command_line.values}))
    # A broken value in the file does not matter to the rules where the command line replaces it.
    unreadable = (file.unreadable - set(command_line.values)) | command_line.unreadable
    # A dry run is one process that plans for others.
    started = None if config.planning.dry_run else num_ranks
    rules_broken = find_problems(config, num_ranks=started, unreadable=unreadable)
    problems = [*file.problems, *command_line.problems, *rules_broken]
    if problems:
        raise ConfigError(*problems, hint=_HINT)
    return config


def given_options(argv: Sequence[str]) -> frozenset[str]:
    """Names of the options that `argv` or the YAML file it names sets, be it to the default."""
    command_line = read_command_line(argv)
    file = read_yaml(command_line.config_path) if command_line.config_path is not None else Source()
    return frozenset({**file.values, **command_line.values})


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Take the typed options apart; reads no file and raises nothing."""
    result = CommandLine()
    namespace, leftovers = _make_parser().parse_known_args(_expand(argv, result), argparse.Namespace(given=[]))
    for name, text in namespace.given:
        if name in _GENERAL_FLAGS:
            result.wants_help = True
        elif name == "config":
            result.config_path = text
        else:
            _put_text(result, spellings()[name], text)
    for token in leftovers:
        result.problems.append(
            f"`{token}` belongs to no option; flags take no value, their opposite is another flag "
            "(--use_prefetch, --no_prefetch)"
        )
    return result


def _put_text(result: Source, spelling: Spelling, text: str) -> None:
    if spelling.is_flag:
        result.put(spelling, spelling.flag_value, place="command line")
        return
    try:
        result.put(spelling, spelling.option.from_text(text), place="command line")
    except ValueError:
        result.reject(spelling, f"`--{spelling.name} {text}`; {spelling.option.expectation} is needed")


def _expand(argv: Sequence[str], result: Source) -> list[str]:
    """Write every option in full with its value attached; report and drop what argparse would stop at."""
    expanded: list[str] = []
    waiting: str | None = None
    is_after_unknown = False
    for token in (*argv, None):
        if token is not None and not re.match(r"--?[A-Za-z]", token):
            if waiting is not None:
                expanded.append(f"--{waiting}={token}")
            elif not is_after_unknown:
                expanded.append(token)
            waiting = None
            continue
        if waiting is not None:
            _report_missing_value(result, waiting)
            waiting = None
        if token is None:
            break
        typed, equals, value = token.lstrip("-").partition("=")
        name = _full_name(token, typed, result)
        is_after_unknown = name is None
        if name is None:
            continue
        is_flag = name in _GENERAL_FLAGS or (name in spellings() and spellings()[name].is_flag)
        if is_flag and equals:
            result.problems.append(f"`{token}`: a flag takes no value; write --{name} or leave it out")
        elif is_flag or equals:
            expanded.append(f"--{name}{equals}{value}")
        else:
            waiting = name
    return expanded


def _report_missing_value(result: Source, name: str) -> None:
    if name in spellings():
        result.reject(spellings()[name], f"`--{name}` has no value; {spellings()[name].option.expectation} is needed")
    else:
        result.problems.append(f"`--{name}` has no value; a YAML file is needed")


def _full_name(token: str, typed: str, result: Source) -> str | None:
    """The spelling that `typed` is or unambiguously begins; None, with a problem, if there is none."""
    if token == "-h":
        return "help"
    name = typed.replace("-", "_")
    names = (*spellings(), "config", *_GENERAL_FLAGS)
    matches = [name] if name in names else [known for known in names if known.startswith(name)]
    if not token.startswith("--") or not matches:
        nearest = matches[0] if matches else nearest_name(name)
        result.reject_unknown(f"unknown option `{token.partition('=')[0]}`", nearest)
        return None
    # `--model_` begins two spellings of one option, which is not ambiguous.
    by_meaning: dict[tuple[str, OptionValue], str] = {}
    for match in matches:
        by_meaning.setdefault(_meaning(match), match)
    if len(by_meaning) > 1:
        shown = ", ".join(f"--{match}" for match in by_meaning.values())
        result.problems.append(f"`--{typed}` could be any of {shown}; write more of it")
        return None
    return matches[0]


def _meaning(name: str) -> tuple[str, OptionValue]:
    spelling = spellings().get(name)
    return (spelling.option.name, spelling.flag_value) if spelling else (name, None)


def _with_full_model_name(values: dict[str, OptionValue]) -> dict[str, OptionValue]:
    name = values.get("model_path")
    if isinstance(name, str) and not Path(name).is_dir():
        values["model_path"] = _SHORT_MODEL_NAMES.get(name.lower(), name)
    return values


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=_HINT)


class _Record(argparse.Action):
    """Keep every option as it was spelled, in order; judging comes later, for all of them together."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        namespace.given.append((option_string.removeprefix("--"), values))


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="main.py",
        usage="torchrun --nproc_per_node N main.py [--config FILE.yaml] [options]",
        description=_DESCRIPTION,
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    general = parser.add_argument_group("General")
    general.add_argument("-h", "--help", action=_Record, nargs=0, help="Print this text and exit.")
    general.add_argument("--config", action=_Record, metavar="FILE", help="YAML file of options.")
    for section, title in section_titles().items():
        group = parser.add_argument_group(title)
        for option in options().values():
            if option.section == section:
                _add_option(group, option)
    return parser


def _add_option(group: Any, option: Option) -> None:
    names = [spelling for spelling in spellings().values() if spelling.option is option]
    others = [f"--{spelling.name}" for spelling in names if spelling.name != option.name]
    default = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
    if option.value_type is bool:
        flags = {spelling.flag_value: f"--{spelling.name}" for spelling in names}
        help_text = f"{option.text} [flag; default: {flags[option.default]}]"
        group.add_argument(
            *(f"--{spelling.name}" for spelling in names), action=_Record, nargs=0, help=_escape(help_text)
        )
        return
    facts = [option.expectation, *([f"default: {default}"] if option.default is not None else [])]
    facts += [f"also: {', '.join(others)}"] if others else []
    metavar = "|".join(option.choices) or {int: "INT", float: "FLOAT", str: "TEXT"}[option.value_type]
    help_text = _escape(f"{option.text} [{'; '.join(facts)}]")
    group.add_argument(f"--{option.name}", action=_Record, metavar=metavar, help=help_text)
    for spelling in names[1:]:
        nargs = 0 if spelling.is_flag else None
        group.add_argument(f"--{spelling.name}", action=_Record, nargs=nargs, help=argparse.SUPPRESS)


def _escape(text: str) -> str:
    return text.replace("%", "%%")
