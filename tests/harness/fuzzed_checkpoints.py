"""A run's checkpoint, and its files with some of them broken: with sums that tell it, and with sums made anew."""

from __future__ import annotations

import contextlib
import json
import os
import random
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from harness.broken_contents import changed_json, spoiled

RUN = "run"
"""Name of the run's folder in the base of all inputs."""
CHECKPOINT = "checkpoint-1"


def make_run(folder: Path, model: Path, options: Sequence[str]) -> None:
    """Train with `options` on the data of `folder` in its RUN, which then has the results in `out`."""
    from mobius.config.cli import given_options, parse_args
    from mobius.ranks import Ranks
    from mobius.training.run import run_training

    place, before = folder / RUN, Path.cwd()
    place.mkdir()
    (place / "model").symlink_to(model)
    (place / "data.jsonl").symlink_to(folder / "data.jsonl")
    words = [*options, "--save_params", "none", "--save_steps", "1"]
    os.chdir(place)
    try:
        run_training(parse_args(words, num_ranks=1), Ranks(0, 1, 0), given=given_options(words))
    finally:
        os.chdir(before)


def break_checkpoint(run: Path, rng: random.Random) -> dict[str, bytes | None]:
    """The files of the run's CHECKPOINT by name, one or two of them broken or missing (None)."""
    files: dict[str, bytes | None] = dict(_read(run / "out" / CHECKPOINT))
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
            files[name] = _broken(name, content, rng)
            if turn < 0.7 and files["checkpoint.json"] is not None:  # a hand that knows the manifest
                for record in (*manifest["files"], *manifest["others"]):
                    if record["file_name"] == name:
                        record["num_bytes"] = len(files[name])
                        if "checksum" in record:
                            record["checksum"] = zlib.crc32(files[name])
                files["checkpoint.json"] = _summed(json.dumps(manifest).encode())
    return files


def _broken(name: str, content: bytes, rng: random.Random) -> bytes:
    if name.endswith(".json") and rng.random() < 0.8:
        return changed_json(json.loads(content), rng)
    if name.endswith(".safetensors") and rng.random() < 0.3:
        length = int.from_bytes(content[:8], "little")
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
def _read(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}
