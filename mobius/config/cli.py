"""Builds a Config from defaults < YAML file < command line, and help pages from the table of options.

Both sources collect their problems, and one ConfigError reports all of them. `--help` and docs/user/options.md
(`python -m mobius.config.cli > docs/user/options.md`) are made from the table.
"""

import logging
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from mobius.config.config import COMMAND_DEFAULTS, Config, config_from, options, sections, spellings
from mobius.config.gpu_count import CPU_RANKS, count_gpus
from mobius.config.options import Option, OptionValue
from mobius.config.recipes.recipe import Launch
from mobius.config.sources import CommandLine, OptionSource, read_command_line, read_yaml
from mobius.config.validation import (
    MUTUALLY_EXCLUSIVE,
    find_ineffective_launch_options,
    find_problems,
    infer_eval_strategy,
    leave_out_ineffective_options,
)
from mobius.errors import ConfigError, Problem, listed
from mobius.process.log import RANK_ZERO_ONLY
from mobius.process.ranks import Ranks, device_list, program_words, visible_devices

logger = logging.getLogger(__name__)

_SHORT_MODEL_NAMES: Final[Mapping[str, str]] = {
    "llama-2-7b-hf": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b-hf": "meta-llama/Llama-2-13b-hf",
}
_DESCRIPTION: Final = (
    "Fine-tune all parameters of a language model on one node with a few memory-limited GPUs. An option may also be "
    "a key of a YAML file (--config); the command line overrides the file, and the file overrides the defaults. "
    "Options may be abbreviated if they stay unambiguous."
)
_INDENT: Final = " " * 6
_COLUMNS: Final = "| option | value | default | in commands | meaning |"


def parse_args(
    argv: Sequence[str],
    *,
    num_ranks: int | None = None,
    num_nodes: int = 1,
    is_command: bool = False,
    is_without_train_sh: bool = False,
) -> Config:
    """Read `argv` (without the program's name) and the YAML file it names.

    `is_command`: `argv` belongs to a subcommand of `mobius` or to Python; COMMAND_DEFAULTS apply unless there is a file
    in Mobius' format. `is_without_train_sh`: the ranks were started without train.sh, so its options have no effect.

    Logs ignored options and automatic choices. Raises ConfigError with all problems of both sources and of their
    combination; with `num_ranks`, also problems that depend on it. `--help` prints on the first rank only and raises
    SystemExit.
    """
    command_line = read_command_line(argv)
    if command_line.wants_help:
        if Ranks.from_environment().is_first:
            sys.stdout.write(help_text())
        raise SystemExit(0)
    file = _file_of(command_line, num_ranks=num_ranks, num_nodes=num_nodes)
    typed = command_line.values.keys()
    values = _merged(file.values, command_line.values)
    name = str(values.get("model_path"))
    if name.lower() in _SHORT_MODEL_NAMES and not Path(name).is_dir():
        values["model_path"] = _SHORT_MODEL_NAMES[name.lower()]
    has_command_defaults = file.said is not None or (is_command and command_line.config_path is None)
    config = config_from({**(COMMAND_DEFAULTS if has_command_defaults else {}), **values})
    notices = [*command_line.notices, *file.notices]
    # The rules ignore a broken value in the file if the command line replaces it.
    invalid_options = (file.invalid_options - typed) | command_line.invalid_options
    if config.saving.resume_from_checkpoint is None:
        config, notice = infer_eval_strategy(config, values)
        notices += [] if notice is None else [notice]
    else:  # the checkpoint's options apply, and they are not known yet
        invalid_options |= options().keys() - values.keys()
    if file.said is not None:
        config, fact = leave_out_ineffective_options(config, typed, file.said)
        file.facts += [] if fact is None else [fact]
    if not config.evaluation.do_train and "dataset" not in values and config.data.eval_dataset is not None:
        # Without training data, rows are planned for the evaluated data.
        config = replace(config, data=replace(config.data, dataset=config.data.eval_dataset))
    # A dry run is one process that plans for several, and a preview trains nothing.
    is_run = not config.planning.dry_run and config.data.preview is None
    num_pipeline_ranks, num_replicas = _pipelines(config, num_ranks, num_nodes) if is_run else (None, 1)
    problems = file.problems + command_line.problems
    conflicts = find_problems(
        config,
        num_ranks=num_pipeline_ranks,
        num_replicas=num_replicas,
        invalid_options=invalid_options,
        # If a typed option switches a mode off, the file's options for this mode are no mistake.
        is_exempt=lambda name, mode_options: name not in typed and not typed.isdisjoint(mode_options),
    )
    problems += [_with_giver(problem, file, typed) for problem in conflicts]
    if is_without_train_sh and is_run:
        found, ignored = find_ineffective_launch_options(
            config, typed, num_ranks=num_ranks or 1, num_nodes=num_nodes, devices=visible_devices()
        )
        problems += found
        notices += ignored
    if problems:
        raise ConfigError(*problems, hint="Run with `--help` to see all options.")
    for fact in file.facts:
        logger.info("%s", fact, extra=RANK_ZERO_ONLY)
    for notice in notices:
        logger.warning("%s", notice, extra=RANK_ZERO_ONLY)
    return config


