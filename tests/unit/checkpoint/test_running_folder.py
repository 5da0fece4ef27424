"""A run that saves as it goes owns its folder from the first step on; a kill at any moment loses nothing complete."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from mobius.checkpoint.run_folder import OutputFolder, lock_if_free
from mobius.errors import CheckpointError

SETTINGS = ("training_args.yaml", "plan.json")
REFUSED, DONE, ENDED_EARLY = 40, 0, 41
CHANGES = ("mkdir", "rename", "replace", "unlink", "rmdir")
"""Calls that change names."""


@pytest.fixture(autouse=True)
def _no_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def make(save_dir: Path, *, overwrite: bool = False, resumes: bool = False, **files: Path) -> OutputFolder:
    options = {f"--{name}": path for name, path in files.items()}
    return OutputFolder(save_dir, overwrite=overwrite, files=options, keeps_checkpoints=True, resumes=resumes)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    for name in SETTINGS:
        (output.folder / name).write_text("settings")
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
    (output.folder / "metrics.jsonl").write_text("{}\n")
    save_checkpoint(output.folder, step, mark, number=step)
    output.remove_older_results()
    export(output, mark)
    output.commit()
    output.close()


def run_that_saves_at_the_end(save_dir: Path, mark: str, *, overwrite: bool = False, resumes: bool = False) -> None:
    output = OutputFolder(save_dir, overwrite=overwrite, files={}, resumes=resumes)
    output.prepare({})
    for name in SETTINGS:
        (output.folder / name).write_text("settings")
    output.begin()
    export(output, mark)
    output.commit()


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


def run_until_killed(run: Callable[[], None], number: int) -> int:
    """Run in a process of its own that ends, as by a kill, in place of its `number`-th change; its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = 0

    def killing(change: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            nonlocal count
            count += 1
            if count == number:
                os._exit(ENDED_EARLY)
            return change(*arguments, **options)

        return call

    logging.disable()
    for name in CHANGES:
        setattr(os, name, killing(getattr(os, name)))
    try:
        run()
    except CheckpointError:
        os._exit(REFUSED)
    except BaseException:
        os._exit(99)
    os._exit(DONE)


def go_on(save_dir: Path) -> None:
    """Do what a user, or a launcher that restarts, does after a kill: resume if there is a checkpoint, else start."""
    if [*save_dir.glob("checkpoint-*[0-9]/checkpoint.json")]:
        whole_run(save_dir, "new", resumes=True, step=20)
        return
    with contextlib.suppress(CheckpointError):  # told that there is a model; the user asks again
        whole_run(save_dir, "new", overwrite=True)
        return
    whole_run(save_dir, "new", overwrite=True)


# --- the life of a run


def test_the_folder_has_its_name_from_the_first_step_on(tmp_path: Path) -> None:
    output = make(tmp_path / "save")
    output.prepare({"--save_dir": 10})
    (output.folder / "plan.json").write_text("plan")
    assert names(tmp_path) == ["save.partial"]
    assert (output.folder, output.training_folder) == (tmp_path / "save.partial", tmp_path / "save")

    output.begin()

    assert names(tmp_path) == ["save"]
    assert output.folder == output.training_folder == tmp_path / "save"
    assert names(output.folder) == ["plan.json"]
    assert output.path_in_folder(tmp_path / "save" / "a.pt") == tmp_path / "save" / "a.pt"


def test_a_run_that_saves_at_the_end_does_not_begin_in_its_folder(tmp_path: Path) -> None:
    output = OutputFolder(tmp_path / "save", overwrite=False, files={})
    output.prepare({})

    output.begin()
    output.begin_export()
    output.remove_older_results()

    assert names(tmp_path) == ["save.partial"]
    assert output.folder == output.training_folder == output.export_folder == tmp_path / "save.partial"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()

    begun(tmp_path / "save")

    assert names(tmp_path) == ["save"]
    assert names(tmp_path / "save") == sorted(SETTINGS)


def test_the_model_is_whole_in_the_folder_only_when_it_is_committed(tmp_path: Path) -> None:
    output = begun(tmp_path / "save")
    save_checkpoint(output.folder, 10, "ten")
    export(output, "end")
    assert not (tmp_path / "save" / "config.json").exists()

    output.commit()

    assert names(output.folder) == [
        *("checkpoint-10", "config.json", "model.safetensors", "plan.json", "templates", "training_args.yaml")
    ]
    assert (output.folder / "templates" / "tool.jinja").read_text() == "end"


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

    save_checkpoint(output.folder, 1, "one")
    output.remove_older_results()
    output.remove_older_results()

    assert output.older_results is None
    assert names(tmp_path) == ["save"]
    assert names(tmp_path / "save") == ["checkpoint-1", *sorted(SETTINGS)]


def test_what_the_run_itself_has_saved_is_no_older_result_on_any_rank(tmp_path: Path) -> None:
    other, first = make(tmp_path / "save"), begun(tmp_path / "save")
    assert first.older_results is None

    save_checkpoint(first.folder, 1, "one")

    assert (other.older_results, first.older_results) == (None, None)


def test_older_results_go_with_the_model_where_no_checkpoint_came(tmp_path: Path) -> None:
    saved_model(tmp_path / "save", "old")
    output = begun(tmp_path / "save", overwrite=True)
    export(output, "new")

    output.commit()

    assert names(tmp_path) == ["save"]
    assert complete_in(tmp_path) == {"model new"}


def test_older_results_that_cannot_be_removed_are_told_and_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved_model(tmp_path / "save", "old")
    output = begun(tmp_path / "save", overwrite=True)
    save_checkpoint(output.folder, 1, "one")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        output.remove_older_results()

    assert "save.replaced cannot be removed" in caplog.text
    output.close()
    make(tmp_path / "save", resumes=True).prepare({})
    assert names(tmp_path) == ["save", "save.partial"], "the next start tries again"


def test_a_name_that_was_taken_while_the_run_was_prepared_is_left_alone(tmp_path: Path) -> None:
    output = make(tmp_path / "save")
    output.prepare({})
    saved_model(tmp_path / "save", "theirs")

    with pytest.raises(CheckpointError, match=r"/save exists and is not empty"):
        output.begin()

    output.discard()
    assert names(tmp_path) == ["save"]
    assert complete_in(tmp_path) == {"model theirs"}


def test_a_run_that_has_come_while_this_one_was_prepared_is_not_replaced(tmp_path: Path) -> None:
    output = make(tmp_path / "save", overwrite=True)
    output.prepare({})
    (tmp_path / "save.partial").rename(tmp_path / "aside")
    other = begun(tmp_path / "save")
    save_checkpoint(other.folder, 1, "theirs")
    (tmp_path / "aside").rename(tmp_path / "save.partial")

    with pytest.raises(CheckpointError, match="another run is writing"):
        output.begin()

    assert complete_in(tmp_path / "save") == {"checkpoint theirs"}


def test_files_and_folders_have_the_modes_of_the_user(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        whole_run(tmp_path / "save", "new")
    finally:
        os.umask(before)

    for path in [tmp_path / "save", *(tmp_path / "save").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path


# --- resuming


def test_a_run_resumes_into_its_folder_without_leave_to_overwrite(tmp_path: Path) -> None:
    first = begun(tmp_path / "save")
    (first.folder / "metrics.jsonl").write_text("lines\n")
    save_checkpoint(first.folder, 10, "ten")
    first.close()

    second = make(tmp_path / "save", resumes=True)
    second.prepare({})
    (second.folder / "plan.json").write_text("second")
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
    (output.folder / "plan.json").write_text("other")

    output.discard()

    assert names(tmp_path) == ["save"]
    assert {path: path.read_text() for path in (tmp_path / "save").rglob("*") if path.is_file()} == before
    begun(tmp_path / "save", resumes=True)


def test_resuming_where_there_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    saved_model(tmp_path / "save", "model")

    for name in ("save", "absent"):
        with pytest.raises(CheckpointError, match=rf"/{name} holds no checkpoint to go on from"):
            make(tmp_path / name, resumes=True).prepare({})


def test_a_folder_named_like_a_checkpoint_is_none_without_its_mark(tmp_path: Path) -> None:
    begun(tmp_path / "save").close()
    (tmp_path / "save" / "checkpoint-10").mkdir()
    (tmp_path / "save" / "checkpoint-11.partial").mkdir()
    (tmp_path / "save" / "checkpoint-11.partial" / "model.safetensors").touch()
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(CheckpointError, match="holds no checkpoint to go on from"):
        make(tmp_path / "save", resumes=True).prepare({})

    assert sorted(tmp_path.rglob("*")) == before


def test_the_single_files_of_the_resumed_run_may_be_replaced(tmp_path: Path) -> None:
    whole_run(tmp_path / "save", "old")
    (tmp_path / "p.pt").touch()

    with pytest.raises(CheckpointError, match=r"--save_params .*p\.pt exists"):
        make(tmp_path / "other", save_params=tmp_path / "p.pt").prepare({})
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


def test_a_run_that_saves_at_the_end_may_resume_in_the_folder_of_the_checkpoint_too(tmp_path: Path) -> None:
    whole_run(tmp_path / "save", "old")

    output = OutputFolder(tmp_path / "save", overwrite=False, files={}, resumes=True)
    output.prepare({})
    output.begin()
    export(output, "new")
    output.commit()

    assert complete_in(tmp_path) == {"model new", "checkpoint old"}


def test_a_folder_that_cannot_be_written_is_told_before_the_run_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_run(tmp_path / "save", "old")

    def refuse(*, dir: Path) -> None:  # the administrator may write everywhere, so that modes show nothing
        if dir == tmp_path / "save":
            raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(CheckpointError, match=r"--save_dir .*/save: cannot write there \(Read-only file system\)"):
        make(tmp_path / "save", resumes=True).prepare({})

    assert names(tmp_path) == ["save"]
    monkeypatch.undo()
    begun(tmp_path / "save", resumes=True)


# --- two runs


@pytest.mark.parametrize("second", ["fresh", "overwriting", "resuming", "at the end"])
@pytest.mark.parametrize("first", ["preparing", "running", "resuming", "resumed", "committed"])
def test_a_second_run_in_the_same_folder_is_refused_at_its_start(tmp_path: Path, first: str, second: str) -> None:
    if first in ("resuming", "resumed"):
        whole_run(tmp_path / "save", "old")
    owner = make(tmp_path / "save", resumes=first in ("resuming", "resumed"))
    owner.prepare({})
    (owner.folder / "plan.json").touch()
    if first not in ("preparing", "resuming"):
        owner.begin()
    if first in ("running", "committed"):
        save_checkpoint(owner.folder, 1, "one")
    if first == "committed":
        export(owner, "end")
        owner.commit()
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(
        CheckpointError, match=r"--save_dir .*another run is writing to .*Choose another folder, or wait"
    ):
        OutputFolder(
            tmp_path / "save",
            overwrite=second == "overwriting",
            files={},
            keeps_checkpoints=second != "at the end",
            resumes=second == "resuming",
        ).prepare({})

    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_starts_at_the_same_moment_has_the_folder_or_has_it_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        (tmp_path / "save.partial").rename(tmp_path / "removed by the other run")
        (tmp_path / "save.partial").mkdir()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(CheckpointError, match="another run is writing"):
        make(tmp_path / "save").prepare({})

    assert "save.partial" in names(tmp_path), "it is the other run's"


def test_a_folder_is_free_when_its_run_has_ended(tmp_path: Path) -> None:
    ended = begun(tmp_path / "save")
    save_checkpoint(ended.folder, 1, "one")
    ended.close()
    ended.close()

    begun(tmp_path / "save", resumes=True)


# --- the start after a kill


@pytest.mark.parametrize("has_model", [False, True])
def test_a_folder_with_checkpoints_is_refused_with_the_newest_and_both_ways_on(tmp_path: Path, has_model: bool) -> None:
    output = begun(tmp_path / "save")
    save_checkpoint(output.folder, 40, "forty", number=3)
    save_checkpoint(output.folder, 9, "nine, saved later by a run that was resumed", number=4)
    (output.folder / "checkpoint-50.partial").mkdir()
    (output.folder / "checkpoint-60").mkdir()
    if has_model:
        saved_model(output.folder, "end")
    output.close()
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(CheckpointError) as raised:
        make(tmp_path / "save").prepare({})

    assert "The newest is checkpoint-9." in str(raised.value)
    assert "--resume_from_checkpoint true" in str(raised.value)
    assert "--overwrite_output_dir" in str(raised.value)
    assert ("complete model" in str(raised.value)) == has_model
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("keeps_checkpoints", [True, False])
def test_a_folder_with_checkpoints_is_replaced_on_request(tmp_path: Path, keeps_checkpoints: bool) -> None:
    output = begun(tmp_path / "save")
    save_checkpoint(output.folder, 1, "old")
    output.close()
    output = OutputFolder(tmp_path / "save", overwrite=True, files={}, keeps_checkpoints=keeps_checkpoints)

    output.prepare({})
    assert complete_in(tmp_path / "save") == {"checkpoint old"}
    output.begin()
    if keeps_checkpoints:
        export(output, "new")
    else:
        saved_model(output.folder, "new")
    output.commit()

    assert complete_in(tmp_path) == {"model new"}
    assert "save.replaced" not in names(tmp_path)


def test_a_run_without_a_checkpoint_is_removed_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    output = begun(tmp_path / "save")
    for name in (
        "metrics.jsonl",
        "trainer_log.jsonl",
        "metrics.jsonl.partial",
        "trace.rank0.json",
        "train_results.json",
    ):
        (output.folder / name).touch()
    for name in ("runs", "checkpoint-10.partial", "checkpoint-5.removed", "pt/of the user"):
        (output.folder / name).mkdir(parents=True)
    (output.folder / "runs" / "events").touch()
    (output.folder / "checkpoint-10.partial" / "model.safetensors").touch()
    output.begin_export()
    (output.export_folder / "model.safetensors").touch()
    output.close()

    make(tmp_path / "save").prepare({})

    assert "save is removed: a run ended there before its first checkpoint" in caplog.text
    assert names(tmp_path) == ["save.partial"]
    assert names(tmp_path / "save.partial") == []


@pytest.mark.parametrize(
    "strange", ["thesis.tex", "adapter.safetensors", "notes/of mine.txt", "plan.json missing", "link"]
)
def test_a_folder_with_something_of_somebody_is_never_removed(tmp_path: Path, strange: str) -> None:
    output = begun(tmp_path / "save")
    output.close()
    if strange == "plan.json missing":
        (tmp_path / "save" / "plan.json").unlink()
    elif strange == "link":
        (tmp_path / "save" / "runs").symlink_to(tmp_path)
    else:
        (tmp_path / "save" / strange).parent.mkdir(exist_ok=True)
        (tmp_path / "save" / strange).touch()
    before = sorted(tmp_path.rglob("*"))

    for overwrite, message in ((False, "exists and is not empty"), (True, "something other than a saved model")):
        with pytest.raises(CheckpointError, match=message):
            make(tmp_path / "save", overwrite=overwrite).prepare({})

    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_without_a_checkpoint_is_not_removed_where_it_is_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path / "save").close()
    monkeypatch.chdir(tmp_path / "save")

    with pytest.raises(CheckpointError, match="is the current folder"):
        make(tmp_path / "save").prepare({})

    assert names(tmp_path / "save") == sorted(SETTINGS)


def test_what_is_beside_a_run_without_a_checkpoint_is_not_removed_for_it(tmp_path: Path) -> None:
    begun(tmp_path / "save").close()
    (tmp_path / "save.partial").mkdir()
    (tmp_path / "save.partial" / "thesis.tex").touch()

    with pytest.raises(CheckpointError, match=r"save\.partial holds something other than results \(thesis\.tex\)"):
        make(tmp_path / "save").prepare({})

    assert names(tmp_path / "save.partial") == ["thesis.tex"]


@pytest.mark.parametrize("aside", ["partial", "replaced"])
def test_a_whole_checkpoint_that_has_not_its_name_is_not_removed_with_its_folder(tmp_path: Path, aside: str) -> None:
    output = begun(tmp_path / "save")
    save_checkpoint(output.folder, 10, "ten")
    (output.folder / "checkpoint-10").rename(output.folder / f"checkpoint-10.{aside}")
    output.close()

    with pytest.raises(CheckpointError, match=rf"The newest is checkpoint-10\.{aside}"):
        make(tmp_path / "save").prepare({})

    assert names(tmp_path / "save") == [f"checkpoint-10.{aside}", *sorted(SETTINGS)]
    make(tmp_path / "save", resumes=True).prepare({})


def test_older_results_come_back_where_the_run_that_replaces_them_came_to_nothing(tmp_path: Path) -> None:
    saved_model(tmp_path / "save", "old")
    begun(tmp_path / "save", overwrite=True).close()
    assert names(tmp_path) == ["save", "save.replaced"]

    with pytest.raises(CheckpointError, match="exists and is not empty"):
        make(tmp_path / "save").prepare({})

    assert names(tmp_path) == ["save", "save.partial"]
    assert complete_in(tmp_path / "save") == {"model old"}
    begun(tmp_path / "save", overwrite=True)


@pytest.mark.parametrize("resumes", [False, True])
def test_checkpoints_beside_the_folder_that_it_did_not_move_there_are_told_and_never_removed(
    tmp_path: Path, resumes: bool
) -> None:
    whole_run(tmp_path / "save", "one")
    save_checkpoint(tmp_path / "save.replaced", 7, "other")

    with pytest.raises(CheckpointError, match=r"save\.replaced holds checkpoints, the newest checkpoint-7, .*Rename"):
        make(tmp_path / "save", overwrite=not resumes, resumes=resumes).prepare({})

    assert complete_in(tmp_path) == {"model one", "checkpoint one", "checkpoint other"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_checked_model_whose_run_was_killed_gets_its_place_and_the_run_is_refused(
    tmp_path: Path, overwrite: bool
) -> None:
    output = begun(tmp_path / "save")
    export(output, "end")
    output.close()

    with pytest.raises(CheckpointError, match=r"interrupted run had left a complete, checked model.*further start"):
        make(tmp_path / "save", overwrite=overwrite).prepare({})

    assert complete_in(tmp_path) == {"model end"}
    assert "final.partial" not in names(tmp_path / "save")


def scores_only(save_dir: Path) -> None:
    """What an evaluation without any training leaves; it works as a run that saves at the end."""
    output = OutputFolder(save_dir, overwrite=False, files={})
    output.prepare({})
    for name in (*SETTINGS, "eval_results.json", "all_results.json"):
        (output.folder / name).write_text("scores")
    output.commit()


def test_scores_are_never_removed_without_being_asked(tmp_path: Path) -> None:
    scores_only(tmp_path / "save")
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(CheckpointError, match=r"exists and is not empty.*--overwrite_output_dir"):
        make(tmp_path / "save").prepare({})

    assert sorted(tmp_path.rglob("*")) == before


def test_scores_that_are_replaced_come_back_where_the_run_came_to_nothing(tmp_path: Path) -> None:
    scores_only(tmp_path / "save")
    output = begun(tmp_path / "save", overwrite=True)
    assert output.older_results == tmp_path / "save.replaced"
    output.close()

    second = begun(tmp_path / "save", overwrite=True)
    assert "eval_results.json" in names(tmp_path / "save.replaced")
    export(second, "new")
    second.commit()

    assert names(tmp_path) == ["save"]
    assert "eval_results.json" not in names(tmp_path / "save")


def test_results_of_a_training_that_saved_no_model_are_removed_with_it(tmp_path: Path) -> None:
    output = begun(tmp_path / "save")
    for name in ("train_results.json", "eval_results.json", "all_results.json"):
        (output.folder / name).touch()
    output.close()

    make(tmp_path / "save").prepare({})

    assert names(tmp_path) == ["save.partial"]


def test_scores_beside_the_folder_are_told_and_never_removed(tmp_path: Path) -> None:
    scores_only(tmp_path / "save")
    scores_only(tmp_path / "other")
    (tmp_path / "other").rename(tmp_path / "save.replaced")

    with pytest.raises(CheckpointError, match=r"save\.replaced holds results, which an interrupted run"):
        make(tmp_path / "save", overwrite=True).prepare({})

    assert "eval_results.json" in names(tmp_path / "save.replaced")


def test_a_folder_is_kept_free_while_it_is_settled(tmp_path: Path) -> None:
    with lock_if_free(tmp_path / "save") as is_free:
        assert is_free, "there is none"
    output = begun(tmp_path / "save")
    save_checkpoint(output.folder, 1, "one")
    with lock_if_free(tmp_path / "save") as is_free:
        assert not is_free
    output.close()

    with lock_if_free(tmp_path / "save") as is_free:
        assert is_free
        with pytest.raises(CheckpointError, match="another run is writing"):
            make(tmp_path / "save", resumes=True).prepare({})

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
    save_checkpoint(output.folder, 4, "old")
    save_checkpoint(output.folder, 5, "old")
    output.close()


@pytest.mark.parametrize(
    ("run", "older", "overwrite", "resumes"),
    [
        pytest.param(whole_run, old_nothing, False, False, id="fresh"),
        pytest.param(whole_run, old_model, True, False, id="over a model"),
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
    number, code = 0, ENDED_EARLY
    while code == ENDED_EARLY:
        number += 1
        place = tmp_path / str(number)
        place.mkdir()
        older(place)
        before = complete_in(place)

        code = run_until_killed(
            lambda place=place: run(place / "save", "new", overwrite=overwrite, resumes=resumes), number
        )

        after = complete_in(place)
        assert not before or after, f"nothing complete is left after change {number}"
        if resumes:
            assert {entry for entry in before if entry.startswith("checkpoint")} <= after
        if {"model new", "model old"} <= after and {"save", "save.partial"} <= {
            *names(place)
        }:  # the user has to decide
            with pytest.raises(CheckpointError, match=r"save\.partial holds a complete model"):
                make(place / "save", overwrite=True).prepare({})
            (place / "save.partial" / "config.json").unlink()
        go_on(place / "save")
        assert {"model new", "checkpoint new"} <= complete_in(place)
        assert names(place) == ["save"], f"something is left beside the folder after change {number}"
        leftovers = [name for name in names(place / "save") if name.endswith((".moving", "final.partial"))]
        assert not leftovers
    assert code == DONE
    assert number > 3


def test_a_start_that_is_killed_while_it_settles_loses_nothing_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """The states that a kill leaves are met again by a start that is killed too."""
    number, code = 0, ENDED_EARLY
    while code == ENDED_EARLY:
        number += 1
        place = tmp_path / str(number)
        place.mkdir()
        old_run(place)
        output = begun(place / "save", overwrite=True)
        save_checkpoint(output.folder, 1, "new")
        export(output, "new")
        output.close()

        code = run_until_killed(lambda place=place: make(place / "save", resumes=True).prepare({}), number)

        assert {"model new", "checkpoint new"} & complete_in(place) == {"model new", "checkpoint new"}
        whole_run(place / "save", "newest", resumes=True, step=20)
        assert names(place) == ["save"]
        assert complete_in(place) == {"model newest", "checkpoint newest", "checkpoint new"}
    assert code == DONE
    assert number > len(CHANGES)
