"""Subcommands reach the same program as main.py, and bare options do as ever."""

import gc
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from mobius import commands, program
from mobius.commands import COMMANDS, run_command
from mobius.config.cli import parse_args
from mobius.config.launch import launch_command, own_resources
from mobius.errors import ConfigError
from mobius.process.ranks import Ranks
from mobius.process.signal_handling import RunStatus

ROOT = Path(__file__).resolve().parents[3]


def test_each_command_has_a_function_and_is_in_the_help() -> None:
    help_text = importlib.import_module("mobius.config.cli").help_text()
    usage = next(line for line in help_text.splitlines() if "mobius train|" in line)
    for name, command in COMMANDS.items():
        module, _, function = command.function.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
        assert name in usage


def test_the_command_alone_lists_the_commands() -> None:
    run = subprocess.run([sys.executable, "-m", "mobius"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("mobius COMMAND [options]\n  train ")


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("plan", ["mine.yaml", "--card", "RTX4090"], ["--dry_run", "--config", "mine.yaml", "--card", "RTX4090"]),
        ("plan", ["--card", "RTX4090"], ["--dry_run", "--card", "RTX4090"]),
        ("preview", ["mine.yaml"], ["--preview", "--config", "mine.yaml"]),
    ],
)
def test_a_command_is_options_of_the_program(
    name: str, words: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mobius"])
    told = list[bool]()
    monkeypatch.setattr("mobius.program.run_program", lambda is_command: told.append(is_command))
    assert run_command(name, words) == 0
    assert sys.argv == ["mobius", *expected]
    assert told == [True]


@pytest.mark.parametrize("name", ["train", "plan", "preview", "predict", "score"])
def test_the_help_of_a_command_begins_with_its_own_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(name, ["mine.yaml", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: mobius {name} [FILE.yaml] [options]\n\n")
    assert "--batch_size" in text


def test_predict_starts_ranks_that_do_not_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    started: list[str] = []
    monkeypatch.setattr(commands.os, "execvp", lambda program, words: started.extend(words))
    commands.predict(["--eval_dataset", "a.jsonl", "--device", "cpu", "--master_port", "29533"])
    assert started[started.index("mobius.launcher") - 1 :][:2] == ["-m", "mobius.launcher"]
    assert started[started.index("mobius") - 1 :] == [
        *("-m", "mobius", "train", "--eval_dataset", "a.jsonl", "--device", "cpu", "--master_port", "29533"),
        *("--no_do_train", "--do_predict"),
    ]
    assert "MOBIUS_COMMAND=mobius train --eval_dataset a.jsonl --device cpu --master_port 29533" in started[1]


def test_ranks_of_a_command_have_its_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mobius.config.launch.rendezvous_port", lambda port, giver: port)
    monkeypatch.chdir(tmp_path)
    here = ["--device", "cpu"]
    (tmp_path / "a.yaml").write_text("device: cpu")
    command, _ = launch_command(here, None, own_resources())
    assert command[command.index("mobius") :] == ["mobius", "train", *here]
    command, _ = launch_command([*here, "--preview", "2"], None, own_resources())
    assert command[command.index("mobius") :] == ["mobius", "preview", *here, "--preview", "2"]
    command, _ = launch_command([str(tmp_path / "a.yaml")], tmp_path, own_resources())
    assert command[command.index("main.py") :] == ["main.py", "--config", str(tmp_path / "a.yaml")]


def test_an_unknown_command_is_answered_by_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("bord", []) == 2
    assert capsys.readouterr().err.startswith(
        "error: unknown command `bord`; did you mean `board`? The commands are:\n"
    )
    assert run_command("quickstart.yaml", []) == 2
    assert "`quickstart.yaml`. The commands are:\n  train    fine-tune on all GPUs" in capsys.readouterr().err
    assert run_command("help", []) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [*COMMANDS]


def test_a_wrong_option_of_a_command_is_one_message() -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        commands.train(["--batchsize", "3"])
    words = [sys.executable, "-m", "mobius", "train", "--batchsize", "3"]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert "did you mean `--batch_size`?" in run.stderr


@pytest.mark.parametrize(
    ("name", "words", "told"),
    [
        ("chat", "model --temprature 1", "error: unknown option `--temprature`; did you mean `--temperature`?\n"),
        ("chat", "--temprature 1", "error: unknown option `--temprature`; did you mean `--temperature`?\n"),
        ("export", "a b --onefile", "error: unknown option `--onefile`; did you mean `--one_file`?\n"),
        ("export", "a b --fast", "error: unknown option `--fast`; there are --help, --merge, --merge_into, --base,"),
        ("export", "a b c", "error: `c` belongs to no option\n"),
        ("export", "a b --dtype int4", "error: --dtype: invalid choice: 'int4'"),
        ("board", "--prt=3", "error: unknown option `--prt`; did you mean `--port`?\n"),
        ("doctor", "--foldr x", "error: unknown option `--foldr`; did you mean `--folder`?\n"),
        ("doctor", "--folder", "error: --folder: expected one argument\n"),
    ],
)
def test_a_mistyped_word_of_a_command_is_told_as_a_run_tells_it(
    name: str, words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(name, words.split()) == 2
    text = capsys.readouterr().err
    assert text.startswith(told)
    assert text.endswith(f"Run `mobius {name} --help` to see all options.\n")


def test_garbage_is_collected_once_all_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[bool]()
    monkeypatch.setattr("mobius.planner.forecast.run_dry", lambda *_, **__: seen.append(gc.isenabled()) or True)
    gc.disable()
    try:
        program._run_command(parse_args(["--dry_run"]), Ranks(0, 1, 0), (), RunStatus(), is_command=False)
    finally:
        gc.enable()
    assert seen == [True]
