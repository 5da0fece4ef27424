"""Files of others: regular ones only, and what is wrong with a text is told by the file's name."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mobius.errors import CheckpointError, DataError
from mobius.regular_files import open_regular, parse_json, read_bytes, read_json, refuse_special_files


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path has 108 bytes at most
        bound.bind(path.name)
        os.chdir(before)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a socket": make_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_refused_by_its_kind_without_waiting(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    SPECIAL[kind](path)

    with pytest.raises(OSError, match=kind):
        open_regular(path)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{kind}"):
        read_json(path)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{kind}"):
        refuse_special_files([tmp_path, path])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b'{"a": "\xff"}', "no UTF-8 text: byte 7"),
        (b"{", "no JSON"),
        (b"[" * 100_000, "too deeply"),
        (b"9" * 5000, "no JSON"),
        (b'"\\ud800"', "no JSON"),
    ],
)
def test_a_broken_text_is_told_by_name_and_reason(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(content)

    with pytest.raises(DataError, match=rf"state\.json .*{reason}"):
        read_json(tmp_path / "state.json", DataError)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(101))

    assert len(read_bytes(tmp_path / "large", 101)) == 101
    with pytest.raises(OSError, match="100 bytes are allowed"):
        read_bytes(tmp_path / "large", 100)


def test_values_come_as_json_has_them() -> None:
    assert parse_json('{"a": [1, 2.5, null, "\\u00e9"]}', Path("x")) == {"a": [1, 2.5, None, "é"]}
