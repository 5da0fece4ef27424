"""Whatever happens to a save, training goes on with the same numbers, and what was complete stays."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.runs import assert_equal_tensors, steps_of
from harness.sessions import resume

from mobius.checkpoint import saver, tensor_files
from mobius.checkpoint.manifest import Manifest
from mobius.checkpoint.run_settings import count_saves
from mobius.config.cli import parse_args
from mobius.errors import CheckpointError
from mobius.reporting.trainer_state import TrainerState
from mobius.training.loop import TrainingLoop

Run = Callable[..., None]
OPTIONS = "--num_iterations 12 --save_steps 4 --save_total_limit 0 --learning_rate 1e-3 --save_params none"
Fault = Callable[[pytest.MonkeyPatch], None]


def full_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    written = tensor_files.save_file

    def save_file(tensors: Any, path: Path, parts: Any) -> Any:
        if "checkpoint-4" in str(path) and path.name.startswith("optimizer"):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(tensors, path, parts)

    monkeypatch.setattr(tensor_files, "save_file", save_file)


def full_before(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage
    free = iter([None, 12345])

    def check_disk_space(save_dir: Path, num_bytes: int) -> None:
        with monkeypatch.context() as patch:
            if (left := next(free, None)) is not None:
                patch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=left))
            tensor_files.check_disk_space(save_dir, num_bytes)

    monkeypatch.setattr(saver, "check_disk_space", check_disk_space)


def cannot_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "checkpoint-4.partial":
            raise OSError(errno.EIO, "Input/output error")
        return renamed(path, target)

    monkeypatch.setattr(Path, "rename", rename)


FAULTS: dict[str, tuple[Fault, str]] = {
    "full in the middle": (full_in_the_middle, "No space left on device; .* is free. Free some"),
    "full before": (full_before, "a checkpoint in .* needs .*, 12.1 KiB is free. Free some space"),
    "without a name": (cannot_be_named, "cannot rename .*: Input/output error"),
}


def test_a_save_that_fails_is_told_and_changes_nothing_else(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = f"{OPTIONS} --num_iterations 6 --save_steps 2".split()
    run(*options, "--save_dir", "whole")
    for name, (fault, told) in FAULTS.items():
        caplog.clear()
        with monkeypatch.context() as patch:
            fault(patch)
            run(*options, "--save_dir", name, "--overwrite_output_dir")

        (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert re.match(f"checkpoint of step 4 is not saved, and training goes on: .*{told}", warning)
        assert f"The last good checkpoint is {workplace / name / 'checkpoint-2'}" in warning
        assert sorted(path.name for path in Path(name).glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]
        assert steps_of(Path(name)) == steps_of(Path("whole"))
        for folder in ("", "checkpoint-2", "checkpoint-6"):
            assert_equal_tensors(Path("whole", folder), Path(name, folder))


def test_training_waits_for_a_slow_disk_only_when_the_next_save_is_due(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, after_step = saver.write_stage, TrainingLoop._after_step
    is_at_step_7, events = threading.Event(), list[str]()

    def write_stage(folder: Path, stage: tensor_files.Files, *arguments: Any, **more: Any) -> Any:
        if "checkpoint-4" in folder.name:
            assert is_at_step_7.wait(30), "training waits for the disk"
            time.sleep(0.4)  # longer than a step takes
        result = written(folder, stage, *arguments, **more)
        events.append(folder.name)
        return result

    def note(self: TrainingLoop, metrics: Any) -> Any:
        events.append(f"step {metrics.step}")
        if metrics.step == 7:
            is_at_step_7.set()
        return after_step(self, metrics)

    monkeypatch.setattr(saver, "write_stage", write_stage)
    monkeypatch.setattr(TrainingLoop, "_after_step", note)

    run(*OPTIONS.split())

    assert events.index("step 7") < events.index("checkpoint-4.partial")
    last = max(place for place, event in enumerate(events) if event == "checkpoint-4.partial")
    assert last < events.index("step 9"), "the save of step 8 waits for the one of step 4"
    assert {"checkpoint-4", "checkpoint-8"} <= set(os.listdir("out"))


def test_training_does_not_wait_for_the_text_of_its_log(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, to_json = list[threading.Thread](), TrainerState.to_json

    def note(self: TrainerState) -> str:
        threads.append(threading.current_thread())
        return to_json(self)

    monkeypatch.setattr(TrainerState, "to_json", note)
    run(*OPTIONS.split(), "--num_iterations", "5", "--save_steps", "2")

    assert [thread is threading.main_thread() for thread in threads] == [False, False, True], (
        "the last is the run's own"
    )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Another run at work there."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def test_a_second_run_in_the_folder_is_refused_and_touches_nothing(run: Run, workplace: Path) -> None:
    run(*OPTIONS.split())
    torn = Path("out/checkpoint-16.partial")
    torn.mkdir()
    (torn / "checkpoint.json").touch()
    before = sorted(str(path) for path in Path("out").rglob("*"))

    with locked(Path("out")):
        with pytest.raises(CheckpointError, match="out: another run is writing to it"):
            resume("true", "--save_dir", "out")
        with pytest.raises(CheckpointError, match="out: another run is writing to it"):
            run(*OPTIONS.split(), "--overwrite_output_dir")

    assert sorted(str(path) for path in Path("out").rglob("*")) == before


def test_a_checkpoint_that_is_complete_is_told_as_saved_though_an_older_one_cannot_be_removed(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    renamed = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "checkpoint-4":
            raise OSError(errno.EACCES, "Permission denied")
        return renamed(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    run(*OPTIONS.split(), "--save_total_limit", "1")

    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    cannot = f"cannot remove {workplace / 'out' / 'checkpoint-4'}: Permission denied"
    assert [text.partition(cannot)[1] for text in told] == [cannot, cannot]
    assert not [text for text in told if "is not saved" in text]
    assert sorted(path.name for path in Path("out").glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-4"]


def test_whatever_goes_wrong_at_the_end_of_a_save_is_told(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_json(manifest: object) -> str:
        raise ValueError("Out of range float values are not JSON compliant")

    monkeypatch.setattr(Manifest, "to_json", no_json)
    run(*OPTIONS.split(), "--num_iterations", "4")

    (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told.startswith("checkpoint of step 4 is not saved, and the model is saved next: ValueError: Out of range")
    assert "in no_json\n" in caplog.text  # where, which only a traceback tells
    assert not list(Path("out").glob("checkpoint-*"))


def free_bytes(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=num_bytes))


def test_a_disk_without_room_for_a_checkpoint_is_told_before_training(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes(monkeypatch, 20 * 2**20)

    with pytest.raises(CheckpointError, match=r"a checkpoint takes 5\d\.\d MiB, the model 1.\d MiB; 20.0 MiB is free"):
        run("--save_steps", "2")

    assert not [path.name for path in workplace.iterdir() if path.name.startswith("out")]


def test_room_for_some_checkpoints_only_is_told_at_the_start(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free_bytes(monkeypatch, 120 * 2**20)

    run("--save_steps", "1", "--save_total_limit", "2")

    assert "room for 2 of the 3 further checkpoints" in caplog.text


@pytest.mark.parametrize(
    ("options", "done", "expected"),
    [
        ("--num_iterations 12 --save_steps 4", (0, 0.0), 3),
        ("--num_iterations 12 --save_steps 4", (5, 1.0), 2),
        ("--num_iterations 12 --save_steps 0.5", (0, 0.0), 2),
        ("--num_iterations 12 --save_steps 13", (0, 0.0), 0),
        ("--num_iterations 12 --save_strategy epoch", (0, 0.0), 3),
        ("--num_iterations 12 --save_strategy epoch", (8, 2.5), 1),
    ],
)
def test_saves_of_a_run_are_counted(options: str, done: tuple[int, float], expected: int) -> None:
    config = parse_args(["--device", "cpu", *options.split()], num_ranks=1)

    assert count_saves(config, num_steps_done=done[0], epochs_done=done[1], epochs=3.4) == expected


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "none is due in 25 steps (--save_steps 500)"),
        ("--save_steps 25", "the newest 2 are kept in out"),
        ("--save_steps 0.5 --save_total_limit 0", "all are kept in out"),
        ("--save_strategy epoch", "the newest 2 are kept in out"),
    ],
)
def test_a_run_says_before_it_starts_whether_a_checkpoint_is_due(words: str, text: str) -> None:
    assert saver.describe_kept(parse_args(words.split()).saving, 25, Path("out")) == text
