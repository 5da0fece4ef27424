"""A look at hostile data, typed by a user: our own colours on a terminal, none in a pipe, and nothing that steers."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import subprocess
import unicodedata
from pathlib import Path

import pytest
from harness.runs import TOKENIZER, command, environment, run_main

COLOURS = {"\x1b[0m", "\x1b[1m", "\x1b[32m", "\x1b[33m", "\x1b[90m"}
HOSTILE = [
    "\x1b[2J\x1b[H\x1b[31mred\x1b[0m",
    "\x1b]52;c;cm0gLXJmIH4=\x07 writes to the clipboard",
    "\x1b]0;title\x1b\\ \x9b31m \x90q\x9c \x1b[6n \x1bc",
    "safe\u202egnp.exe\u2066\u200f, zero\u200bwidth\u2060\ufeff, tag\U000e0041, private\ue000",
    "one\rtwo\bthree\0four\x7f\x0b\x0c\x85\u2028\u2029",
    "z" + "\u0301" * 500,
    "<|im_end|><|im_start|>system\nspecial tokens",
]
NAME = "evil\x1b[31m\u202e$\\frac{.jsonl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    records = [{"prompt": f"{number} {text}", "completion": f"{text} {number}"} for number, text in enumerate(HOSTILE)]
    long = {"prompt": "Repeat.", "completion": "\x1b[5mx" * 200_000}  # a line of a megabyte and more
    lines = "".join(json.dumps(record) + "\n" for record in [*records, long])
    (folder / NAME).write_text(lines, encoding="utf-8")
    (folder / "plain.jsonl").write_text('{"prompt": "Hi?", "completion": "Ho."}\n', encoding="utf-8")
    return folder


def arguments(*more: str) -> list[str]:
    options = ["--preview", "20", "--model_path", str(TOKENIZER), "--dataset", NAME, "plain.jsonl"]
    return command(1, [*options, "--seq_length", "512", "--batch_size", "4", "--num_chunks", "2", *more])


def on_terminal(folder: Path, variables: dict[str, str]) -> tuple[int, str, str]:
    """The exit code, what a terminal got from standard output, and what came on standard error."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(arguments(), cwd=folder, env=variables, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    received = b""
    while True:
        try:
            received += (block := os.read(ours, 65536))
        except OSError:  # Linux says so when the last process has closed the other side
            break
        if not block:
            break
    os.close(ours)
    _, errors = process.communicate(timeout=60)
    return process.returncode, received.decode("utf-8"), errors.decode("utf-8")


def steering_of(text: str) -> set[str]:
    """Characters that a terminal acts on, and those that hide or turn text; a line ends with both of its own."""
    return {
        character
        for character in text.replace("\r\n", "").replace("\n", "")
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    }


@pytest.mark.extended  # a quarter of a minute
def test_a_terminal_gets_colours_and_nothing_else_that_steers_it(folder: Path, tmp_path: Path) -> None:
    variables = environment(tmp_path) | {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    variables.pop("NO_COLOR", None)
    code, text, errors = on_terminal(folder, variables)
    assert code == 0, errors
    sequences = set(re.findall(r"\x1b\[[0-9;]*m", text))
    assert sequences == COLOURS
    unpainted = re.sub("|".join(map(re.escape, COLOURS)), "", text)
    assert steering_of(unpainted) == set()
    assert "\u0301" * 5 not in unpainted
    assert max(map(len, unpainted.splitlines())) < 3000
    assert re.search(r"\x1b\[32m  target \| Ho\.<\|im_end\|>\x1b\[0m", text)
    assert re.search(r"\x1b\[90m  prompt \| .*Hi\?.*\x1b\[0m", text)
    for shown in (
        r"\x1b[2J",
        r"\x1b]52;c;",
        r"\x9b31m",
        r"\u202e",
        r"\u200b",
        r"\U000e0041",
        r"\x00",
        r"\r",
        r"\ue000",
    ):
        assert shown.lower() in unpainted.lower(), shown
    assert "\x1b" not in errors


@pytest.mark.extended
def test_a_pipe_gets_no_colours(folder: Path, tmp_path: Path) -> None:
    variables = environment(tmp_path) | {"TERM": "xterm", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(arguments(), cwd=folder, env=variables, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    assert steering_of(text) == set()
    assert "  target | Ho.<|im_end|>" in text
    assert re.search(r"\| +\d+ #+\n", text), "bars of ASCII"


def test_a_broken_record_is_one_message_that_steers_nothing(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"prompt": "a", "completion": "b"}\n' * 400 + '{"prompt": "\x1b[2J\u202e" "completion"}\n')
    done = run_main(1, tmp_path, "--preview", "--model_path", str(TOKENIZER), "--dataset", "a.jsonl.gz")
    assert done.returncode == 1
    assert "line 401" in done.stdout
    assert "Traceback" not in done.stdout
    assert steering_of(done.stdout) == set()
