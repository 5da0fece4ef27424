"""A run's checkpoint, and its files with some of them broken: with sums that tell it, and with sums made anew."""

from __future__ import annotations

import contextlib
import json
import os
import random
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from harness.broken_contents import changed_json, spoiled

RUN = "run"
"""Name of the run's folder in the base of all inputs."""
CHECKPOINT = "checkpoint-1"
ADAPTER = "adapter run"
"""Name of the folder of a run that trained adapters."""


def make_run(place: Path, model: Path, options: Sequence[str]) -> None:
    """Train with `options` on the data beside the new folder `place`, which then has the results in `out`."""
    from mobius.config.cli import given_options, parse_args
    from mobius.ranks import Ranks
    from mobius.training.run import run_training

    before = Path.cwd()
    place.mkdir()
    (place / "model").symlink_to(model)
    (place / "data.jsonl").symlink_to(place.parent / "data.jsonl")
    words = [*options, "--save_params", "none"]
    os.chdir(place)
    try:
        run_training(parse_args(words, num_ranks=1), Ranks(0, 1, 0), given=given_options(words))
    finally:
        os.chdir(before)


def break_checkpoint(run: Path, rng: random.Random) -> dict[str, bytes | None]:
    """The files of the run's CHECKPOINT by name, one or two of them broken or missing (None)."""
    files: dict[str, bytes | None] = dict(read_checkpoint(run / "out" / CHECKPOINT))
    manifest = json.loads(files["checkpoint.json"] or b"")
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice(sorted(files))
        content = files[name]
        if content is None:
            continue
        turn = rng.random()
        if turn < 0.1:
            files[name] = None
        elif name == "checkpoint.json":
            changed = changed_json(manifest, rng)
            files[name] = _summed(changed) if rng.random() < 0.7 else spoiled(content, rng)
        else:
            files[name] = broken_file(name, content, rng)
            if turn < 0.7 and files["checkpoint.json"] is not None:  # a hand that knows the manifest
                files = with_sums(files, manifest)
    return files


def with_sums(files: Mapping[str, bytes | None], manifest: Mapping[str, Any]) -> dict[str, bytes | None]:
    """The files with `manifest`, whose sizes and sums become theirs."""
    for record in (*manifest["files"], *manifest["others"]):
        content = files[record["file_name"]]
        if content is not None:
            record["num_bytes"] = len(content)
            if "checksum" in record:
                record["checksum"] = zlib.crc32(content)
    return {**files, "checkpoint.json": _summed(json.dumps(manifest).encode())}


def broken_file(name: str, content: bytes, rng: random.Random) -> bytes:
    """Contents of a file of a checkpoint or adapter, changed within its format or beyond it."""
    if name.endswith(".json") and rng.random() < 0.8:
        with contextlib.suppress(ValueError, RecursionError):  # broken before
            return changed_json(json.loads(content), rng)
    if name.endswith(".safetensors") and rng.random() < 0.3:
        length = int.from_bytes(content[:8], "little")
        with contextlib.suppress(ValueError, RecursionError):
            header = changed_json(json.loads(content[8 : 8 + length]), rng)
            return len(header).to_bytes(8, "little") + header + content[8 + length :]
    return spoiled(content, rng)


def _summed(text: bytes) -> bytes:
    """A manifest with the sum of its own contents, if it is an object."""
    with contextlib.suppress(ValueError, RecursionError):
        values: Any = json.loads(text)
        if isinstance(values, dict):
            own = {key: value for key, value in values.items() if key != "checksum"}
            told = json.dumps(own, sort_keys=True, separators=(",", ":")).encode()
            return json.dumps({**own, "checksum": zlib.crc32(told)}).encode()
    return text


@cache
def read_checkpoint(checkpoint: Path) -> dict[str, bytes]:
    """Contents of its files by name."""
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}
