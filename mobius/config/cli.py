"""Owns reading: the command line and a YAML file become one Config, defaults < YAML < command line.

Every source collects its problems, and one ConfigError tells all of them.
"""

import argparse
import logging
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from mobius.config.config import Config, DatasetEntry
from mobius.config.foreign_options import foreign_option
from mobius.config.ineffective_options import IsExempt, find_ineffective_launch_options, infer_eval_strategy
from mobius.config.options import (
    Option,
    OptionSource,
    OptionValue,
    Spelling,
    config_from,
    options,
    section_titles,
    spellings,
)
from mobius.config.validation import MUTUALLY_EXCLUSIVE, find_problems
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
_TRUTH: Final[Mapping[str, bool]] = {"true": True, "false": False}
_DESCRIPTION: Final = (
    "Fine-tune all parameters of a language model on one node with a few memory-limited GPUs. An option may also be "
    "a key of a YAML file (--config); the command line goes before the file, the file before the defaults. Options "
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
            sys.stdout.write(_help_text())
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
        # Nothing is trained on; rows are planned for what is judged.
        config = replace(config, data=replace(config.data, dataset=config.data.eval_dataset))
    # A broken value in the file does not matter to the rules where the command line replaces it.
    invalid_options = (file.invalid_options - set(command_line.values)) | command_line.invalid_options
    if config.saving.resume_from_checkpoint is not None:  # what is not given is the checkpoint's, and not known yet
        invalid_options |= options().keys() - values.keys()
    problems = [*file.problems, *command_line.problems]
    # A dry run is one process that plans for others, and a preview trains nothing.
    is_run = not config.planning.dry_run and config.data.preview is None
    num_pipeline_ranks, num_replicas = _pipelines(config, num_ranks, num_nodes) if is_run else (None, 1)
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


def exempt_file_options(typed: Collection[str]) -> IsExempt:
    """Excuse of options of a file that have no effect in a mode that is `typed`."""
    return lambda option, mode_options: option not in typed and any(name in typed for name in mode_options)


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


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """The typed options and what is wrong with them; reads no file and raises nothing."""
    result = CommandLine()
    typed, words = "", list[str]()
    for token in argv:
        if re.match(r"--?[A-Za-z]", token):
            _put(result, typed, words)
            typed, words = token, []
        else:
            words.append(token)
    _put(result, typed, words)
    return result


def _put(result: CommandLine, token: str, words: Sequence[str]) -> None:
    """Record an option as it was typed and the words behind it; an empty token stands before the first option."""
    typed, equals, value = token.lstrip("-").partition("=")
    given = [value, *words] if equals else [*words]
    name = _full_name(token, typed, result, given) if token else ""
    if name is None:
        return
    spelling = spellings().get(name)
    is_flag = name == "help" or (spelling is not None and spelling.is_flag)
    if spelling is not None and spelling.option.is_list:
        most = 1 if equals else len(given)
    elif is_flag:  # Trainer's flags take one
        most = 1 if given and name != "help" and given[0].lower() in _TRUTH else 0
    else:
        most = 1 if name else 0
    if is_flag and equals and not most:
        result.problems.append(f"`{excerpt(token)}`: a flag takes no value; write --{name} or leave it out")
        return
    for word in given[most:]:
        result.problems.append(
            f"`{excerpt(word)}` belongs to no option; flags take no value, their opposite is another flag "
            "(--use_prefetch, --no_prefetch)"
        )
    given = given[:most]
    if name == "help":
        result.wants_help = True
    elif name == "config" and not given:
        result.problems.append("`--config` has no value; a YAML file is needed")
    elif name == "config":
        result.config_path = given[0]
    elif spelling is not None:
        _put_value(result, spelling, given)


def _put_value(result: CommandLine, spelling: Spelling, words: Sequence[str]) -> None:
    """Record an option's value; there are no words where it is missing."""
    name, option, shown = spelling.name, spelling.option, excerpt(" ".join(words))
    try:
        if spelling.is_flag:
            if _TRUTH.get(words[0].lower() if words else "true", False):
                result.put(spelling, spelling.flag_value, place="command line")
            elif option.value_type is bool:  # `--fp16 false` says nothing about which of the other formats is wanted
                result.put(spelling, not spelling.flag_value, place="command line")
        elif words:
            result.put(spelling, option.from_words(words), place="command line")
        elif option.bare_value is not None:
            result.put(spelling, option.bare_value, place="command line")
        else:
            result.reject(spelling, f"`--{name}` has no value; {option.expectation} is needed")
    except ValueError:
        result.reject(spelling, f"`--{name} {shown}`; {option.expectation} is needed")
    except ConfigError as error:
        result.reject(spelling, *(f"`--{name} {shown}`: {problem}" for problem in error.problems))


def _full_name(token: str, typed: str, result: OptionSource, words: Sequence[str]) -> str | None:
    """The spelling that `typed` is or unambiguously begins; None, with a problem or notice, if there is none."""
    if token == "-h":
        return "help"
    name = typed.replace("-", "_")
    names = (*spellings(), "config", "help")
    matches = [name] if name in names else [known for known in names if known.startswith(name)]
    foreign, begun = foreign_option(name), {spellings()[known].option.name for known in matches if known in spellings()}
    if not token.startswith("--") or not matches or (foreign is not None and not begun <= set(foreign.replacements)):
        shown, value = f"option `{excerpt(token.partition('=')[0])}`", " ".join(words) if words else None
        result.reject_unknown(name, shown=shown, value=value, begun=matches[0] if matches else None)
        return None
    # `--model_` begins two spellings of one option, which is not ambiguous; the first one is shown.
    found = {match: spellings().get(match) for match in reversed(matches)}
    meanings = {(known.option.name, known.flag_value) if known else match: match for match, known in found.items()}
    if len(meanings) > 1:
        shown = ", ".join(f"--{match}" for match in matches if match in meanings.values())
        result.problems.append(f"`--{typed}` could be any of {shown}; write more of it")
        return None
    return matches[0]


def _help_text() -> str:
    program = "main.py" if Path(sys.argv[0]).name == "main.py" else "-m mobius"
    parser = argparse.ArgumentParser(
        usage=f"bash train.sh [FILE.yaml] [options]\n"
        f"       torchrun --nproc_per_node N {program} [--config FILE.yaml] [options]",
        description=_DESCRIPTION,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    general = parser.add_argument_group("General")
    general.add_argument("-h", "--help", action="store_true", help="Print this text and exit.")
    general.add_argument("--config", metavar="FILE", help="YAML file of options.")
    groups = {section: parser.add_argument_group(title) for section, title in section_titles().items()}
    for option in options().values():
        _add_option(groups[option.section], option)
    return parser.format_help()


def _add_option(group: Any, option: Option) -> None:
    names = {f"--{name}": spelling.flag_value for name, spelling in spellings().items() if spelling.option is option}
    text = option.text.replace("%", "%%")
    if option.value_type is bool:
        (default_name,) = (name for name, value in names.items() if value is option.default)
        group.add_argument(*names, action="store_true", help=f"{text} [flag; default: {default_name}]")
        return
    others = list(names)[1:]
    value = option.default
    if isinstance(value, tuple):
        value = " ".join(str(getattr(entry, "name", entry)) for entry in value)
    default = f"{value:g}" if isinstance(value, float) else "auto" if value is None and option.allows_auto else value
    facts = [option.expectation, *([f"default: {default}"] if default is not None else [])]
    facts += [f"also: {', '.join(others)}"] if others else []
    metavar = "|".join(option.choices) or _METAVARS.get(option.value_type, "TEXT")
    metavar = f"{option.pair_form},..." if option.value_type is tuple else metavar
    number = "+" if option.is_list else "?" if option.bare_value is not None else None
    group.add_argument(f"--{option.name}", nargs=number, metavar=metavar, help=f"{text} [{'; '.join(facts)}]")
