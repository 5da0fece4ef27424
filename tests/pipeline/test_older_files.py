"""Files of runs made before engine and planner shared a memory layout: a run goes on from them, or says what to do."""

from __future__ import annotations

import json
import shutil
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from harness.sessions import resume

from mobius.checkpoint.manifest import Manifest, OtherFile
from mobius.config.cli import parse_args
from mobius.errors import PlanError
from mobius.planner.plan_file import apply_saved_plan

ARCHIVE = Path(__file__).parents[1] / "data" / "older_files.tar.xz"
"""Files of commit 32758930 in folders: `full`, four steps of a small llama in bf16, saved after the second; `lora`, the
same with adapters; `durable`, six steps with states on disks, killed after the third."""
PLACE = "/tmp/oldrun"
"""Folder in which these runs were made."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of these runs, moved to this machine, with their cache of tokens."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    (slot,) = (tmp_path / "states").glob("*/slot-1")
    moved = (slot / "stages-0.json").read_bytes().replace(PLACE.encode(), bytes(tmp_path))
    (slot / "stages-0.json").write_bytes(moved)
    manifest = Manifest.from_json(json.loads((slot / "checkpoint.json").read_text()))
    record = OtherFile("stages-0.json", len(moved), zlib.crc32(moved))
    others = tuple(record if each.file_name == record.file_name else each for each in manifest.others)
    (slot / "checkpoint.json").write_text(replace(manifest, others=others).to_json())
    (tmp_path / "durable" / "checkpoint-3").symlink_to(slot)
    shutil.move(tmp_path / "tokenized", tmp_path / "cache" / "mobius" / "tokenized")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_run_goes_on_from_an_older_checkpoint(place: Path, kind: str) -> None:
    resume(f"{kind}/checkpoint-2", "--save_dir", "again")
    assert losses(place / "again") == pytest.approx(losses(place / kind)[2:], rel=1e-4)


def test_a_run_goes_on_from_an_older_durable_step(place: Path) -> None:
    resume("durable/checkpoint-3")
    found = losses(place / "durable")
    assert len(found) == 6
    assert found[3:] == sorted(found[3:], reverse=True)
    assert found[3] < found[0]


def test_an_older_plan_is_refused_with_what_to_do(place: Path) -> None:
    config = parse_args(["--plan", "full/plan.json", "--model_path", "model", "--dataset", "data.jsonl"])
    with pytest.raises(PlanError, match=r"has version 2, this program reads version 3\. .*make it again with"):
        apply_saved_plan(config, given=())
