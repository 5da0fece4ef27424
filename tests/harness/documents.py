"""The commands in README and docs: where each stands, what it needs, how it runs, and how it is checked instead.

A block of commands that needs what a machine without GPUs lacks has a comment above it, `<!-- needs: GPUs -->`. Its
commands are only checked: their files are there, and they take the options that are typed. So are commands within text.
A command after `    $ ` is run and must print the lines shown under it; `...` stands for other lines, or for the part
of a line that differs from run to run, such as seconds.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.forked import Ranks

from mobius.commands import COMMANDS
from mobius.config.cli import parse_args
from mobius.config.sources import combinations, read_command_line
from mobius.doctor.command import parser as doctor_parser
from mobius.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    *(ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "tests/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
NOT_RUN = {"bash scripts/test": "runs these commands itself", "scripts/run_docs": "the same"}
HANG_SECONDS = 1200.0

_COMMAND = re.compile(r"(\w+=(\"[^\"]*\"|\S+) )*(python|bash|torchrun|docker|pytest|mobius) ")
_NEEDS = re.compile(r"<!-- needs: (.*) -->")
_EXIT_CODE = re.compile(r"<!-- exit code: (\d+) -->")
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True)
class Command:
    """One command of a document."""

    text: str
    place: str
    """File and line."""
    needs: str = ""
    """What a machine without GPUs lacks for it; empty if it can run."""
    shown: tuple[str, ...] = ()
    """Lines that the document shows as its output."""
    exit_code: int = 0


def all_commands() -> list[Command]:
    """Every command of every document, each text once, with the output that all of them show.

    One that shows its output goes before one that does not.
    """
    found: dict[str, Command] = {}
    for path in DOCUMENTS:
        for command in commands_of(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))):
            words = " ".join(command.text.split())
            known = found.get(words)
            if known is None or (command.shown and not known.shown) or (known.needs and not command.needs):
                found[words] = command
            elif command.shown:
                found[words] = replace(known, shown=known.shown + command.shown)
    return list(found.values())


def commands_of(text: str, name: str) -> Iterator[Command]:
    """Commands of one document, in its order; those within text come last."""
    needs, exit_code, in_block, is_bash, begun = "", 0, False, False, ""
    prose: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        place = f"{name}:{number}"
        if line.startswith("```"):
            in_block, is_bash = not in_block, line == "```bash"
            if not in_block:
                needs, begun = "", ""
        elif in_block:
            begun += line.removesuffix("\\")
            if is_bash and not line.endswith("\\"):
                command = begun.partition("  #")[0].strip()
                if command and not command.startswith("#"):
                    yield Command(command, place, _why_not(command, needs))
                begun = ""
        elif match := _NEEDS.fullmatch(line):
            needs = match[1]
        elif match := _EXIT_CODE.fullmatch(line):
            exit_code = int(match[1])
        elif line.startswith("    $ "):
            command = line.removeprefix("    $ ")
            yield Command(command, place, _why_not(command, needs), tuple(_indented(lines[number:])), exit_code)
            needs, exit_code = "", 0
        elif not line.startswith("    "):
            prose.append(line)
    for match in _INLINE.finditer("\n".join(prose)):
        command = " ".join(match[1].split())
        if _COMMAND.match(command):
            yield Command(command, name, "nothing: a command within text is only checked")


def _why_not(command: str, needs: str) -> str:
    return needs or NOT_RUN.get(command, "")


def _indented(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("    ") or line.startswith("    $ "):
            return
        yield line.removeprefix("    ")


def make_scratch(place: Path) -> None:
    """Copy the project to `place` as a user has it, with this environment."""
    left_out = shutil.ignore_patterns(".git", ".venv", ".*_cache", "tests")
    shutil.copytree(ROOT, place, ignore=left_out)
    shutil.rmtree(place / "output", ignore_errors=True)
    (place / ".venv").symlink_to(ROOT / ".venv")


def environment(cache: Path) -> dict[str, str]:
    """Variables for a command: this Python, and a cache folder of its own."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "XDG_CACHE_HOME": str(cache),
        "OMP_NUM_THREADS": "1",
    }


