"""Subcommands of `mobius`: each is a function of its arguments that returns the exit code.

`mobius --options` without a subcommand is the same as main.py: one rank, or as many as torchrun starts.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mobius.errors import ConfigError, MobiusError, excerpt
from mobius.process.log import printable, setup_logging
from mobius.process.ranks import is_started_by_torchrun, prepare_environment


@dataclass(frozen=True)
class Command:
    """A subcommand: the place of its function, and its line in `mobius help`."""

    function: str
    """`module:name`; imported when the command is called."""
    text: str


COMMANDS: Final[Mapping[str, Command]] = {
    "train": Command(
        "mobius.commands:train", "fine-tune on all GPUs of this machine: mobius train [FILE.yaml] [options]"
    ),
    "plan": Command(
        "mobius.commands:plan",
        "whether a run fits, and how fast it is; several values of an option make a table; needs no GPU",
    ),
    "preview": Command("mobius.commands:preview", "samples as a run would train on them"),
    "predict": Command(
        "mobius.commands:predict", "answers of a model to the prompts of --eval_dataset; trains nothing"
    ),
    "score": Command(
        "mobius.commands:score", "log-probabilities of a model for the samples of --eval_dataset; trains nothing"
    ),
    "doctor": Command("mobius.doctor.command:run", "what this machine is good for, and what hurts it"),
    "board": Command("mobius.board.command:run", "a page with all runs under a folder, live: mobius board [FOLDER]"),
    "chat": Command("mobius.chat.command:chat", "answers in the terminal with a result, a checkpoint or an adapter"),
    "export": Command(
        "mobius.checkpoint.export_command:export",
        "write a result as a checked model folder: with merged adapters, in one file, in another format, or as GGUF",
    ),
    "help": Command("mobius.commands:show_help", "this list; each command has --help"),
}


_RUNS: Final = frozenset({"train", "plan", "preview", "predict", "score"})
"""Commands that take the options of a run."""


def describe_commands() -> str:
    """Return one line for each subcommand."""
    return "\n".join(f"  {name:<8} {command.text}" for name, command in COMMANDS.items())


def show_help(_: Sequence[str]) -> None:
    """Print all subcommands."""
    sys.stdout.write(f"mobius COMMAND [options]\n{describe_commands()}\n")


def run_command(name: str, words: Sequence[str]) -> int:
    """Run a subcommand on `words`; an error that the user can fix becomes one message and an exit code."""
    if name not in COMMANDS:
        meant = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean `{meant[0]}`?" if meant else "."
        sys.stderr.write(f"error: unknown command `{excerpt(name)}`{hint} The commands are:\n{describe_commands()}\n")
        return ConfigError.exit_code
    module, _, function = COMMANDS[name].function.partition(":")
    if name in _RUNS and {"--help", "-h"} & {*words} and not is_started_by_torchrun():
        from mobius.config.cli import help_text

        sys.stdout.write(help_text(name))
        return 0
    try:
        return getattr(importlib.import_module(module), function)(words) or 0
    except MobiusError as error:
        sys.stderr.write(f"error: {printable(str(error), sys.stderr)}\n")  # the message may quote unprintable text
        return error.exit_code
    except KeyboardInterrupt:
        return 130  # the exit code of an interrupted run


def train(words: Sequence[str]) -> int | None:
    """Start one process for each GPU, as train.sh does; under torchrun, this process is one of them."""
    if is_started_by_torchrun():
        return _run_main(words)
    from mobius.config.launch import launch_command, own_resources

    logging.disable()  # the first rank logs notices about options
    try:
        command, notice = launch_command(words, None, own_resources())
    finally:
        logging.disable(logging.NOTSET)
    if notice:
        sys.stderr.write(f"{printable(notice, sys.stderr)}\n")
    sys.stderr.flush()
    return os.execvp(command[0], command)


def plan(words: Sequence[str]) -> int:
    """Dry run, or a table of dry runs for all combinations of options that have several values."""
    from mobius.config.sources import combinations

    cases = combinations(_with_file(words))
    if len(cases) == 1:
        return _run_main(["--dry_run", *_with_file(words)])
    prepare_environment()
    setup_logging(0)
    from mobius.planner.compare import compare

    return 0 if compare(cases) else 1


def preview(words: Sequence[str]) -> int:
    """Show samples of the data."""
    return _run_main(["--preview", *_with_file(words)])  # a typed number of samples comes later and overrides this


def predict(words: Sequence[str]) -> int | None:
    """Generate answers, without training."""
    return train([*_with_file(words), "--no_do_train", "--do_predict"])


def score(words: Sequence[str]) -> int | None:
    """Evaluate, and write the log-probability of each sample, without training."""
    return train([*_with_file(words), "--no_do_train", "--do_eval", "--save_scores"])


def _with_file(words: Sequence[str]) -> list[str]:
    """Return the words, with `--config` before the first word if this word is a file and no option."""
    return ["--config", *words] if words and not words[0].startswith("-") else [*words]


def _run_main(words: Sequence[str]) -> int:
    from mobius.program import run_program

    sys.argv = [sys.argv[0], *words]
    run_program(is_command=True)
    return 0
