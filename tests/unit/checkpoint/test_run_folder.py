"""Results appear whole under their final name or not at all, and what would stop that is told before training."""

import os
from pathlib import Path

import pytest

from mobius.atomic_files import atomic_write
from mobius.checkpoint.run_folder import OutputFolder
from mobius.errors import CheckpointError


def make(
    save_dir: Path, *, overwrite: bool = False, params: Path | None = None, results: Path | None = None
) -> OutputFolder:
    files = {"--save_params": params, "--save_results": results}
    return OutputFolder(save_dir, overwrite=overwrite, files={o: path for o, path in files.items() if path is not None})


def saved_model(folder: Path, mark: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(mark)
    (folder / "model.safetensors").write_text(mark)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_has_the_final_name_before_the_commit(tmp_path: Path) -> None:
    output = make(tmp_path / "deep" / "save")
    output.prepare({"--save_dir": 10})
    (output.partial / "config.json").write_text("new")
    assert names(tmp_path / "deep") == ["save.partial"]

    output.commit()

    assert names(tmp_path / "deep") == ["save"]
    assert (tmp_path / "deep" / "save" / "config.json").read_text() == "new"


def test_an_existing_folder_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    saved_model(tmp_path / "save", "old")

    with pytest.raises(CheckpointError, match=r"--save_dir .*/save exists.*--overwrite_output_dir"):
        make(tmp_path / "save").prepare({})

    assert names(tmp_path) == ["save"]


def test_an_empty_folder_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    output = make(tmp_path / "save")

    output.prepare({})
    (output.partial / "a").touch()
    output.commit()

    assert names(tmp_path / "save") == ["a"]


def test_overwriting_replaces_the_old_model_as_a_whole_and_only_at_the_commit(tmp_path: Path) -> None:
    saved_model(tmp_path / "save", "old")
    (tmp_path / "save" / "stale.safetensors").touch()
    output = make(tmp_path / "save", overwrite=True)

    output.prepare({})
    (output.partial / "config.json").write_text("new")
    assert (tmp_path / "save" / "config.json").read_text() == "old"
    output.commit()

    assert names(tmp_path) == ["save"]
    assert names(tmp_path / "save") == ["config.json"]


def test_an_error_of_the_disk_without_a_number_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("the quota is used up")

    monkeypatch.setattr(Path, "mkdir", refuse)

    with pytest.raises(CheckpointError, match=r"cannot write there \(the quota is used up\)"):
        make(tmp_path / "save").prepare({})


def test_older_results_are_told_until_they_are_replaced(tmp_path: Path) -> None:
    saved_model(tmp_path / "save", "old")
    output = make(tmp_path / "save", overwrite=True)

    output.prepare({})
    assert output.older_results == tmp_path / "save"
    (output.partial / "config.json").write_text("new")
    (output.partial / "model.safetensors").write_text("new")
    output.commit()

    assert output.older_results is None


def test_overwriting_never_removes_what_is_not_a_saved_model(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "thesis.tex").touch()

    with pytest.raises(CheckpointError, match=r"other than a saved model \(thesis\.tex\)"):
        make(tmp_path / "save", overwrite=True).prepare({})

    assert names(tmp_path / "save") == ["thesis.tex"]


def test_the_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved_model(tmp_path / "save", "old"))

    with pytest.raises(CheckpointError, match="is the current folder"):
        make(Path(), overwrite=True).prepare({})


def test_a_mount_point_is_refused() -> None:
    with pytest.raises(CheckpointError, match="--save_dir /proc is a mount point"):
        make(Path("/proc"), overwrite=True).prepare({})


def test_a_run_in_a_mount_point_is_told_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "save" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text("{}")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "save")

    with pytest.raises(
        CheckpointError, match=rf"Mount the folder above it, or .*--resume_from_checkpoint {checkpoint} "
    ):
        OutputFolder(tmp_path / "save", overwrite=False, files={}, resumes=True).prepare({})


