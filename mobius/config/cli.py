"""Builds one Config of defaults < YAML file < command line, and help pages of the table of options.

Both sources collect their problems, and one ConfigError has all of them. `--help` and docs/user/options.md
(`python -m mobius.config.cli > docs/user/options.md`) are made from the table.
"""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mobius.config.config import Config, DatasetEntry, config_from, options, section_titles, spellings
from mobius.config.options import Option, OptionValue
from mobius.config.sources import CommandLine, OptionSource, read_command_line, read_yaml
from mobius.config.validation import (
    MUTUALLY_EXCLUSIVE,
    exempt_file_options,
    find_ineffective_launch_options,
    find_problems,
    infer_eval_strategy,
)
from mobius.errors import ConfigError
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


def parse_args(
    argv: Sequence[str], *, num_ranks: int | None = None, num_nodes: int = 1, is_without_train_sh: bool = False
) -> Config:
    """Read `argv` (without the program's name) and the YAML file it names.

    `is_without_train_sh`: the ranks were started without train.sh, so that its options have no effect.

    Logs ignored options and automatic choices. Raises ConfigError with all problems of both sources and of their
    combination; with `num_ranks`, also problems that depend on it. `--help` prints on the first rank only and raises
    SystemExit, as argparse does.
    """
    command_line = read_command_line(argv)
    if command_line.wants_help:
        if Ranks.from_environment().is_first:
            sys.stdout.write(_help_parser().format_help())
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
    """Merge the command line over the file it names and the defaults; raises ConfigError like `parse_args`.

    Notices of both sources are added to those of the command line.
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
        # Without training data, rows are planned for the evaluated data.
        config = replace(config, data=replace(config.data, dataset=config.data.eval_dataset))
    # A broken value in the file does not matter to the rules where the command line replaces it.
    invalid_options = (file.invalid_options - set(command_line.values)) | command_line.invalid_options
    if config.saving.resume_from_checkpoint is not None:  # the checkpoint's options are not known yet
        invalid_options |= options().keys() - values.keys()
    # A dry run is one process that plans for several, and a preview trains nothing.
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
    """Number of ranks of a pipeline, if the run's is known, and of replicas; `Ranks.cut` refuses fractions."""
    if num_ranks is None:
        return None, 1
    num_pipeline_ranks = config.launch.pipeline_ranks or num_ranks // num_nodes
    return num_pipeline_ranks, max(1, num_ranks // num_pipeline_ranks)


def given_options(argv: Sequence[str]) -> frozenset[str]:
    """Names of the options that `argv` or its YAML file sets, including those set to the default."""
    command_line = read_command_line(argv)
    return frozenset(_merged(_file_of(command_line).values, command_line.values))


def _merged(file: Mapping[str, OptionValue], typed: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Values of both sources; a typed option also replaces its alternative in the file."""
    chosen = [name for name, value in typed.items() if value != options()[name].default]
    replaced = {other for pair in MUTUALLY_EXCLUSIVE for name in chosen for other in pair if name in pair}
    return {**{name: value for name, value in file.items() if name not in replaced}, **typed}


def _file_of(command_line: CommandLine) -> OptionSource:
    return read_yaml(command_line.config_path) if command_line.config_path is not None else OptionSource()


def _help_parser() -> argparse.ArgumentParser:
    """A parser whose help shows the table."""
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
        _add_to_help(groups[option.section], option)
    return parser


def _add_to_help(group: Any, option: Option) -> None:
    names, text = [f"--{name}" for name in _names(option)], option.text.replace("%", "%%")
    if option.value_type is bool:
        group.add_argument(*names, action="store_true", help=f"{text} [flag; default: {_default(option)}]")
        return
    facts = [option.expectation, *([f"default: {default}"] if (default := _default(option)) else [])]
    facts += [f"also: {', '.join(names[1:])}"] if names[1:] else []
    metavar = "|".join(option.choices) or _METAVARS.get(option.value_type, "TEXT")
    metavar = f"{option.rules.pair[0]},..." if option.value_type is tuple else metavar
    number = "+" if option.is_list else "?" if option.rules.bare is not None else None
    group.add_argument(names[0], nargs=number, metavar=metavar, help=f"{text} [{'; '.join(facts)}]")


def _names(option: Option) -> list[str]:
    return [name for name, spelling in spellings().items() if spelling.option is option]


def _default(option: Option) -> str:
    """The default as it would be typed; empty if there is none."""
    value = option.default
    if isinstance(value, bool):
        return next(f"--{name}" for name in _names(option) if spellings()[name].flag_value is value)
    if isinstance(value, tuple):
        return " ".join(entry.name for entry in value)
    if value is None:
        return "auto" if option.allows_auto else ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def options_page() -> str:
    """Markdown of docs/user/options.md: a table for each section."""
    lines = [
        "# Options",
        "",
        "Generated from the code by `python -m mobius.config.cli > docs/user/options.md`; change the texts in",
        "`mobius/config/config.py`.",
        "",
        "Each option may be typed (`--batch_size 64`) or be a key of a YAML file (`batch_size: 64`, `--config FILE`);",
        "the command line overrides the file, the file the defaults. A typed option may be shortened while it stays",
        "unambiguous. All problems of a command are reported together.",
    ]
    for section, title in section_titles().items():
        lines += ["", f"## {title}", "", "| option | value | default | meaning |", "|---|---|---|---|"]
        lines += [_page_row(option) for option in options().values() if option.section == section]
    return "\n".join(lines) + "\n"


def _page_row(option: Option) -> str:
    names = ", ".join(f"`--{name}`" for name in _names(option))
    value = "flag" if option.value_type is bool else option.expectation
    default = f"`{_default(option)}`" if _default(option) else ""
    text = option.text.replace("|", "\\|").replace("](", "]\\(")
    return f"| {names} | {value} | {default} | {text} |"


if __name__ == "__main__":
    sys.stdout.write(options_page())
