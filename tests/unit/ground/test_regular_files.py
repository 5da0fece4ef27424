"""Files of others: regular ones only, and what is wrong with a text is told by the file's name."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest

from mobius.config.options import POSITIVE
from mobius.errors import CheckpointError, DataError
from mobius.files.regular_files import open_regular, parse_json, read_bytes, read_json, typed_object


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


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b'{"a": "\xff"}', "no UTF-8 text: byte 7"),
        (b"{", "no JSON"),
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


Colour = StrEnum("Colour", ["RED", "BLUE"])


@dataclass(frozen=True)
class Wheel:
    size: Annotated[float, POSITIVE]
    colour: Colour | None = None


@dataclass(frozen=True)
class Car:
    wheels: tuple[Wheel, ...]
    seats: frozenset[int]
    sums: Mapping[str, int]
    is_new: bool
    notes: Mapping[str, Any]


CAR = Car((Wheel(0.5, Colour.RED), Wheel(3)), frozenset({0, 2}), {"a": 1}, True, {"any": [None, {"x": -1.5}]})


def test_a_dataclass_comes_back_from_json_by_the_types_of_its_fields() -> None:
    values = json.loads(json.dumps({**asdict(CAR), "seats": [2, 0]}))
    assert typed_object(Car, values) == CAR


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"wheels": {}}, "has {} for `wheels`, not a list"),
        ({"wheels": [7]}, "has 7 for `wheels[0]`, not an object"),
        ({"wheels": [{"size": 1.0}]}, "lacks colour in `wheels[0]`"),
        ({"wheels": [{"size": 1, "colour": "green"}]}, "has 'green' for `wheels[0].colour`, not one of red, blue"),
        ({"wheels": [{"size": 0, "colour": None}]}, "has 0 for `wheels[0].size`, which must be above 0"),
        ({"wheels": [{"size": float("nan"), "colour": None}]}, "has nan for `wheels[0].size`, which must be above 0"),
        ({"wheels": [{"size": True, "colour": None}]}, "has True for `wheels[0].size`, not a number"),
        ({"seats": [1, -1]}, "has -1 for `seats[1]`, not a whole number from 0 on"),
        ({"seats": [10**400]}, "for `seats[0]`, not a whole number"),
        ({"seats": None}, "has None for `seats`, not a list"),
        ({"sums": {"a": "1"}}, "has '1' for `sums.a`, not a whole number from 0 on"),
        ({"sums": []}, "has [] for `sums`, not an object"),
        ({"is_new": 1}, "has 1 for `is_new`, not true or false"),
        ({"more": 1}, "has more"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_place_with_what_is_allowed(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as raised:
        typed_object(Car, {**json.loads(json.dumps({**asdict(CAR), "seats": [2, 0]})), **changes})
    assert len(str(raised.value)) < 200
