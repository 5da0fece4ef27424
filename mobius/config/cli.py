"""The command line and a YAML file become one Config, defaults < YAML < command line; `--help` shows the table.

Both sources collect their problems, and one ConfigError has all of them.
"""

import argparse
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from mobius.config.config import Config, DatasetEntry
from mobius.config.foreign_options import foreign_option
from mobius.config.options import Option, OptionValue, config_from, options, section_titles, spellings
from mobius.config.sources import OptionSource
from mobius.config.validation import (
    MUTUALLY_EXCLUSIVE,
    exempt_file_options,
    find_ineffective_launch_options,
    find_problems,
    infer_eval_strategy,
)
from mobius.config.yaml_file import read_yaml
from mobius.errors import ConfigError
from mobius.excerpt import excerpt
from mobius.log import RANK_ZERO_ONLY
from mobius.ranks import Ranks, visible_devices

logger = logging.getLogger(__name__)

_SHORT_MODEL_NAMES: Final[Mapping[str, str]] = {
    "llama-2-7b-hf": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b-hf": "meta-llama/Llama-2-13b-hf",
}
_METAVARS: Final[Mapping[type, str]] = {int: "INT", float: "FLOAT", DatasetEntry: "WORD"}
_DESCRIPTION: Final = (
    "Fine-tune all parameters of a language model on one node with a few memory-limited GPUs. An option may also be "
    "a key of a YAML file (--config); the command line overrides the file, the file the defaults. Options "
    "may be shortened while they stay unambiguous."
)


@dataclass
class CommandLine(OptionSource):
    """The typed options, and the two that are not part of a Config."""

    dashes: str = "--"
    config_path: str | None = None
    wants_help: bool = False


def parse_args(
    argv: Sequence[str], *, num_ranks: int | None = None, num_nodes: int = 1, is_without_train_sh: bool = False
) -> Config:
    """Read `argv` (without the program's name) and the YAML file it names.

    `is_without_train_sh`: the ranks were started by torchrun or alone, without what train.sh does with its options.

    Logs what is ignored and what is chosen. Raises ConfigError with every problem of both sources and of their
    combination; with `num_ranks`, also of that. `--help` prints on the first rank only and raises SystemExit, as
    argparse does.
    """
    command_line = read_command_line(argv)
    if command_line.wants_help:
        if Ranks.from_environment().is_first:
            sys.stdout.write(_parser(for_help=True).format_help())
        raise SystemExit(0)
    config = resolve(command_line, num_ranks=num_ranks, num_nodes=num_nodes, is_without_train_sh=is_without_train_sh)
    for notice in command_line.notices:
        logger.warning("%s", notice, extra=RANK_ZERO_ONLY)
    return config


def resolve(
    command_line: CommandLine,
    *,
    num_ranks: int | None = None,
    num_nodes: int = 1,
    is_without_train_sh: bool = False,
) -> Config:
    """Put the command line over the file it names and that over the defaults; raises ConfigError like `parse_args`.

    The command line's notices are then those of both.
    """
    file = _file_of(command_line)
    values = _merged(file.values, command_line.values)
    name = str(values.get("model_path"))
    if name.lower() in _SHORT_MODEL_NAMES and not Path(name).is_dir():
        values["model_path"] = _SHORT_MODEL_NAMES[name.lower()]
    config = config_from(values)
    command_line.notices += file.notices
    if config.saving.resume_from_checkpoint is None:  # else the checkpoint's strategy counts
        config, notice = infer_eval_strategy(config, values)
        command_line.notices += [] if notice is None else [notice]
    if not config.evaluation.do_train and "dataset" not in values and config.data.eval_dataset is not None:
        # Nothing is trained on; rows are planned for what is evaluated.
        config = replace(config, data=replace(config.data, dataset=config.data.eval_dataset))
    # A broken value in the file does not matter to the rules where the command line replaces it.
    invalid_options = (file.invalid_options - set(command_line.values)) | command_line.invalid_options
    if config.saving.resume_from_checkpoint is not None:  # what is not given is the checkpoint's, and not known yet
        invalid_options |= options().keys() - values.keys()
    # A dry run is one process that plans for others, and a preview trains nothing.
    is_run = not config.planning.dry_run and config.data.preview is None
    num_pipeline_ranks, num_replicas = _pipelines(config, num_ranks, num_nodes) if is_run else (None, 1)
    problems = file.problems + command_line.problems
    problems += find_problems(
        config,
        num_ranks=num_pipeline_ranks,
        num_replicas=num_replicas,
        invalid_options=invalid_options,
        is_exempt=exempt_file_options(command_line.values),
    )
    if is_without_train_sh:
        found, notices = find_ineffective_launch_options(
            config, command_line.values, num_ranks=num_ranks or 1, num_nodes=num_nodes, devices=visible_devices()
        )
        problems += found
        command_line.notices += notices
    if problems:
        raise ConfigError(*problems, hint="Run with `--help` to see all options.")
    return config


