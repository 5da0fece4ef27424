"""What comes from outside reaches terminals and shells as itself or as an escape, and never ends a program."""

import contextlib
import importlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mobius.config.launch import main as launch

HOSTILE = "\x1b[2J模\udcff"


class Terminal(io.TextIOWrapper):
    """A stream of bytes in ASCII, as strict as a process's own under the C locale can be."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii")

    def sent(self) -> bytes:
        self.flush()
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue()


def run(program: Callable[[Any], int], arguments: Sequence[str]) -> tuple[int, bytes, bytes]:
    """The exit code, and what went to standard output and standard error."""
    out, err = Terminal(), Terminal()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = program(list(arguments))
    return code, out.sent(), err.sent()


def test_the_launcher_shows_control_characters_and_sends_none(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text('"\\x1b[2J模": 1\n', encoding="utf-8")
    code, _, err = run(
        launch, [str(tmp_path), "run.yaml", "--dataset", "\udcff\x1b[0m", "--batch_size", "\x1b\x07\u202e"]
    )
    assert code == 2
    assert err.splitlines()[:2] == [
        str(tmp_path).encode() + rb"/run.yaml: unknown key `\x1b[2J\u6a21`",
        rb"`--batch_size \x1b\x07\u202e`: it must be a whole number at least 1",
    ]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("draw_step", ["a.png", "--model_path", HOSTILE]),
        ("show_schedule", ["--num_ranks", "2", "--output", f"{HOSTILE}/a.png"]),
    ],
)
def test_a_script_shows_control_characters_and_sends_none(script: str, arguments: list[str]) -> None:
    code, out, err = run(importlib.import_module(script).main, arguments)
    assert code == 2
    assert rb"\x1b[2J" in err
    assert b"\x1b" not in out + err
