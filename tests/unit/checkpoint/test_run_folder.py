"""A run that saves as it goes owns its folder from the first step on; a kill at any moment loses nothing complete."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness.checkpoints import names
from harness.kills import run_killed

from mobius.checkpoint.run_folder import OutputFolder
from mobius.config.earlier_results import lock_if_free
from mobius.errors import CheckpointError
from mobius.files.atomic_files import atomic_write

SETTINGS = {"training_args.yaml": "settings", "plan.json": "settings"}


@pytest.fixture(autouse=True)
def _no_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def make(save_dir: Path, *, overwrite: bool = False, resumes: bool = False, **files: Path) -> OutputFolder:
    options = {f"--{name}": path for name, path in files.items()}
    return OutputFolder(save_dir, overwrite=overwrite, files=options, resumes=resumes)


def refused(save_dir: Path, *, match: str, **options: Any) -> None:
    """A start there is refused."""
    with pytest.raises(CheckpointError, match=match):
        make(save_dir, **options).prepare({})


@contextlib.contextmanager
def unchanged(place: Path) -> Iterator[None]:
    """Nothing below `place` comes or goes."""
    before = sorted(place.rglob("*"))
    yield
    assert sorted(place.rglob("*")) == before


def saved_model(folder: Path, mark: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_text(mark)
    (folder / "config.json").write_text(mark)
    return folder


def save_checkpoint(folder: Path, step: int, mark: str, *, number: int = 1) -> None:
    """As checkpoints are saved: whole under its name or not there."""
    partial = folder / f"checkpoint-{step}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    (partial / "model.safetensors").write_text(mark)
    (partial / "checkpoint.json").write_text(json.dumps({"save_number": number, "mark": mark}))
    partial.rename(folder / f"checkpoint-{step}")


def begun(save_dir: Path, *, overwrite: bool = False, resumes: bool = False) -> OutputFolder:
    output = make(save_dir, overwrite=overwrite, resumes=resumes)
    output.prepare({})
    output.write_settings(SETTINGS)
    output.begin()
    return output


def export(output: OutputFolder, mark: str) -> None:
    output.begin_export()
    (output.export_folder / "templates").mkdir()
    (output.export_folder / "templates" / "tool.jinja").write_text(mark)
    (output.export_folder / "model.safetensors").write_text(mark)
    (output.export_folder / "config.json").write_text(mark)


def whole_run(save_dir: Path, mark: str, *, overwrite: bool = False, resumes: bool = False, step: int = 10) -> None:
    output = begun(save_dir, overwrite=overwrite, resumes=resumes)
    (output.save_dir / "metrics.jsonl").write_text("{}\n")
    save_checkpoint(output.save_dir, step, mark, number=step)
    output.remove_older_results()
    export(output, mark)
    output.commit()
    output.close()


def run_that_saves_at_the_end(save_dir: Path, mark: str, *, overwrite: bool = False, resumes: bool = False) -> None:
    output = begun(save_dir, overwrite=overwrite, resumes=resumes)
    export(output, mark)
    output.commit()
    output.close()


def complete_in(place: Path) -> set[str]:
    """Marks of all models and checkpoints that are whole, or are being moved, wherever they are below `place`."""
    marks = set()
    for mark in place.rglob("config.json"):
        weights = [path.read_text() for path in mark.parent.glob("*.safetensors")]
        if mark.parent.name == "final.moving" or weights:
            assert set(weights) <= {mark.read_text()}, f"{mark.parent} looks whole with the weights of two models"
            marks.add(f"model {mark.read_text()}")
    for mark in place.rglob("checkpoint.json"):
        if not mark.parent.name.endswith(".partial"):
            marks.add(f"checkpoint {json.loads(mark.read_text())['mark']}")
    return marks


def go_on(save_dir: Path) -> None:
    """Do what a user, or a launcher that restarts, does after a kill: resume if there is a checkpoint, else start."""
    aside = save_dir.with_name("save.replaced")
    if aside.exists() and not [*save_dir.glob("checkpoint-*[0-9]/checkpoint.json")]:
        if "model new" not in complete_in(save_dir):  # else the start says so first
            refused(save_dir, overwrite=True, match=r"save\.replaced was interrupted")
        shutil.rmtree(aside)
    if [*save_dir.glob("checkpoint-*[0-9]/checkpoint.json")]:
        whole_run(save_dir, "new", resumes=True, step=20)
        return
    with contextlib.suppress(CheckpointError):  # told that there is a model; the user asks again
        whole_run(save_dir, "new", overwrite=True)
        return
    whole_run(save_dir, "new", overwrite=True)


# --- the life of a run


def test_an_older_folder_is_as_it_was_until_the_run_begins(tmp_path: Path) -> None:
    saved_model(tmp_path / "save", "old")
    output = make(tmp_path / "save", overwrite=True)
    with unchanged(tmp_path):
        output.prepare({"--save_dir": 10})
        output.write_settings(SETTINGS)

    output.begin()

    assert names(tmp_path) == ["save", "save.replaced"]
    assert names(tmp_path / "save") == [".replaces_older", *sorted(SETTINGS)]


def test_the_model_is_whole_in_the_folder_only_when_it_is_committed(tmp_path: Path) -> None:
    output = begun(tmp_path / "save")
    save_checkpoint(output.save_dir, 10, "ten")
    export(output, "end")
    assert not (tmp_path / "save" / "config.json").exists()

    output.commit()

    assert names(output.save_dir) == [
        *("checkpoint-10", "config.json", "model.safetensors", "plan.json", "templates", "training_args.yaml")
    ]
    assert (output.save_dir / "templates" / "tool.jinja").read_text() == "end"


def test_half_written_records_of_a_killed_start_go_with_the_end_of_the_next(tmp_path: Path) -> None:
    output = begun(tmp_path / "save")
    save_checkpoint(output.save_dir, 10, "new")
    for name in ("train_results.json.partial", "notes.partial"):
        (tmp_path / "save" / name).write_text("{")
    export(output, "new")
    output.commit()
    assert not (tmp_path / "save" / "train_results.json.partial").exists()
    assert (tmp_path / "save" / "notes.partial").exists(), "somebody else's"


def test_an_export_begins_with_nothing_of_one_before(tmp_path: Path) -> None:
    output = begun(tmp_path / "save")
    export(output, "first")

    output.begin_export()

    assert names(output.export_folder) == []


def test_a_refused_run_leaves_nothing_and_a_begun_one_is_not_removed(tmp_path: Path) -> None:
    refused = make(tmp_path / "save")
    refused.prepare({})
    refused.discard()
    assert names(tmp_path) == []

    running = begun(tmp_path / "save")
    running.discard()

    assert names(tmp_path / "save") == sorted(SETTINGS)


def test_older_results_stay_aside_until_the_first_checkpoint(tmp_path: Path) -> None:
    saved_model(tmp_path / "save", "old")
    output = begun(tmp_path / "save", overwrite=True)
    assert output.older_results == tmp_path / "save.replaced"
    assert complete_in(tmp_path / "save.replaced") == {"model old"}

    save_checkpoint(output.save_dir, 1, "one")
    output.remove_older_results()
    output.remove_older_results()

    assert output.older_results is None
    assert names(tmp_path) == ["save"]
    assert names(tmp_path / "save") == ["checkpoint-1", *sorted(SETTINGS)]


def test_what_the_run_itself_has_saved_is_no_older_result_on_any_rank(tmp_path: Path) -> None:
    other, first = make(tmp_path / "save"), begun(tmp_path / "save")
    assert first.older_results is None

    save_checkpoint(first.save_dir, 1, "one")

    assert (other.older_results, first.older_results) == (None, None)


def test_older_results_that_cannot_be_removed_are_told_and_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved_model(tmp_path / "save", "old")
    output = begun(tmp_path / "save", overwrite=True)
    save_checkpoint(output.save_dir, 1, "one")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        output.remove_older_results()

    assert "save.replaced cannot be removed" in caplog.text
    output.close()
    output = make(tmp_path / "save", resumes=True)
    output.prepare({})
    output.remove_older_results()
    assert names(tmp_path) == ["save"], "a start that goes on tries again"


# --- refusals before training


PLACES: list[tuple[dict[str, Any], str]] = [
    ({"save_dir": Path("/proc")}, "--save_dir /proc is a mount point"),
    ({"save_dir": Path("/")}, "--save_dir / is the root of all folders. Use a folder inside it"),
    ({"save_dir": Path("loop")}, "--save_dir loop"),
    ({"save_dir": Path("loop/save")}, "--save_dir loop/save"),
    ({"save_params": Path("loop")}, "--save_params loop"),
    ({"save_dir": Path("file/x")}, "--save_dir .*file/x: cannot write"),
    ({"save_params": Path("file/x")}, "--save_params .*file/x: cannot write"),
    ({"save_params": Path("pipe")}, r"--save_params .*pipe is a device or a pipe\. Name a file"),
]


@pytest.mark.parametrize(("places", "told"), PLACES, ids=str)
def test_a_place_where_nothing_can_be_written_is_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: dict[str, Any], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("file").touch()
    os.mkfifo("pipe")  # as /dev/null would be replaced, by a user who may do everything

    refused(**{"save_dir": Path("save"), **places}, overwrite=True, match=told)

    assert names(tmp_path) == ["file", "loop", "pipe"]


def test_existing_files_are_refused_together_with_the_folder_in_one_message(tmp_path: Path) -> None:
    saved_model(tmp_path / "save", "old")
    (tmp_path / "params.pt").touch()
    (tmp_path / "results").mkdir()
    output = make(tmp_path / "save", save_params=tmp_path / "params.pt", save_results=tmp_path / "results")

    with pytest.raises(CheckpointError) as raised:
        output.prepare({})

    assert [line.split()[0] for line in str(raised.value).splitlines()] == [
        "--save_dir",
        "--save_params",
        "--save_results",
    ]


def test_too_little_disk_space_is_told_with_what_is_needed_and_what_is_free(tmp_path: Path) -> None:
    output = make(tmp_path / "save", save_params=tmp_path / "p.pt")

    with pytest.raises(CheckpointError, match=r"--save_dir and --save_params need 3145728\.0 GiB .* GiB is free"):
        output.prepare({"--save_dir": 2**51, "--save_params": 2**50})

    assert names(tmp_path) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write(text: str, *, interrupted: bool) -> None:
        with atomic_write(path) as temporary:
            temporary.write_text(text)
            if interrupted:
                raise KeyboardInterrupt

    write("first", interrupted=False)
    with pytest.raises(KeyboardInterrupt):
        write("second", interrupted=True)

    assert path.read_text() == "first"
    assert names(tmp_path) == ["file"]


def test_a_rank_that_did_not_prepare_discards_nothing(tmp_path: Path) -> None:
    make(tmp_path / "save").prepare({})

    make(tmp_path / "save").discard()

    assert names(tmp_path) == ["save"]


def test_a_device_or_pipe_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file, so it cannot be replaced"), atomic_write(pipe) as temporary:
        temporary.write_text("instead of it")
    assert pipe.is_fifo()


# --- resuming


def test_a_run_resumes_into_its_folder_without_leave_to_overwrite(tmp_path: Path) -> None:
    first = begun(tmp_path / "save")
    (first.save_dir / "metrics.jsonl").write_text("lines\n")
    save_checkpoint(first.save_dir, 10, "ten")
    first.close()

    second = make(tmp_path / "save", resumes=True)
    second.prepare({})
    second.write_settings({**SETTINGS, "plan.json": "second"})
    assert (tmp_path / "save" / "plan.json").read_text() == "settings"
    assert second.older_results is None
    second.begin()

    assert names(tmp_path) == ["save"]
    assert names(tmp_path / "save") == ["checkpoint-10", "metrics.jsonl", *sorted(SETTINGS)]
    assert (tmp_path / "save" / "plan.json").read_text() == "second"
    assert (tmp_path / "save" / "metrics.jsonl").read_text() == "lines\n"
    assert second.older_results is None


def test_a_resumed_run_that_is_refused_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    whole_run(tmp_path / "save", "old")
    before = {path: path.read_text() for path in (tmp_path / "save").rglob("*") if path.is_file()}
    output = make(tmp_path / "save", resumes=True)
    output.prepare({})
    output.write_settings({"plan.json": "other"})

    output.discard()

    assert names(tmp_path) == ["save"]
    assert {path: path.read_text() for path in (tmp_path / "save").rglob("*") if path.is_file()} == before
    begun(tmp_path / "save", resumes=True)


def test_resuming_where_there_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    saved_model(tmp_path / "save", "model")

    for name in ("save", "absent"):
        refused(tmp_path / name, resumes=True, match=rf"/{name} holds no checkpoint to resume from")


def test_a_folder_named_like_a_checkpoint_is_none_without_its_mark(tmp_path: Path) -> None:
    begun(tmp_path / "save").close()
    (tmp_path / "save" / "checkpoint-10").mkdir()
    (tmp_path / "save" / "checkpoint-11.partial").mkdir()
    (tmp_path / "save" / "checkpoint-11.partial" / "model.safetensors").touch()

    with unchanged(tmp_path):
        refused(tmp_path / "save", resumes=True, match="holds no checkpoint to resume from")


def test_the_single_files_of_the_resumed_run_may_be_replaced(tmp_path: Path) -> None:
    whole_run(tmp_path / "save", "old")
    (tmp_path / "p.pt").touch()

    refused(tmp_path / "other", save_params=tmp_path / "p.pt", match=r"--save_params .*p\.pt exists")
    make(tmp_path / "save", resumes=True, save_params=tmp_path / "p.pt").prepare({})


def test_a_resumed_run_replaces_the_weights_of_the_model_and_no_file_of_the_older_one_stays(tmp_path: Path) -> None:
    whole_run(tmp_path / "save", "old")
    (tmp_path / "save" / "model.safetensors").rename(tmp_path / "save" / "model-00001-of-00002.safetensors")
    (tmp_path / "save" / "model.safetensors.index.json").touch()

    whole_run(tmp_path / "save", "new", resumes=True, step=20)

    assert complete_in(tmp_path) == {"model new", "checkpoint old", "checkpoint new"}
    assert names(tmp_path / "save") == [
        *("checkpoint-10", "checkpoint-20", "config.json", "metrics.jsonl", "model.safetensors", "plan.json"),
        *("templates", "training_args.yaml"),
    ]


def test_a_folder_that_cannot_be_written_is_told_before_the_run_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_run(tmp_path / "save", "old")

    def refuse(*, dir: Path) -> None:  # the administrator may write everywhere, so that modes show nothing
        if dir == tmp_path / "save":
            raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    refused(tmp_path / "save", resumes=True, match=r"--save_dir .*/save: cannot write there \(Read-only file system\)")

    assert names(tmp_path) == ["save"]
    monkeypatch.undo()
    begun(tmp_path / "save", resumes=True)


# --- two runs


@pytest.mark.parametrize("second", [{}, {"overwrite": True}, {"resumes": True}], ids=str)
@pytest.mark.parametrize("first", ["preparing", "running", "resuming", "resumed", "committed"])
def test_a_second_run_in_the_same_folder_is_refused_at_its_start(
    tmp_path: Path, first: str, second: dict[str, bool]
) -> None:
    if first in ("resuming", "resumed"):
        whole_run(tmp_path / "save", "old")
    owner = make(tmp_path / "save", resumes=first in ("resuming", "resumed"))
    owner.prepare({})
    if first not in ("preparing", "resuming"):
        owner.begin()
    if first in ("running", "committed"):
        save_checkpoint(owner.save_dir, 1, "one")
    if first == "committed":
        export(owner, "end")
        owner.commit()
    message = r"--save_dir .*another run is writing to .*Choose another folder, or wait"

    with unchanged(tmp_path):
        refused(tmp_path / "save", match=message, **second)


def test_a_run_that_starts_at_the_same_moment_has_the_folder_or_has_it_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        (tmp_path / "save").rename(tmp_path / "removed by the other run")
        (tmp_path / "save").mkdir()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    refused(tmp_path / "save", match="another run is writing")

    assert "save" in names(tmp_path), "it is the other run's"


# --- the start after a kill


@pytest.mark.parametrize("has_model", [False, True])
def test_a_folder_with_checkpoints_is_refused_with_the_newest_and_both_ways_on(tmp_path: Path, has_model: bool) -> None:
    output = begun(tmp_path / "save")
    save_checkpoint(output.save_dir, 40, "forty", number=3)
    save_checkpoint(output.save_dir, 9, "nine, saved later by a run that was resumed", number=4)
    (output.save_dir / "checkpoint-50.partial").mkdir()
    (output.save_dir / "checkpoint-60").mkdir()
    if has_model:
        saved_model(output.save_dir, "end")
    output.close()
    also = ", and a complete model" if has_model else ""
    newest = f"earlier run{also}. The newest is checkpoint-9."

    with unchanged(tmp_path):
        refused(
            tmp_path / "save",
            match=rf"{re.escape(newest)}.*--resume_from_checkpoint true.*--overwrite_output_dir",
        )


@pytest.mark.parametrize(
    "strange", ["thesis.tex", "adapter.safetensors", "notes/of mine.txt", "training_args.yaml missing", "link"]
)
def test_a_folder_with_something_of_somebody_is_never_removed(tmp_path: Path, strange: str) -> None:
    output = begun(tmp_path / "save")
    output.close()
    if strange == "training_args.yaml missing":
        (tmp_path / "save" / "training_args.yaml").unlink()
    elif strange == "link":
        (tmp_path / "save" / "runs").symlink_to(tmp_path)
    else:
        (tmp_path / "save" / strange).parent.mkdir(exist_ok=True)
        (tmp_path / "save" / strange).touch()

    with unchanged(tmp_path):
        for overwrite in (False, True):
            refused(tmp_path / "save", overwrite=overwrite, match="something other than a saved model")


def test_a_folder_whose_run_came_to_nothing_is_used_again(tmp_path: Path) -> None:
    output = begun(tmp_path / "save")
    for name in ("metrics.jsonl", "metrics.jsonl.partial", "trace.rank0.json", "train_results.json"):
        (output.save_dir / name).touch()
    for name in ("runs", "checkpoint-10.partial", "checkpoint-5.removed", "pt/of the user"):
        (output.save_dir / name).mkdir(parents=True)
    (output.save_dir / "checkpoint-10.partial" / "model.safetensors").touch()
    output.begin_export()
    (output.export_folder / "model.safetensors").touch()
    output.close()
    second = make(tmp_path / "save")
    with unchanged(tmp_path):
        second.prepare({})

    second.begin()

    assert names(tmp_path / "save") == ["plan.json", "pt", "training_args.yaml"]


def test_links_to_durable_steps_are_results_wherever_they_lead(tmp_path: Path) -> None:
    """Their disk may be missing now only; links of a run that is replaced would lead to the new one's steps."""
    begun(tmp_path / "save").close()
    (tmp_path / "save" / "checkpoint-7").symlink_to("../disk/slot-0")
    with unchanged(tmp_path):
        refused(tmp_path / "save", match="--overwrite_output_dir to replace it")

    output = begun(tmp_path / "save", overwrite=True)

    assert output.older_results == tmp_path / "save.replaced"
    assert names(tmp_path / "save.replaced") == sorted(SETTINGS)
    output.close()
    begun(tmp_path / "save", overwrite=True)
    assert names(tmp_path) == ["save"], "nothing was lost that the user has to judge"