def _pipelines(config: Config, num_ranks: int | None, num_nodes: int) -> tuple[int | None, int]:
    """Ranks of a pipeline, if those of the run are known, and replicas; whole ones, or `Ranks.cut` refuses them."""
    if num_ranks is None:
        return None, 1
    num_pipeline_ranks = config.launch.pipeline_ranks or num_ranks // num_nodes
    return num_pipeline_ranks, max(1, num_ranks // num_pipeline_ranks)


def given_options(argv: Sequence[str]) -> frozenset[str]:
    """Names of the options that `argv` or the YAML file it names sets, be it to the default."""
    command_line = read_command_line(argv)
    return frozenset(_merged(_file_of(command_line).values, command_line.values))


def _merged(file: Mapping[str, OptionValue], typed: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Both sources' values; what is typed replaces its alternative in the file, too."""
    chosen = [name for name, value in typed.items() if value != options()[name].default]
    replaced = {other for pair in MUTUALLY_EXCLUSIVE for name in chosen for other in pair if name in pair}
    return {**{name: value for name, value in file.items() if name not in replaced}, **typed}


def _file_of(command_line: CommandLine) -> OptionSource:
    return read_yaml(command_line.config_path) if command_line.config_path is not None else OptionSource()


class _Record(argparse.Action):
    """Collects options and their words in the order in which they come; no mistake hides another one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Append the option as it was given, and its words."""
        words = values if isinstance(values, list) else [] if values is None else [values]
        namespace.given.append((option_string, [word.removeprefix("=") for word in words]))


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """The typed options and what is wrong with them; reads no file and raises nothing."""
    parser, unknown, tokens = _parser(), set[str](), list[str]()
    for token in argv:
        if not re.match(r"--?[A-Za-z]", token):
            tokens.append(f"={token}")  # so that argparse takes neither `-1e-5` nor `--` for an option
            continue
        typed, equals, word = token.partition("=")
        meant = ["help"] if typed == "-h" else _meant_names(typed) if typed.startswith("--") else []
        name = f"--{meant[0]}" if len(meant) == 1 else typed
        if len(meant) != 1 and name not in unknown:
            parser.add_argument(name, nargs="*", action=_Record)
            unknown.add(name)
        tokens.append(f"{name}=={word}" if equals else name)
    found, strays = parser.parse_known_args(tokens, argparse.Namespace(given=[]))
    result = CommandLine()
    for option_string, words in found.given:
        _take(result, option_string, words)
    result.problems += [f"`{excerpt(word.removeprefix('='))}` belongs to no option" for word in strays]
    return result


def _take(result: CommandLine, option_string: str, words: list[str]) -> None:
    """Record an option and the words after it."""
    name = option_string.removeprefix("--")
    spelling = spellings().get(name)
    if name == "help":
        result.wants_help = True
    elif name == "config" and not words:
        result.problems.append("`--config` has no value; a YAML file is needed")
    elif name == "config":
        result.config_path = words[0]
    elif spelling is None:
        meant = _meant_names(option_string)
        if len(meant) > 1 and option_string.startswith("--"):
            names = ", ".join(f"--{each}" for each in meant)
            result.problems.append(f"`{option_string}` could be any of {names}; write more of it")
        else:
            result.take(
                option_string,
                " ".join(words) if words else [],
                written=option_string,
                begun=meant[0] if meant else None,
            )
    else:
        bare = "true" if spelling.is_flag else spelling.option.rules.bare
        if not words and bare is None:
            result.reject(spelling, f"`--{name}` has no value; {spelling.option.expectation} is needed")
        else:
            given: object = words if spelling.option.is_list else words[0] if words else bare
            result.take(name, given, written=f"--{name} {excerpt(' '.join(words))}")


def _meant_names(typed: str) -> list[str]:
    """Names that `typed` is or begins, one for each meaning; none where it is an option of another trainer."""
    name = typed.lstrip("-").replace("-", "_")
    names = (*spellings(), "config", "help")
    matches = [name] if name in names else [known for known in names if known.startswith(name)]
    meanings: dict[object, str] = {}
    for match in matches:
        # `--model_` begins two spellings of one option, which is not ambiguous; the first one is meant.
        known = spellings().get(match)
        meanings.setdefault((known.option.name, known.flag_value) if known else match, match)
    foreign, begun = foreign_option(name), {spellings()[known].option.name for known in matches if known in spellings()}
    return [] if foreign is not None and not begun <= set(foreign.replacements) else list(meanings.values())


def _parser(*, for_help: bool = False) -> argparse.ArgumentParser:
    """The parser of the table. The one `for_help` shows what an option needs, the other one takes what is given."""
    program = "main.py" if Path(sys.argv[0]).name == "main.py" else "-m mobius"
    parser = argparse.ArgumentParser(
        usage=f"bash train.sh [FILE.yaml] [options]\n"
        f"       torchrun --nproc_per_node N {program} [--config FILE.yaml] [options]",
        description=_DESCRIPTION,
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    if not for_help:
        for name in ("help", "config", *spellings()):
            is_list = name in spellings() and spellings()[name].option.is_list
            parser.add_argument(f"--{name}", nargs="*" if is_list else "?", action=_Record)
        return parser
    general = parser.add_argument_group("General")
    general.add_argument("-h", "--help", action="store_true", help="Print this text and exit.")
    general.add_argument("--config", metavar="FILE", help="YAML file of options.")
    groups = {section: parser.add_argument_group(title) for section, title in section_titles().items()}
    for option in options().values():
        _add_to_help(groups[option.section], option)
    return parser


def _add_to_help(group: Any, option: Option) -> None:
    names = {f"--{name}": spelling.flag_value for name, spelling in spellings().items() if spelling.option is option}
    text, value = option.text.replace("%", "%%"), option.default
    if option.value_type is bool:
        default = next(name for name, meaning in names.items() if meaning is value)
        group.add_argument(*names, action="store_true", help=f"{text} [flag; default: {default}]")
        return
    others = list(names)[1:]
    if isinstance(value, tuple):
        value = " ".join(str(getattr(entry, "name", entry)) for entry in value)
    shown = f"{value:g}" if isinstance(value, float) else "auto" if value is None and option.allows_auto else value
    facts = [option.expectation, *([f"default: {shown}"] if shown is not None else [])]
    facts += [f"also: {', '.join(others)}"] if others else []
    metavar = "|".join(option.choices) or _METAVARS.get(option.value_type, "TEXT")
    metavar = f"{option.rules.pair[0]},..." if option.value_type is tuple else metavar
    number = "+" if option.is_list else "?" if option.rules.bare is not None else None
    group.add_argument(f"--{option.name}", nargs=number, metavar=metavar, help=f"{text} [{'; '.join(facts)}]")