def run_problems(command: Command, folder: Path, cache: Path) -> list[str]:
    """Run a command in the copy of the project; says what is wrong with its exit code or its output."""
    given = environment(cache)
    result = subprocess.run(
        command.text, shell=True, cwd=folder, env=given, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    return outcome_problems(command, result.returncode, result.stdout + result.stderr)


def outcome_problems(command: Command, exit_code: int, said: str) -> list[str]:
    """What is wrong with how a command ended and what it said."""
    problems = []
    if exit_code != command.exit_code or "Traceback" in said:
        problems.append(f"ends with {exit_code}, not {command.exit_code}: {said}")
    printed = said.splitlines()
    missing = [line for line in command.shown if line.strip() != "..." and not _is_among(line, printed)]
    if missing:
        problems.append("\n".join(["the document shows, but it does not print:", *missing, "it prints:", said]))
    return problems


def _is_among(line: str, printed: Sequence[str]) -> bool:
    pattern = re.compile(".*".join(map(re.escape, line.split("..."))))
    return any(pattern.fullmatch(each) for each in printed)


def check_problems(command: Command) -> list[str]:
    """What is wrong with a command that is not run: files that are not there, options that nothing takes."""
    text = command.text.partition(" --variant ...")[0]  # as often as wanted, each with options
    text = re.sub(r"\b(2?)N\b", lambda match: "8" if match[1] else "4", text)  # N GPUs
    return [problem for part in text.split(" && ") for problem in _problems(shlex.split(part))]


def _problems(words: Sequence[str]) -> list[str]:
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    match list(words):
        case [".venv/bin/python", *rest]:
            return _problems(["python", *rest])
        case ["python", "-m", "mobius", name, *options] if not name.startswith("-"):
            return _problems(["mobius", name, *options])
        case ["mobius", "chat" | "export" | "board" as name, *options]:
            return _parser_problems(COMMANDS[name].function.partition(":")[0], options)
        case ["mobius", "doctor", *options]:
            return _option_problems(["--dry_run", *doctor_parser().parse_known_args(options)[1]])
        case ["mobius", "plan", *options] if options:
            cases = [own for _, own in combinations(options)]
            return [problem for own in cases for problem in _problems(["bash", "train.sh", *own, "--dry_run"])]
        case ["mobius", "train" | "plan" | "preview" | "predict" | "score", *options]:
            return _problems(["bash", "train.sh", *options]) if options else []
        case ["python", "-m", "mobius", *options] | ["python", "main.py", *options] | ["mobius", *options]:
            return _option_problems(options)
        case ["python", "-m", "mobius.doctor.fits", *_]:
            return []
        case ["python", "-m", "mobius.config.cli" | "mobius.config.recipes", ">", file]:
            return _missing([file])
        case ["torchrun", *rest]:
            (place,) = (index for index, word in enumerate(rest) if word.removeprefix("./") == "main.py")
            return _option_problems(rest[place + 1 :])
        case ["bash", "train.sh", *options] if options[0].startswith("--"):
            return _option_problems(options)
        case ["bash", "train.sh", file, *options]:
            return _missing([file]) or _option_problems(["--config", str(ROOT / file), *options])
        case ["bash", script, *_]:
            return _missing([script]) or _failure(["bash", "-n", script])
        case ["sbatch", *rest]:
            (place,) = (index for index, word in enumerate(rest) if word.endswith(".sh"))
            return _missing([rest[place]]) or _problems(["bash", "train.sh", *rest[place + 1 :]])
        case ["docker", "run", *rest]:  # the image takes options, or a command
            options = rest[rest.index("mobius") + 1 :]
            return _option_problems(options) if options[0].startswith("-") else _problems(["mobius", *options])
        case ["docker", "build", *_]:
            return _missing(["Dockerfile"])
        case ["python", script, *options]:
            own, separator, for_mobius = _split(options)
            problems = _missing([script]) or _refusal(script, [*own, *([separator] if separator else [])])
            return problems + read_command_line(for_mobius).problems
        case ["pytest", *rest]:
            return _missing([word for word in rest if "/" in word])
        case ["tail", "-n", _, file, ">", _]:
            return _missing([file])
        case (
            ["pip" | "uv" | "pipx" | "mkdir" | "ruff" | "git" | "source", *_]
            | ["docker", "stop", *_]
            | ["scripts/run_docs"]
        ):
            return []
        case _:
            return [f"nobody knows how to check {' '.join(words)!r}"]


def _split(options: Sequence[str]) -> tuple[Sequence[str], str, Sequence[str]]:
    """Options before `--`, the `--` itself, and what follows it."""
    place = options.index("--") if "--" in options else len(options)
    return options[:place], "".join(options[place : place + 1]), options[place + 1 :]


def _option_problems(options: Sequence[str]) -> list[str]:
    try:
        parse_args([option for option in options if option != "--help"])
    except ConfigError as error:
        return [str(error)]
    return []


def _parser_problems(module: str, options: Sequence[str]) -> list[str]:
    """What the parser of a command says to its options, up to a redirection."""
    own = [*itertools.takewhile(lambda word: word not in ("<", ">"), options)]
    try:
        importlib.import_module(module).parser().parse_args(own)
    except ConfigError as error:
        return [str(error)] if own else []
    return []


def _missing(files: Sequence[str]) -> list[str]:
    return [f"there is no {file}" for file in files if not (ROOT / file).exists()]


def _refusal(script: str, options: Sequence[str]) -> list[str]:
    """What a script says to its options; forked, because most of them would import torch for seconds."""
    with tempfile.TemporaryDirectory() as folder:
        given = environment(Path(folder))
        run = Ranks(
            "harness.documents",
            "parse_and_end",
            [str(ROOT / script), *options],
            num_ranks=1,
            folder=Path(folder),
            environment=given,
        )
        return [] if run.wait() == 0 else [run.output()]


def parse_and_end(script: str, *options: str) -> None:
    """Be the script until it has read its options."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(*given: Any, **named: Any) -> None:
        parse(*given, **named)
        sys.exit(0)

    argparse.ArgumentParser.parse_args = parse_and_end  # type: ignore[assignment,method-assign]
    sys.argv = [script, *options]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def _failure(command: Sequence[str]) -> list[str]:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    return [] if result.returncode == 0 else [result.stdout + result.stderr]