@pytest.mark.parametrize("is_complete", [False, True])
def test_results_that_a_killed_run_was_to_replace_are_refused_with_both_paths(
    tmp_path: Path, is_complete: bool
) -> None:
    saved_model(tmp_path / "save", "old")
    output = begun(tmp_path / "save", overwrite=True)
    if is_complete:
        save_checkpoint(output.save_dir, 1, "new")
    output.close()
    state = "has results, too" if is_complete else "has no result"
    with unchanged(tmp_path):
        for overwrite in (False, True):
            refused(tmp_path / "save", overwrite=overwrite, match=rf"results in .*/save\.replaced .*/save {state}")
    if is_complete:
        whole_run(tmp_path / "save", "new", resumes=True, step=2)
        assert names(tmp_path) == ["save"], "what it was to replace is replaced"
        return
    shutil.rmtree(tmp_path / "save")
    (tmp_path / "save.replaced").rename(tmp_path / "save")
    begun(tmp_path / "save", overwrite=True)


def test_a_removal_never_follows_links(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "save", 1, "old")
    output = begun(tmp_path / "save", overwrite=True)
    save_checkpoint(tmp_path / "slots", 2, "new")
    (tmp_path / "save.replaced" / "checkpoint-2").symlink_to("../slots/checkpoint-2")
    save_checkpoint(output.save_dir, 1, "new")

    output.remove_older_results()

    assert names(tmp_path) == ["save", "slots"]
    assert complete_in(tmp_path / "slots") == {"checkpoint new"}


