"""The program is one, by whatever name it is started: main.py, `python -m mobius`, the installed `mobius`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert by_file.startswith("usage: torchrun --nproc_per_node N main.py [--config FILE.yaml] [options]\n")
    assert by_name.startswith("usage: torchrun --nproc_per_node N -m mobius [--config FILE.yaml] [options]\n")
    assert by_file.partition("\n")[2] == by_name.partition("\n")[2]


def test_the_package_installs_the_command(tmp_path: Path) -> None:
    """Into a folder of its own, in which nothing but Mobius is."""
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("mobius", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    target = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    said([*install, "--target", str(target), str(source)], tmp_path)

    text = said([str(target / "bin" / "mobius"), "--help"], target, PYTHONPATH=str(target))

    assert "-m mobius [--config FILE.yaml]" in text
    assert "--num_stages" in text
    assert list((target / "mobius" / "optim").glob("*.c")), "the kernel's source is compiled where it runs"
