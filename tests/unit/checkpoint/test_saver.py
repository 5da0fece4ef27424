"""Whatever happens to a save, training goes on with the same numbers, and what was complete stays."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.compared_runs import assert_equal_tensors, assert_goes_on_exactly, manifest_of, steps_of

from mobius.checkpoint import folders, saver, tensor_files
from mobius.config.cli import given_options, parse_args
from mobius.errors import CheckpointError
from mobius.ranks import Ranks
from mobius.reporting.trainer_state import TrainerState
from mobius.training.loop import TrainingLoop
from mobius.training.run import run_training

Run = Callable[..., None]
OPTIONS = "--num_iterations 12 --save_steps 4 --save_total_limit 0 --learning_rate 1e-3 --save_params none"
Fault = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _same_limits_afterwards() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def resume(*arguments: str) -> None:
    words = ["--device", "cpu", "--save_params", "none", "--save_results", "resumed.txt", *arguments]
    run_training(parse_args(words, num_ranks=1), Ranks(0, 1, 0), given=given_options(words))


def full_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    written = tensor_files.save_file

    def save_file(values: Any, path: Path, **more: Any) -> None:
        if "checkpoint-8" in str(path) and path.name.startswith("optimizer"):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        written(values, path, **more)

    monkeypatch.setattr(tensor_files, "save_file", save_file)


def full_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, limits = folders.create_partial, resource.getrlimit(resource.RLIMIT_FSIZE)

    def create_partial(save_dir: Path, step: int) -> Path:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if step == 8 else limits[0], limits[1]))
        return begun(save_dir, step)

    monkeypatch.setattr(saver, "create_partial", create_partial)


def full_before(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage
    free = iter([None, 12345])

    def check_disk_space(save_dir: Path, num_bytes: int) -> None:
        with monkeypatch.context() as patch:
            if (left := next(free, None)) is not None:
                patch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=left))
            tensor_files.check_disk_space(save_dir, num_bytes)

    monkeypatch.setattr(saver, "check_disk_space", check_disk_space)


def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Path.mkdir

    def mkdir(path: Path, *arguments: Any, **more: Any) -> None:
        if path.name == "checkpoint-8.partial":
            raise OSError(errno.EROFS, "Read-only file system")
        made(path, *arguments, **more)

    monkeypatch.setattr(Path, "mkdir", mkdir)


def cannot_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "checkpoint-8.partial":
            raise OSError(errno.EIO, "Input/output error")
        return renamed(path, target)

    monkeypatch.setattr(Path, "rename", rename)


FAULTS: dict[str, tuple[Fault, str]] = {
    "the disk is full in the middle of a file": (full_in_the_middle, "No space left on device; .* is free. Free some"),
    "the system refuses the rest of a file": (full_by_the_system, "cannot write .*File too large"),
    "the disk has too little space": (full_before, "a checkpoint in .* needs .*, 12.1 KiB is free. Free some space"),
    "the folder has become read-only": (read_only, "cannot make .*checkpoint-8.partial: Read-only file system"),
    "the disk fails when the checkpoint gets its name": (cannot_be_named, "cannot rename .*: Input/output error"),
}


@pytest.mark.parametrize(("fault", "told"), FAULTS.values(), ids=FAULTS)
def test_a_save_that_fails_is_told_and_changes_nothing_else(
    run: Run,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    told: str,
) -> None:
    run(*OPTIONS.split(), "--save_dir", "whole", "--save_results", "whole.txt")
    with monkeypatch.context() as patch:
        fault(patch)

        run(*OPTIONS.split())

    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    start = "checkpoint of step 8 is not saved, and training goes on: "
    assert warning.getMessage().startswith(start)
    caplog.clear()
    with pytest.raises(CheckpointError, match=told):
        raise CheckpointError(warning.getMessage())
    assert f"The last good checkpoint is {workplace / 'out' / 'checkpoint-4'}" in warning.getMessage()
    assert sorted(path.name for path in Path("out").glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-4"]
    assert steps_of(Path("out")) == steps_of(Path("whole"))
    for name in ("", "checkpoint-4", "checkpoint-12"):
        assert_equal_tensors(Path("whole", name), Path("out", name))


def test_training_waits_for_a_slow_disk_only_when_the_next_save_is_due(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, after_step = saver.write_stage, TrainingLoop._after_step
    is_at_step_7, events = threading.Event(), list[str]()

    def write_stage(folder: Path, stage: tensor_files.StageFiles, *arguments: Any, **more: Any) -> Any:
        if "checkpoint-4" in folder.name:
            assert is_at_step_7.wait(30), "training waits for the disk"
            time.sleep(0.4)  # longer than a step takes
        result = written(folder, stage, *arguments, **more)
        events.append(folder.name)
        return result

    def note(self: TrainingLoop, metrics: Any, step_gather: Any) -> Any:
        events.append(f"step {metrics.step}")
        if metrics.step == 7:
            is_at_step_7.set()
        return after_step(self, metrics, step_gather)

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


def test_a_clock_that_jumps_misleads_no_save_and_no_choice_of_the_newest(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*OPTIONS.split(), "--save_dir", "whole", "--save_results", "whole.txt")
    real, jumps = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() - 86400.0 * next(jumps) * (-1) ** next(jumps))

    run(*OPTIONS.split(), "--max_run_time", "60", "--num_iterations", "12")
    for number, name in enumerate(("checkpoint-12", "checkpoint-8", "checkpoint-4")):
        os.utime(Path("out", name), (10**9 + number, 10**9 + number))
    shutil.rmtree("out/checkpoint-12")
    resume("--resume_from_checkpoint", "true", "--save_dir", "out")

    assert_goes_on_exactly(Path("whole"), Path("out"), step=8)
    assert manifest_of(Path("out/checkpoint-12"))["step"] == 12


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
        with pytest.raises(CheckpointError, match="another run is writing to .*/out"):
            resume("--resume_from_checkpoint", "true", "--save_dir", "out")
        with pytest.raises(CheckpointError, match="another run is writing to .*/out"):
            run(*OPTIONS.split(), "--overwrite_output_dir")

    assert sorted(str(path) for path in Path("out").rglob("*")) == before


def test_older_checkpoints_are_removed_but_the_limit_and_none_other(run: Run, workplace: Path) -> None:
    run(*OPTIONS.split(), "--save_steps", "2", "--save_total_limit", "3")

    names = sorted(path.name for path in Path("out").glob("checkpoint-*"))
    assert names == ["checkpoint-10", "checkpoint-12", "checkpoint-8"]


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

    monkeypatch.setattr(saver.Manifest, "to_json", no_json)
    run(*OPTIONS.split(), "--num_iterations", "4")

    (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told.startswith("checkpoint of step 4 is not saved, and the model is saved next: ValueError: Out of range")
    assert "in no_json\n" in caplog.text  # where, which only a traceback tells
    assert not list(Path("out").glob("checkpoint-*"))


def test_the_disk_that_is_measured_is_the_one_that_checkpoints_go_to(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Path] = []
    monkeypatch.setattr(saver, "_WORTH_MEASURING", 0)
    monkeypatch.setattr(saver, "measure_write_rate", lambda folder: measured.append(folder.resolve()) or 1e9)
    Path("elsewhere").mkdir()
    Path("link").symlink_to("elsewhere")
    run(*OPTIONS.split(), "--num_iterations", "4", "--save_dir", "link")
    assert measured == [workplace / "elsewhere"]


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


def test_a_run_that_is_to_save_no_checkpoint_needs_no_room_for_one(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free_bytes(monkeypatch, 20 * 2**20)

    run("--save_steps", "4")

    assert (workplace / "out" / "config.json").is_file()
    assert "is free" not in caplog.text


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

    assert saver.count_saves(config, num_steps_done=done[0], epochs_done=done[1], epochs=3.4) == expected