@pytest.mark.parametrize("aside", ["partial", "replaced"])
def test_a_whole_checkpoint_that_has_not_its_name_is_not_removed_with_its_folder(tmp_path: Path, aside: str) -> None:
    output = begun(tmp_path / "save")
    save_checkpoint(output.save_dir, 10, "ten")
    (output.save_dir / "checkpoint-10").rename(output.save_dir / f"checkpoint-10.{aside}")
    output.close()

    refused(tmp_path / "save", match=rf"The newest is checkpoint-10\.{aside}")

    assert names(tmp_path / "save") == [f"checkpoint-10.{aside}", *sorted(SETTINGS)]
    make(tmp_path / "save", resumes=True).prepare({})


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_checked_model_whose_run_was_killed_gets_its_place_and_the_run_is_refused(
    tmp_path: Path, overwrite: bool
) -> None:
    output = begun(tmp_path / "save")
    export(output, "end")
    output.close()

    refused(
        tmp_path / "save",
        overwrite=overwrite,
        match=r"interrupted run had left a complete, checked model.*start again",
    )

    assert complete_in(tmp_path) == {"model end"}
    assert "final.partial" not in names(tmp_path / "save")


def scores_only(save_dir: Path) -> None:
    """What an evaluation without any training leaves; it works as a run that saves at the end."""
    output = begun(save_dir)
    for name in ("eval_results.json", "all_results.json"):
        (output.save_dir / name).write_text("scores")
    output.commit()
    output.close()