def test_the_root_and_links_that_lead_in_a_circle_are_refused(tmp_path: Path) -> None:
    (loop := tmp_path / "loop").symlink_to("loop")

    with pytest.raises(CheckpointError, match="--save_dir / is the root of all folders. Use a folder inside it"):
        make(Path("/"), overwrite=True).prepare({})
    for save_dir in (loop, loop / "save"):
        with pytest.raises(CheckpointError, match=f"--save_dir {save_dir}"):
            make(save_dir).prepare({})
    with pytest.raises(CheckpointError, match=f"--save_params {loop}"):
        make(tmp_path / "save", params=loop).prepare({})

    assert names(tmp_path) == ["loop"]


def test_existing_files_are_refused_together_with_the_folder_in_one_message(tmp_path: Path) -> None:
    saved_model(tmp_path / "save", "old")
    (tmp_path / "params.pt").touch()
    (tmp_path / "results").mkdir()
    output = make(tmp_path / "save", params=tmp_path / "params.pt", results=tmp_path / "results")

    with pytest.raises(CheckpointError) as raised:
        output.prepare({})

    lines = str(raised.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("--save_dir")
    assert lines[1].startswith(f"--save_params {tmp_path / 'params.pt'} exists.")
    assert "--overwrite_output_dir" in lines[1]
    assert lines[2] == f"--save_results {tmp_path / 'results'} is a folder. Name a file."


def test_an_existing_file_may_be_overwritten_on_request(tmp_path: Path) -> None:
    (tmp_path / "params.pt").write_text("old")

    make(tmp_path / "save", overwrite=True, params=tmp_path / "params.pt").prepare({})

    assert (tmp_path / "params.pt").read_text() == "old"


@pytest.mark.parametrize("option", ["--save_dir", "--save_params"])
def test_a_place_that_cannot_be_written_is_found_before_training(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").touch()
    places = {"--save_dir": tmp_path / "save", "--save_params": tmp_path / "p.pt"} | {option: tmp_path / "file" / "x"}
    output = make(places["--save_dir"], params=places["--save_params"])

    with pytest.raises(CheckpointError, match=rf"{option} .*/file/x: cannot write"):
        output.prepare({})

    assert names(tmp_path) == ["file"]


def test_a_folder_that_even_the_administrator_cannot_write_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--save_dir /proc/save_ckpt: cannot write there \(.+\)"):
        make(Path("/proc/save_ckpt")).prepare({})


def test_too_little_disk_space_is_told_with_what_is_needed_and_what_is_free(tmp_path: Path) -> None:
    output = make(tmp_path / "save", params=tmp_path / "p.pt")

    with pytest.raises(CheckpointError, match=r"--save_dir and --save_params need 3145728\.0 GiB .* GiB is free"):
        output.prepare({"--save_dir": 2**51, "--save_params": 2**50})

    assert names(tmp_path) == []


def test_what_a_crashed_run_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "save.partial").mkdir()
    (tmp_path / "save.partial" / "half.safetensors").touch()
    output = make(tmp_path / "save")

    output.prepare({})

    assert names(output.partial) == []


def test_a_run_that_is_still_writing_keeps_its_folder(tmp_path: Path) -> None:
    first = make(tmp_path / "save")
    first.prepare({})
    (first.partial / "metrics.jsonl").touch()

    with pytest.raises(CheckpointError, match="another run is writing"):
        make(tmp_path / "save").prepare({})

    assert names(first.partial) == ["metrics.jsonl"]


def test_a_name_that_was_taken_during_the_run_is_not_overwritten(tmp_path: Path) -> None:
    output = make(tmp_path / "save")
    output.prepare({})
    (output.partial / "config.json").write_text("mine")
    saved_model(tmp_path / "save", "theirs")

    with pytest.raises(CheckpointError, match=r"results of this run are in .*save\.partial"):
        output.commit()

    assert (tmp_path / "save" / "config.json").read_text() == "theirs"
    assert (output.partial / "config.json").read_text() == "mine"


def test_a_file_inside_the_folder_is_placed_inside_the_partial_one(tmp_path: Path) -> None:
    output = make(tmp_path / "save", params=tmp_path / "save" / "pt" / "p.pt", results=tmp_path / "r.txt")
    output.prepare({"--save_params": 1})

    assert output.path_in_folder(tmp_path / "save" / "pt" / "p.pt") == output.partial / "pt" / "p.pt"
    assert output.path_in_folder(tmp_path / "r.txt") == tmp_path / "r.txt"
    assert names(output.partial) == ["pt"]


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


def test_what_is_discarded_is_gone_and_the_older_results_are_not(tmp_path: Path) -> None:
    saved_model(tmp_path / "save", "old")
    output = make(tmp_path / "save", overwrite=True)
    output.prepare({})

    output.discard()

    assert names(tmp_path) == ["save"]
    assert (tmp_path / "save" / "config.json").read_text() == "old"
    make(tmp_path / "save", overwrite=True).prepare({})


def test_a_rank_that_did_not_prepare_discards_nothing(tmp_path: Path) -> None:
    make(tmp_path / "save").prepare({})

    make(tmp_path / "save").discard()

    assert names(tmp_path) == ["save.partial"]


def names_after(crashed: Path) -> dict[str, str]:
    """Every folder of models below `crashed` with the mark in it; those that are being made have none."""
    marks = {folder.name: folder / "config.json" for folder in crashed.iterdir() if folder.is_dir()}
    return {name: mark.read_text() for name, mark in marks.items() if mark.exists()}


def test_a_kill_between_the_two_renames_is_mended_before_the_next_run_trains(tmp_path: Path) -> None:
    saved_model(tmp_path / "save.replaced", "old")
    saved_model(tmp_path / "save.partial", "new")

    with pytest.raises(CheckpointError, match=r"an interrupted run.* complete.*its name: .*/save\b") as raised:
        make(tmp_path / "save").prepare({})

    assert f"{tmp_path / 'save.replaced'}" in str(raised.value)
    assert names_after(tmp_path) == {"save": "new", "save.replaced": "old"}


@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwriting"])
def test_a_complete_result_that_has_no_name_yet_gets_it_and_the_run_is_refused(tmp_path: Path, overwrite: bool) -> None:
    saved_model(tmp_path / "save.partial", "new")

    with pytest.raises(CheckpointError, match=r"an interrupted run.* complete.*its name: .*/save\b"):
        make(tmp_path / "save", overwrite=overwrite).prepare({})

    assert names_after(tmp_path) == {"save": "new"}
    make(tmp_path / "save", overwrite=True).prepare({})  # asked for now


@pytest.mark.parametrize("name", ["save.partial", "save.replaced"])
def test_a_complete_result_beside_the_folder_is_told_and_never_removed(tmp_path: Path, name: str) -> None:
    saved_model(tmp_path / "save", "one")
    saved_model(tmp_path / name, "other")

    with pytest.raises(CheckpointError, match=rf"{name} holds a complete model"):
        make(tmp_path / "save", overwrite=True).prepare({})

    assert names_after(tmp_path) == {"save": "one", name: "other"}


@pytest.mark.parametrize("name", ["save.partial", "save.replaced"])
def test_what_is_not_from_a_run_is_told_and_never_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").touch()

    with pytest.raises(CheckpointError, match=rf"{name} holds something .*\(thesis\.tex\).*[Rr]ename"):
        make(tmp_path / "save").prepare({})

    assert names(tmp_path / name) == ["thesis.tex"]


def test_a_run_that_is_giving_its_results_their_name_is_left_alone(tmp_path: Path) -> None:
    """Another run starts in the moment between the two renames."""
    saved_model(tmp_path / "save", "old")
    output = make(tmp_path / "save", overwrite=True)
    output.prepare({})
    (output.partial / "model.safetensors").write_text("new")
    (output.partial / "config.json").write_text("new")
    (tmp_path / "save").rename(tmp_path / "save.replaced")

    with pytest.raises(CheckpointError, match="another run is writing"):
        make(tmp_path / "save", overwrite=True).prepare({})

    assert names_after(tmp_path) == {"save.replaced": "old", "save.partial": "new"}


def test_a_device_or_pipe_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    """As `--save_params /dev/null --overwrite_output_dir` would, by a user who may do everything."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(CheckpointError, match=r"--save_params .*pipe is a device or a pipe\. Name a file"):
        make(tmp_path / "save", overwrite=True, params=pipe).prepare({})
    with pytest.raises(OSError, match="no file that could be replaced"), atomic_write(pipe) as temporary:
        temporary.write_text("instead of it")

    assert pipe.is_fifo()
