"""The program is one, by whatever name it is started: main.py, `python -m mobius`, the installed `mobius`."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mobius.process.requirements import PACKAGES

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_TORCH = "import runpy, sys; sys.modules['torch'] = sys.modules['transformers'] = None; "


def said(words: list[str], folder: Path, **variables: str) -> str:
    run = subprocess.run(words, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_help_is_the_same_by_every_name_and_needs_no_torch(tmp_path: Path) -> None:
    program = WITHOUT_TORCH + "sys.argv = [{0!r}, '--help']; runpy.{1}({0!r}, run_name='__main__')"

    def help_of(name: str, function: str) -> str:
        return said([sys.executable, "-c", program.format(name, function)], tmp_path, PYTHONPATH=str(ROOT))

    by_file, by_name = help_of(str(ROOT / "main.py"), "run_path"), help_of("mobius", "run_module")
    for text, program in ((by_file, "main.py"), (by_name, "-m mobius")):
        first, second, _ = text.split("\n", 2)
        assert first == "usage: bash train.sh [FILE.yaml] [options]"
        assert second.strip() == f"torchrun --nproc_per_node N {program} [--config FILE.yaml] [options]"
    assert by_file.split("\n", 2)[2] == by_name.split("\n", 2)[2]


@pytest.mark.parametrize("command", [["-m", "mobius"], ["main.py"]])
def test_a_package_that_is_missing_is_one_message_with_the_command(command: list[str]) -> None:
    """`-S` leaves the folder of installed packages out: a Python in which nothing is installed."""
    run = subprocess.run([sys.executable, "-S", *command, "--dry_run"], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert "lacks the packages torch, transformers, " in line
    assert "bash train.sh" in line
    assert "pip install -r requirements.txt" in line


def test_a_package_that_only_a_run_imports_is_missed_with_the_same_message(tmp_path: Path) -> None:
    program = (
        WITHOUT_TORCH + "sys.argv = ['main.py', '--device', 'cpu']; runpy.run_path('main.py', run_name='__main__')"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert "Traceback" not in run.stdout + run.stderr
    assert "lacks the packages " in run.stdout + run.stderr
    assert "train.sh" in run.stdout + run.stderr


def test_the_packages_are_those_that_the_project_needs() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)["project"]["dependencies"]
    assert sorted(PACKAGES.values()) == sorted(re.match(r"[a-z]+", line)[0] for line in needed)  # type: ignore[index]


@pytest.mark.extended
def test_the_package_installs_the_command(tmp_path: Path) -> None:
    """Into a folder of its own, in which nothing but Mobius is."""
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("mobius", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    target = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    install += ["--no-compile"]
    said([*install, "--target", str(target), str(source)], tmp_path)

    text = said([str(target / "bin" / "mobius"), "--help"], target, PYTHONPATH=str(target))

    assert "-m mobius [--config FILE.yaml]" in text
    assert "--num_stages" in text
    assert list((target / "mobius" / "engine").glob("*.c")), "the kernel's source is compiled where it runs"