def test_scores_are_never_removed_without_being_asked(tmp_path: Path) -> None:
    scores_only(tmp_path / "save")

    with unchanged(tmp_path):
        refused(tmp_path / "save", match=r"exists and is not empty.*--overwrite_output_dir")


def test_a_folder_is_kept_free_while_it_is_settled(tmp_path: Path) -> None:
    with lock_if_free(tmp_path / "save") as is_free:
        assert is_free, "there is none"
    output = begun(tmp_path / "save")
    save_checkpoint(output.save_dir, 1, "one")
    with lock_if_free(tmp_path / "save") as is_free:
        assert not is_free
    output.close()

    with lock_if_free(tmp_path / "save") as is_free:
        assert is_free
        refused(tmp_path / "save", resumes=True, match="another run is writing")

    make(tmp_path / "save", resumes=True).prepare({})


# --- kills


def old_nothing(place: Path) -> None:
    del place


def old_model(place: Path) -> None:
    saved_model(place / "save", "old")


def old_run(place: Path) -> None:
    whole_run(place / "save", "old", step=5)


def old_checkpoints(place: Path) -> None:
    output = begun(place / "save")
    save_checkpoint(output.save_dir, 4, "old")
    save_checkpoint(output.save_dir, 5, "old")
    output.close()


@pytest.mark.parametrize(
    ("run", "older", "overwrite", "resumes"),
    [
        pytest.param(whole_run, old_nothing, False, False, id="fresh"),
        pytest.param(whole_run, old_model, True, False, id="over a model", marks=pytest.mark.extended),
        pytest.param(whole_run, old_run, True, False, id="over a run", marks=pytest.mark.extended),
        pytest.param(whole_run, old_checkpoints, True, False, id="over checkpoints"),
        pytest.param(whole_run, old_run, False, True, id="resuming a run that had ended"),
        pytest.param(whole_run, old_checkpoints, False, True, id="resuming", marks=pytest.mark.extended),
        pytest.param(run_that_saves_at_the_end, old_nothing, False, False, id="saving at the end"),
        pytest.param(run_that_saves_at_the_end, old_model, True, False, id="saving at the end, over a model"),
    ],
)
def test_a_run_that_is_killed_anywhere_loses_nothing_complete_and_goes_on(
    tmp_path: Path, run: Callable[..., None], older: Callable[[Path], None], overwrite: bool, resumes: bool
) -> None:
    number, was_killed = 0, True
    while was_killed:
        number += 1
        place = tmp_path / str(number)
        place.mkdir()
        older(place)
        before = complete_in(place)

        was_killed = run_killed(partial(run, place / "save", "new", overwrite=overwrite, resumes=resumes), number)

        after = complete_in(place)
        assert not before or after, f"nothing complete is left after change {number}"
        if resumes:
            assert {entry for entry in before if entry.startswith("checkpoint")} <= after
        go_on(place / "save")
        assert {"model new", "checkpoint new"} <= complete_in(place)
        assert names(place) == ["save"], f"something is left beside the folder after change {number}"
        leftovers = [name for name in names(place / "save") if name.endswith((".moving", "final.partial"))]
        assert not leftovers
    assert number > 3
