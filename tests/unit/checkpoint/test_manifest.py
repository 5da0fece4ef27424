"""What checkpoint.json says comes back as it was; what is not a manifest of this format is refused with the reason."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from mobius.checkpoint.manifest import FORMAT, Manifest, OtherFile, file_record
from mobius.checkpoint.tensor_files import FileRecord
from mobius.errors import CheckpointError

MANIFEST = Manifest(
    step=8,
    save_number=3,
    num_parameters=10,
    dtype="bfloat16",
    has_optimizer=True,
    files=(FileRecord("model.safetensors", 100, {"a": 1, "b": 2**32 - 1}),),
    others=(OtherFile("chat/template.jinja", 4, 5),),
    training={"num_updates": 8, "loss_scale": 65536.0, "nested": {"list": [1, 2.5, None, "ü"]}},
    data={"fingerprint": "00ff"},
    options={"learning_rate": 1e-5, "save_dir": None},
    versions={"torch": "2.13.0"},
    metric=1.25,
)


def sealed(**changes: Any) -> dict[str, Any]:
    """The manifest as JSON with other values and the checksum that belongs to them."""
    values = {**json.loads(MANIFEST.to_json()), **changes}
    del values["checksum"]
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return {**values, "checksum": zlib.crc32(text.encode())}


def test_a_manifest_comes_back_as_it_was() -> None:
    assert Manifest.from_json(json.loads(MANIFEST.to_json())) == MANIFEST
    assert Manifest.from_json(sealed()) == MANIFEST


@pytest.mark.parametrize(("found", "age"), [(FORMAT + 1, "a newer"), (FORMAT - 1, "an older")])
def test_another_format_is_refused_with_both_numbers(found: int, age: str) -> None:
    with pytest.raises(CheckpointError, match=f"format {found}, .* reads format {FORMAT}: it is of {age} version"):
        Manifest.from_json(sealed(format=found, something="else"))


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize(
    "values",
    [{}, {"format": "1"}, {"format": True, "checksum": 0}, {"model_type": "llama"}, without("checksum")(sealed())],
)
def test_a_file_of_another_program_is_told_as_such(values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="it is not of Mobius"):
        Manifest.from_json(values)


def test_a_value_that_was_changed_is_found() -> None:
    with pytest.raises(CheckpointError, match="changed or damaged"):
        Manifest.from_json({**sealed(), "step": 9})


@pytest.mark.parametrize(
    "changes",
    [
        *({"step": -1}, {"step": True}, {"save_number": 1.5}, {"dtype": "int8"}, {"dtype": []}, {"has_optimizer": 1}),
        *({"files": {}}, {"training": []}, {"metric": "low"}, {"more": 1}, {"files": [5]}),
        *({"others": [{"file_name": "a"}]}, {"others": [{"file_name": "a", "num_bytes": 1, "checksum": 2**32}]}),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    (name, value), *_ = changes.items()

    with pytest.raises(CheckpointError, match=rf"{name}|{re.escape(str(value))}|wrong entry of a file"):
        Manifest.from_json(sealed(**changes))


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "a/../../b", "", ".", "a//b", "./a", "a\\b", "a\0b", 7])
def test_a_file_outside_of_the_folder_is_refused(name: object) -> None:
    with pytest.raises(CheckpointError, match="wrong entry of a file"):
        file_record({"file_name": name, "num_bytes": 1, "checksums": {"a": 1}})


@pytest.mark.parametrize("sums", [{}, {"a": -1}, {"a": 2**32}, {"a": "1"}, {"a": True}, [1]])
def test_sums_that_cannot_be_are_refused(sums: object) -> None:
    with pytest.raises(CheckpointError, match="wrong entry of a file"):
        file_record({"file_name": "a", "num_bytes": 1, "checksums": sums})


@pytest.mark.parametrize("second", [("model.safetensors", "c"), ("other.safetensors", "a")])
def test_a_file_or_a_tensor_that_is_there_twice_is_refused(second: tuple[str, str]) -> None:
    entries = [("model.safetensors", "a"), second]
    files = [{"file_name": name, "num_bytes": 1, "checksums": {tensor: 1}} for name, tensor in entries]

    with pytest.raises(CheckpointError, match=r"a (file|tensor) twice"):
        Manifest.from_json(sealed(files=files))
