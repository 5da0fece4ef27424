"""Broken inputs end in a plan, a run or one message; `scripts/fuzz` plays ten thousand of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NoReturn

import fuzz
import pytest
from harness.fuzzed_parts import KINDS, fuzzed_input


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.extended)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_input_ends_in_a_plan_a_run_or_one_message(kind: str, number: int, place: Path) -> None:
    ((made, outcome),) = fuzz.fuzz([(kind, number)], place)

    assert outcome.result in fuzz.GOOD, outcome
    other = fuzzed_input(kind, number + 1, place / "base")
    assert vars(made) != vars(other) | {"number": number}, "they are different inputs"


def test_an_error_of_our_own_is_seen(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise KeyError("ours")

    monkeypatch.setattr(fuzz, "parse_args", fail)

    ((_, outcome),) = fuzz.fuzz([("options", 0)], place)

    assert outcome.result == "traceback"
    assert "KeyError: 'ours'" in outcome.text


def test_silence_is_seen(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(fuzz, "parse_args", lambda *_, **__: time.sleep(60))

    ((_, outcome),) = fuzz.fuzz([("options", 0)], place)

    assert outcome.result == "silent"
