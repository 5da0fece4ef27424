"""What checkpoint.json says comes back as it was; what is not a manifest of this format is refused with the reason."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from mobius.checkpoint.manifest import Manifest, OtherFile, file_record
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


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize(
    "values",
    [{}, {"format": "1"}, {"format": True, "checksum": 0}, {"model_type": "llama"}, without("checksum")(sealed())],
)
def test_a_file_of_another_program_is_told_as_such(values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="it is not from Mobius"):
        Manifest.from_json(values)


def file_named(name: object, **more: object) -> dict[str, object]:
    return {"files": [{"file_name": name, "num_bytes": 1, "checksums": {"a": 1}} | more]}


def other_named(name: str, **more: object) -> dict[str, object]:
    return {"others": [{"file_name": name, **more}]}


BEYOND = ["/etc/passwd", "../a", "a/../../b", "", ".", "a//b", "./a", "a\\b", "a\0b", 7]
"""Names of files outside of the folder."""
NO_SUMS: list[object] = [{}, {"a": -1}, {"a": 2**32}, {"a": "1"}, {"a": True}, [1]]
NO_ENTRY = "wrong entry of a file|which is not of format 1"
TWICE = [*file_named("model.safetensors")["files"], *file_named("other.safetensors")["files"]]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        *(({"step": -1}, "step"), ({"step": True}, "step"), ({"save_number": 1.5}, "save_number")),
        *(({"dtype": "int8"}, "int8"), ({"dtype": []}, "dtype"), ({"has_optimizer": 1}, "has_optimizer")),
        *(
            ({"files": {}}, "files"),
            ({"training": []}, "training"),
            ({"metric": "low"}, "metric"),
            ({"more": 1}, "more"),
        ),
        *(({"files": [5]}, NO_ENTRY), (other_named("a"), NO_ENTRY)),
        (other_named("a", num_bytes=1, checksum=2**32), NO_ENTRY),
        *((file_named(name), NO_ENTRY) for name in BEYOND),
        *((file_named("a", checksums=sums), NO_ENTRY) for sums in NO_SUMS),
        ({"files": TWICE}, "a tensor twice"),
        ({"files": [TWICE[0], {**TWICE[0], "checksums": {"c": 1}}]}, "a file twice"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        Manifest.from_json(sealed(**changes))


def test_an_entry_of_a_file_by_itself_is_checked_alike() -> None:
    wrong, right = (file_named(name)["files"][0] for name in (7, "a"))  # type: ignore[index]
    with pytest.raises(CheckpointError, match="wrong entry of a file, which"):
        file_record(wrong)
    assert file_record(right).file_name == "a"