def _pipelines(config: Config, num_ranks: int | None, num_nodes: int) -> tuple[int | None, int]:
    """Numbers of ranks per pipeline (None if unknown) and of replicas; `split_into_pipelines` refuses a remainder."""
    if num_ranks is None:
        return None, 1
    num_pipeline_ranks = config.launch.pipeline_ranks or num_ranks // num_nodes
    return num_pipeline_ranks, max(1, num_ranks // num_pipeline_ranks)


def _with_giver(problem: str, file: OptionSource, typed: Collection[str]) -> str:
    """Return the problem, followed by its options that only the file sets: the user may not know of them."""
    names = dict.fromkeys(re.findall(r"`--(\w+)`", problem))
    silent = [f"--{name}" for name in names if name in file.values and name not in typed]
    if not silent:
        return problem
    advice = problem.advice if isinstance(problem, Problem) else ()
    return Problem(f"{problem} ({file.place.removesuffix(': ')} sets {listed(silent)})", advice)


def given_options(argv: Sequence[str]) -> frozenset[str]:
    """Names of the options that `argv` or its YAML file sets, including options set to their default."""
    command_line = read_command_line(argv)
    return frozenset(_merged(_file_of(command_line).values, command_line.values))


def _merged(file: Mapping[str, OptionValue], typed: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Values of both sources; a typed option also replaces its alternative in the file."""
    chosen = [name for name, value in typed.items() if value != options()[name].default]
    replaced = {other for pair in MUTUALLY_EXCLUSIVE for name in chosen for other in pair if name in pair}
    return {**{name: value for name, value in file.items() if name not in replaced}, **typed}


def _file_of(command_line: CommandLine, *, num_ranks: int | None = None, num_nodes: int = 1) -> OptionSource:
    if command_line.config_path is None:
        return OptionSource()
    typed = command_line.values
    if num_ranks is None or (num_ranks == 1 and not typed.keys().isdisjoint(("dry_run", "preview"))):
        num_ranks = count_planned_ranks(typed)  # this single process stands for all processes of a run
    chosen = typed.get("pipeline_ranks")
    of_pipeline = chosen if isinstance(chosen, int) and chosen > 0 else num_ranks // num_nodes
    return read_yaml(command_line.config_path, Launch(num_ranks, max(1, of_pipeline), typed))


def count_planned_ranks(values: Mapping[str, object]) -> int:
    """Number of processes that a run with these options would have on a node, or that a dry run plans for."""
    numbers = (value for name in ("num_ranks", "nproc_per_node") if isinstance(value := values.get(name), int))
    return next(numbers, None) or len(device_list(visible_devices())) or count_gpus() or CPU_RANKS


def _facts_of(option: Option) -> tuple[list[str], str, str, str]:
    """Names with dashes, allowed values, the default as typed, and the default of commands if it differs.

    Without a default, its text is empty.
    """
    names = {f"--{name}": spelling for name, spelling in spellings().items() if spelling.option is option}
    value = "flag" if option.value_type is bool else option.expectation
    of_commands = _typed(option, COMMAND_DEFAULTS[option.name]) if option.name in COMMAND_DEFAULTS else ""
    return list(names), value, _typed(option, option.default), of_commands


def _typed(option: Option, value: OptionValue) -> str:
    if isinstance(value, bool):
        own = (name for name, each in spellings().items() if each.option is option and each.flag_value is value)
        return f"--{next(own)}"
    if isinstance(value, tuple):
        return " ".join(entry.name for entry in value)
    if value is None:
        return "auto" if option.allows_auto else ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def help_text(command: str | None = None) -> str:
    """Return the text of `--help`, as wide as the terminal; with `command`, it begins with that command's usage."""
    program = "main.py" if Path(sys.argv[0]).name == "main.py" else "-m mobius"
    width = shutil.get_terminal_size().columns - 2
    usage = [
        "usage: bash train.sh [FILE.yaml] [options]",
        f"       torchrun --nproc_per_node N {program} [--config FILE.yaml] [options]",
        "       mobius train|plan|preview|predict|score|doctor|board|chat|export|help [FILE|FOLDER] [options]",
    ]
    lines = [
        *(usage if command is None else [f"usage: {shlex.join(program_words())} {command} [FILE.yaml] [options]"]),
        "",
        *textwrap.wrap(_DESCRIPTION, width),
        "",
        "  --config FILE  YAML file of options",
        "  -h, --help     this text",
    ]
    for title, own in sections().items():
        lines += ["", f"{title}:"]
        for option in own:
            names, value, default, of_commands = _facts_of(option)
            facts = f"{value}; default: {default}" if default else value
            facts += f", in commands without a file: {of_commands}" if of_commands else ""
            lines.append(f"  {', '.join(names)}  [{facts}]")
            lines += textwrap.wrap(option.text, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join(lines) + "\n"


def options_page() -> str:
    """Markdown of docs/user/options.md: a table for each section."""
    lines = [
        "# Options",
        "",
        "Generated from the code by `python -m mobius.config.cli > docs/user/options.md`; change the texts in",
        "`mobius/config/config.py`.",
        "",
        "Each option may be typed (`--batch_size 64`) or be a key of a YAML file (`batch_size: 64`, `--config FILE`);",
        "the command line overrides the file, and the file overrides the defaults. A typed option may be abbreviated",
        "if it stays unambiguous. All problems of a command are reported together.",
        "",
        "Column `default` is for main.py, train.sh, `python -m mobius` with options, and files with these keys. Column",
        "`in commands` is for `mobius train`, `plan`, `preview` and `predict` without a file, for files of",
        "[other trainers](other_trainers.md) and for [Python](python.md). A resumed run keeps its values.",
    ]
    for title, own in sections().items():
        lines += ["", f"## {title}", "", _COLUMNS, "|---|---|---|---|---|"]
        for option in own:
            names, value, *defaults = _facts_of(option)
            text = option.text.replace("|", "\\|").replace("](", "]\\(")
            shown = " | ".join(f"`{default}`" if default else "" for default in defaults)
            lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {value} | {shown} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(options_page())
