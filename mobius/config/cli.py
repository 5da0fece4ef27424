"""Owns reading: the command line and a YAML file become one Config, defaults < YAML < command line.

Nothing here stops at the first mistake: every source collects its problems, and all of them are told in one
ConfigError.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mobius.config.config import Config
from mobius.config.options import Option, OptionValue, Source, config_from, options, section_titles, spellings
from mobius.config.validation import find_problems
from mobius.config.yaml_file import read_yaml
from mobius.errors import ConfigError
from mobius.excerpt import excerpt
from mobius.ranks import Ranks

_SHORT_MODEL_NAMES: Final[Mapping[str, str]] = {
    "llama-2-7b-hf": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b-hf": "meta-llama/Llama-2-13b-hf",
}
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
            sys.stdout.write(_help_text())
        raise SystemExit(0)
    return resolve(command_line, num_ranks=num_ranks)


def resolve(command_line: CommandLine, *, num_ranks: int | None = None) -> Config:
    """Put the command line over the file it names and that over the defaults; raises ConfigError like `parse_args`."""
    file = _file_of(command_line)
    values = {**file.values, **command_line.values}
    name = str(values.get("model_path"))
    if name.lower() in _SHORT_MODEL_NAMES and not Path(name).is_dir():
        values["model_path"] = _SHORT_MODEL_NAMES[name.lower()]
    config = config_from(values)
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
    return frozenset({**_file_of(command_line).values, **command_line.values})


def _file_of(command_line: CommandLine) -> Source:
    return read_yaml(command_line.config_path) if command_line.config_path is not None else Source()


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """The typed options and what is wrong with them; reads no file and raises nothing."""
    result = CommandLine()
    waiting: str | None = None  # an option whose value is the next word
    is_after_unknown = False
    for token in argv:
        if not re.match(r"--?[A-Za-z]", token):
            if waiting is not None:
                _put(result, waiting, token)
            elif not is_after_unknown:
                result.problems.append(
                    f"`{excerpt(token)}` belongs to no option; flags take no value, their opposite is another flag "
                    "(--use_prefetch, --no_prefetch)"
                )
            waiting = None
            continue
        if waiting is not None:
            _report_missing_value(result, waiting)
            waiting = None
        typed, equals, value = token.lstrip("-").partition("=")
        name = _full_name(token, typed, result)
        is_after_unknown = name is None
        if name is None:
            continue
        is_flag = name == "help" or (name in spellings() and spellings()[name].is_flag)
        if is_flag and equals:
            result.problems.append(f"`{excerpt(token)}`: a flag takes no value; write --{name} or leave it out")
        elif is_flag or equals:
            _put(result, name, value)
        else:
            waiting = name
    if waiting is not None:
        _report_missing_value(result, waiting)
    return result


def _put(result: CommandLine, name: str, text: str) -> None:
    """Record an option by its full name; a flag's `text` is empty."""
    if name == "help":
        result.wants_help = True
    elif name == "config":
        result.config_path = text
    else:
        spelling = spellings()[name]
        try:
            value = spelling.flag_value if spelling.is_flag else spelling.option.from_text(text)
        except ValueError:
            result.reject(spelling, f"`--{name} {excerpt(text)}`; {spelling.option.expectation} is needed")
        else:
            result.put(spelling, value, place="command line")


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
    names = (*spellings(), "config", "help")
    matches = [name] if name in names else [known for known in names if known.startswith(name)]
    if not token.startswith("--") or not matches:
        shown = excerpt(token.partition("=")[0])
        result.reject_unknown(f"unknown option `{shown}`", name, begun=matches[0] if matches else None)
        return None
    by_meaning: dict[tuple[str, OptionValue], str] = {}
    for match in matches:  # `--model_` begins two spellings of one option, which is not ambiguous
        spelling = spellings().get(match)
        by_meaning.setdefault((spelling.option.name, spelling.flag_value) if spelling else (match, None), match)
    if len(by_meaning) > 1:
        shown = ", ".join(f"--{match}" for match in by_meaning.values())
        result.problems.append(f"`--{typed}` could be any of {shown}; write more of it")
        return None
    return matches[0]


def _help_text() -> str:
    """All options by topic, with their texts and defaults."""
    program = "main.py" if Path(sys.argv[0]).name == "main.py" else "-m mobius"
    parser = argparse.ArgumentParser(
        usage=f"torchrun --nproc_per_node N {program} [--config FILE.yaml] [options]",
        description=_DESCRIPTION,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    general = parser.add_argument_group("General")
    general.add_argument("-h", "--help", action="store_true", help="Print this text and exit.")
    general.add_argument("--config", metavar="FILE", help="YAML file of options.")
    for section, title in section_titles().items():
        group = parser.add_argument_group(title)
        for option in options().values():
            if option.section == section:
                _add_option(group, option)
    return parser.format_help()


def _add_option(group: Any, option: Option) -> None:
    names = [spelling for spelling in spellings().values() if spelling.option is option]
    text = option.text.replace("%", "%%")
    if option.value_type is bool:
        flags = {spelling.flag_value: f"--{spelling.name}" for spelling in names}
        help_text = f"{text} [flag; default: {flags[option.default]}]"
        group.add_argument(*(f"--{spelling.name}" for spelling in names), action="store_true", help=help_text)
        return
    others = [f"--{spelling.name}" for spelling in names if spelling.name != option.name]
    default = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
    facts = [option.expectation, *([f"default: {default}"] if option.default is not None else [])]
    facts += [f"also: {', '.join(others)}"] if others else []
    metavar = "|".join(option.choices) or {int: "INT", float: "FLOAT", str: "TEXT"}[option.value_type]
    group.add_argument(f"--{option.name}", metavar=metavar, help=f"{text} [{'; '.join(facts)}]")
