"""Which checkpoints a folder has, what is refused with which reason, and what is removed and what never."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.checkpoints import PARAMETERS, has_values, names, save

from mobius.checkpoint.folders import (
    checkpoint_path,
    commit_checkpoint,
    create_partial,
    discard,
    find_checkpoints,
    open_checkpoint,
    partial_path,
    recover_interrupted_saves,
    rotate_checkpoints,
)
from mobius.checkpoint.tensor_files import plan_files
from mobius.errors import CheckpointError

PLANNED = plan_files(PARAMETERS, dtype=torch.bfloat16, has_optimizer=True)


def steps(folder: Path) -> list[int]:
    return [manifest.step for _, manifest in find_checkpoints(folder).valid]


def test_a_checkpoint_has_all_files_and_a_manifest_that_knows_them(tmp_path: Path) -> None:
    path = save(tmp_path / "new" / "out", 4, number=1)

    assert path == checkpoint_path(tmp_path / "new" / "out", 4)
    assert names(path.parent) == ["checkpoint-4"]
    manifest = open_checkpoint(path).manifest
    recorded = [*(record.file_name for record in manifest.files), *(other.file_name for other in manifest.others)]
    assert sorted([*recorded, "checkpoint.json"]) == names(path)
    assert (manifest.step, manifest.save_number, manifest.data) == (4, 1, {"position": [4, 3]})
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o644}


def test_files_in_folders_of_the_checkpoint_are_summed_up_too(tmp_path: Path) -> None:
    path = save(tmp_path, 4, number=1)
    manifest = replace(open_checkpoint(path).manifest, others=())
    os.rename(path, partial := partial_path(tmp_path, 4))
    (partial / "additional_chat_templates").mkdir()
    (partial / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")

    reader = open_checkpoint(commit_checkpoint(partial, manifest, PLANNED, weight_bytes=0))

    assert "additional_chat_templates/tools.jinja" in [other.file_name for other in reader.manifest.others]
    (path / "additional_chat_templates" / "tools.jinja").write_text("{{ massages }}")
    with pytest.raises(CheckpointError, match=r"tools\.jinja is damaged"):
        reader.verify_all()


def test_a_checkpoint_that_lacks_a_stage_is_never_given_its_name(tmp_path: Path) -> None:
    path = save(tmp_path, 4, number=1)
    manifest = open_checkpoint(path).manifest
    os.rename(path, partial := partial_path(tmp_path, 4))
    lacking = replace(manifest, files=manifest.files[1:])

    with pytest.raises(CheckpointError, match=r"lacks tensors, or has too many: embed\.weight"):
        commit_checkpoint(partial, lacking, PLANNED, weight_bytes=0)
    (partial / manifest.files[0].file_name).unlink()
    with pytest.raises(CheckpointError, match=r"is incomplete: model-00001-of-00002\.safetensors is missing"):
        commit_checkpoint(partial, manifest, PLANNED, weight_bytes=0)
    assert names(tmp_path) == ["checkpoint-4.partial"]
    discard(partial)
    assert names(tmp_path) == []


def test_the_newest_is_the_one_saved_last_whatever_its_step_and_the_clock(tmp_path: Path) -> None:
    for step, number in ((8, 2), (4, 3), (6, 1)):
        path = save(tmp_path, step, number=number)
        os.utime(path, (1e9 - number, 1e9 - number))

    found = find_checkpoints(tmp_path)

    assert [path.name for path, _ in found.valid] == ["checkpoint-4", "checkpoint-8", "checkpoint-6"]
    assert found.newest_save_number == 3
    assert find_checkpoints(tmp_path / "absent").valid == ()
    assert find_checkpoints(tmp_path / "absent").newest_save_number == 0


def test_only_names_of_complete_checkpoints_count(tmp_path: Path) -> None:
    path = save(tmp_path, 4, number=1)
    for name in ("checkpoint-5.partial", "checkpoint-6.replaced", "checkpoint-7.removed", "checkpoint-08", "best"):
        shutil.copytree(path, tmp_path / name)

    found = find_checkpoints(tmp_path)

    assert [path.name for path, _ in found.valid] == ["checkpoint-4"]
    assert found.invalid == ()


def test_a_step_that_is_saved_again_replaces_the_older_one(tmp_path: Path) -> None:
    save(tmp_path, 8, number=1, seed=1)
    path = save(tmp_path, 8, number=2, seed=2)

    assert names(tmp_path) == ["checkpoint-8"]
    assert has_values(open_checkpoint(path), seed=2)


def test_where_the_new_name_cannot_be_given_the_older_checkpoint_has_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 8, number=1, seed=1)
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if Path(source).suffix == ".partial":
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CheckpointError, match=r"cannot rename .*checkpoint-8\.partial: Input/output error"):
        save(tmp_path, 8, number=2, seed=2)

    assert has_values(open_checkpoint(path), seed=1)
    discard(partial_path(tmp_path, 8))
    assert names(tmp_path) == ["checkpoint-8"]


@pytest.mark.parametrize("at", [1, 4, 8])
def test_a_disk_that_fails_is_one_message_and_the_last_checkpoint_stays(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 4, number=1)
    calls = []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CheckpointError, match=r"cannot write .*/checkpoint-8\.partial/.*: No space left .* is free"):
        save(tmp_path, 8, number=2)

    assert steps(tmp_path) == [4]
    discard(partial_path(tmp_path, 8))
    assert names(tmp_path) == ["checkpoint-4"]


Damage = Callable[[Path], object]


def edit(**changes: object) -> Damage:
    def damage(path: Path) -> None:
        file = path / "checkpoint.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return damage


def cut(name: str) -> Damage:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-1])


def flip_last_bit(kind: str) -> Damage:
    def damage(path: Path) -> None:
        file = sorted(path.glob(f"{kind}*"))[0]
        contents = bytearray(file.read_bytes())
        contents[-1] ^= 1
        file.write_bytes(contents)

    return damage


def overwrite(file: Path, content: bytes) -> None:
    file.write_bytes(content + file.read_bytes()[len(content) :])


def header(change: Callable[[dict[str, dict[str, object]]], object] | bytes) -> Damage:
    """Another header of the first file of weights, as long as its own; bytes stand at its beginning."""

    def damage(path: Path) -> None:
        file = path / "model-00001-of-00002.safetensors"
        contents = file.read_bytes()
        length = int.from_bytes(contents[:8], "little")
        if isinstance(change, bytes):
            file.write_bytes(contents[:8] + change + contents[8 + len(change) :])
            return
        fields = json.loads(contents[8 : 8 + length])
        change(fields)
        text = json.dumps(fields, separators=(",", ":")).encode().ljust(length)
        file.write_bytes(len(text).to_bytes(8, "little") + text + contents[8 + length :])

    return damage


AT_ONCE: list[tuple[Damage, str]] = [
    (shutil.rmtree, "checkpoint-8 does not exist"),
    (lambda path: (shutil.rmtree(path), path.touch()), "checkpoint-8 is a file, no checkpoint"),
    (lambda path: (path / "checkpoint.json").unlink(), "no complete checkpoint of Mobius: it has no checkpoint.json"),
    (lambda path: (path / "checkpoint.json").write_text(""), "checkpoint.json is empty"),
    (lambda path: os.truncate(path / "checkpoint.json", 300), "checkpoint.json is no JSON"),
    (edit(step=9), "it was changed or damaged"),
    (edit(format=2), "it has format 2, this version of Mobius reads format 1: it is from a newer version"),
    (edit(format=0), "it has format 0, this version of Mobius reads format 1: it is from an older version"),
    (lambda path: (path / "checkpoint.json").write_text('{"global_step": 8}'), "it is not from Mobius"),
    (cut("model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors has [0-9,]+ bytes instead of"),
    (cut("config.json"), "config.json has 23 bytes instead of 24"),
    (lambda path: (path / "optimizer-00001-of-00002.safetensors").unlink(), "optimizer-00001.*is missing"),
]
NO_HEADER = "its header is not a safetensors header"
WHEN_READ: list[tuple[Damage, str]] = [
    (flip_last_bit("model-"), "/model-[^/]* is damaged: the checksum of '[a-z.0-9_]+' is [0-9a-f]{8}, but"),
    (flip_last_bit("optimizer-"), "/optimizer-[^/]* is damaged: the checksum of '[a-z.0-9_]+' is [0-9a-f]{8}, but"),
    (flip_last_bit("trainer_state"), r"trainer_state\.json is damaged: "),
    (header(b"[" * 40), NO_HEADER),
    (lambda path: overwrite(path / "model-00001-of-00002.safetensors", b"\xff" * 8), NO_HEADER),
    (header(lambda fields: fields["embed.weight"].update(dtype="F4")), r"'embed.weight' is F4 \[7, 3\]"),
    (header(lambda fields: fields["embed.weight"].update(shape=[9])), NO_HEADER),
    (header(lambda fields: fields["embed.weight"].update(shape=-1)), NO_HEADER),
    (header(lambda fields: fields["embed.weight"].update(data_offsets=[0])), NO_HEADER),
    (header(lambda fields: fields.pop("embed.weight")), "and checkpoint.json disagree about 'embed.weight'"),
]


@pytest.mark.parametrize(("damage", "reason"), WHEN_READ)
def test_damage_within_a_file_is_found_when_it_is_read_and_the_newest_good_one_named(
    damage: Damage, reason: str, tmp_path: Path
) -> None:
    path = save(tmp_path, 8, number=3)
    damage(path)
    for hint in ("There is no other good checkpoint", f"--resume_from_checkpoint {checkpoint_path(tmp_path, 4)}"):
        with pytest.raises(CheckpointError, match=reason) as raised:
            has_values(open_checkpoint(path), seed=8)
        assert hint in str(raised.value) or "is damaged" not in str(raised.value)
        save(tmp_path, 4, number=2)
    if "the checksum of" in reason:
        with pytest.raises(CheckpointError, match=reason):
            open_checkpoint(path).verify_all()


@pytest.mark.parametrize(("damage", "reason"), AT_ONCE)
def test_a_checkpoint_that_is_not_whole_is_refused_with_the_reason_and_the_newest_good_one(
    damage: Damage, reason: str, tmp_path: Path
) -> None:
    save(tmp_path, 2, number=1)
    newest_good = save(tmp_path, 4, number=2)
    path = save(tmp_path, 8, number=3)
    damage(path)

    with pytest.raises(CheckpointError, match=reason) as raised:
        open_checkpoint(path)

    assert str(raised.value).endswith(f"--resume_from_checkpoint {newest_good}")
    found = find_checkpoints(tmp_path)
    assert [path.name for path, _ in found.valid] == ["checkpoint-4", "checkpoint-2"]
    if path.exists():
        ((invalid, why),) = found.invalid
        assert invalid == path
        assert why in str(raised.value)


def test_the_folder_of_checkpoints_is_no_checkpoint_but_has_one(tmp_path: Path) -> None:
    path = save(tmp_path, 4, number=1)

    with pytest.raises(CheckpointError, match=rf"no complete checkpoint.*--resume_from_checkpoint {path}"):
        open_checkpoint(tmp_path)


def test_what_is_left_of_a_save_is_not_opened(tmp_path: Path) -> None:
    os.rename(save(tmp_path, 4, number=1), partial := partial_path(tmp_path, 4))

    with pytest.raises(CheckpointError, match="is an incomplete checkpoint, left by a killed run"):
        open_checkpoint(partial)


def test_old_checkpoints_go_and_protected_and_damaged_ones_stay(tmp_path: Path) -> None:
    for number, step in enumerate((2, 4, 6, 8, 10), start=1):
        save(tmp_path, step, number=number)
    (tmp_path / "checkpoint-4" / "checkpoint.json").unlink()

    removed = rotate_checkpoints(tmp_path, keep=2, protected=[tmp_path / "." / "checkpoint-2"])

    assert removed == [tmp_path / "checkpoint-6"]
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-2", "checkpoint-4", "checkpoint-8"]


def test_a_link_to_a_checkpoint_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere", 2, number=1)
    save(tmp_path / "out", 4, number=2)
    (tmp_path / "out" / "checkpoint-2").symlink_to(tmp_path / "elsewhere" / "checkpoint-2")

    assert rotate_checkpoints(tmp_path / "out", keep=1, protected=()) == [tmp_path / "out" / "checkpoint-2"]

    assert names(tmp_path / "out") == ["checkpoint-4"]
    open_checkpoint(tmp_path / "elsewhere" / "checkpoint-2").verify_all()


def place(folder: Path, name: str, *, number: int, seed: int, is_torn: bool = False) -> Path:
    """A checkpoint of step 8 under the name that a killed run may have left it with."""
    path = save(folder / "made", 8, number=number, seed=seed)
    if is_torn:
        (path / "checkpoint.json").write_text("")
    path.rename(folder / name)
    (folder / "made").rmdir()
    return folder / name


FINAL, PARTIAL, REPLACED = "checkpoint-8", "checkpoint-8.partial", "checkpoint-8.replaced"


@pytest.mark.parametrize(
    ("whole", "torn", "expected"),
    [
        *(([PARTIAL], [], PARTIAL), ([PARTIAL], [FINAL], PARTIAL), ([PARTIAL, FINAL], [], PARTIAL)),
        *(([PARTIAL, REPLACED], [], PARTIAL), ([PARTIAL, REPLACED], [FINAL], PARTIAL)),
        *(([FINAL], [PARTIAL], FINAL), ([FINAL, REPLACED], [], FINAL), ([FINAL], [REPLACED], FINAL)),
    ],
)
def test_every_leftover_is_settled_and_told(whole: list[str], torn: list[str], expected: str, tmp_path: Path) -> None:
    seeds = {REPLACED: 1, FINAL: 2, PARTIAL: 3}
    for name in [*whole, *torn]:
        place(tmp_path, name, number=seeds[name], seed=seeds[name], is_torn=name in torn)

    assert recover_interrupted_saves(tmp_path)

    assert names(tmp_path) == [FINAL]
    assert has_values(open_checkpoint(tmp_path / FINAL), seed=seeds[expected])
    assert recover_interrupted_saves(tmp_path) == []


def test_what_no_run_has_left_is_never_touched(tmp_path: Path) -> None:
    for name in ("checkpoint-8.partial", "checkpoint-9.removed", "notes.partial", "checkpoint-x.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").touch()
    (tmp_path / "checkpoint-10.replaced").touch()
    before = names(tmp_path)

    lines = recover_interrupted_saves(tmp_path)

    assert names(tmp_path) == before
    assert len(lines) == 3
    assert all("stays as it is" in line for line in lines)
    with pytest.raises(CheckpointError, match=r"checkpoint-8\.partial: it holds something other than a checkpoint"):
        create_partial(tmp_path, 8)
    assert names(tmp_path / "checkpoint-8.partial") == ["thesis.tex"]
