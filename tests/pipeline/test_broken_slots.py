"""Durable steps after damage, copies, full disks, removed folders: what is whole is found, what is another's stays."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.durable_runs import DISKS, SIX, damage, fail_after_step_5, leave_alone, slots_in
from harness.grids import named
from harness.runs import assert_equal_tensors, steps_of
from harness.sessions import resume
from harness.small_run import Run

from mobius.checkpoint import durable_steps
from mobius.errors import CheckpointError, MobiusError, StateFileError
from mobius.reporting.events import StepMetrics
from mobius.training.loop import StopReason, TrainingLoop

RARELY = f"{DISKS} --save_steps 100"
"""No checkpoints but the durable steps."""


def raw_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.raw"))


def assert_ends_as_left_alone(folder: str) -> None:
    assert steps_of(Path(folder)) == steps_of(Path("whole"))
    assert_equal_tensors(Path("whole"), Path(folder))


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let the folders `disk` and `other` be on a file system of some bytes, of which named files take theirs."""

    def limit(num_bytes: float) -> None:
        def disk_usage(path: object) -> SimpleNamespace:
            return SimpleNamespace(free=int(num_bytes) - raw_bytes(Path()))

        monkeypatch.setattr("mobius.planner.disk_use.shutil", SimpleNamespace(disk_usage=disk_usage))

    return limit


@pytest.mark.parametrize("durable", ["auto", "on", "off"])
def test_a_run_goes_on_though_its_own_slots_fill_most_of_the_disk(
    run: Run, workplace: Path, small_disk: Callable[[float], None], durable: str
) -> None:
    leave_alone(run, RARELY)
    fail_after_step_5(run, RARELY)
    small_disk(1.05 * raw_bytes(Path()))

    resume("true", "--save_dir", "cut", "--durable_steps", durable)

    assert_ends_as_left_alone("cut")
    assert not slots_in("disk", "other/disk")


def test_a_removed_link_is_gone_from_the_disk_before_its_slot_can_be_another_step(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that a power cut brings back would call the next step in the slot by the name of the older one."""
    sync, on_disk, num_checked = durable_steps.sync_to_disk, dict[str, Path](), 0

    def noting(path: Path) -> None:
        nonlocal num_checked
        if path.name == "out":
            on_disk.clear()
            on_disk.update({each.name: each.resolve() for each in path.glob("checkpoint-*") if each.is_symlink()})
        elif path.name.startswith("slot-"):
            assert path.resolve() not in on_disk.values()
            num_checked += 1
        sync(path)

    monkeypatch.setattr(durable_steps, "sync_to_disk", noting)
    run(*SIX.split(), *RARELY.split(), "--durable_steps", "on")
    assert num_checked >= 4


def test_a_run_that_replaces_a_killed_one_takes_the_room_of_its_slots(
    run: Run, workplace: Path, small_disk: Callable[[float], None]
) -> None:
    leave_alone(run, RARELY)
    fail_after_step_5(run, RARELY)
    small_disk(1.05 * raw_bytes(Path()))
    words = [*SIX.split(), *RARELY.split(), "--save_dir", "cut", "--save_results", "cut.txt", "--durable_steps", "on"]
    with pytest.raises(CheckpointError, match="The newest is checkpoint-5. .* --overwrite_output_dir"):
        run(*words)
    assert len(slots_in("disk")) == 2

    run(*words, "--overwrite_output_dir")

    assert_ends_as_left_alone("cut")
    assert not slots_in("disk", "other/disk")


def test_a_start_that_is_refused_late_leaves_the_newest_step(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are loaded and files of states are made when it turns out that the run cannot begin."""
    leave_alone(run, RARELY)
    fail_after_step_5(run, RARELY)

    def refusing(_: object) -> None:
        raise CheckpointError("the folder is another one now")

    with monkeypatch.context() as patch:
        patch.setattr("mobius.checkpoint.run_folder.OutputFolder.begin", refusing)
        with pytest.raises(CheckpointError, match="another one now"):
            run(*SIX.split(), *RARELY.split(), "--save_dir", "cut", "--overwrite_output_dir")
    assert Path("cut/checkpoint-5/checkpoint.json").is_file()

    resume("true", "--save_dir", "cut")

    assert_ends_as_left_alone("cut")


def test_a_copied_run_reads_and_removes_nothing_of_the_original(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_alone(run, RARELY)
    fail_after_step_5(run, RARELY)
    shutil.copytree(workplace, workplace.parent / "copy", symlinks=True)
    originals = {path: path.read_bytes() for path in workplace.rglob("*.raw")}
    for path in originals:
        path.write_bytes(bytes(path.stat().st_size))
    monkeypatch.chdir(workplace.parent / "copy")

    resume("true", "--save_dir", "cut")

    assert_ends_as_left_alone("cut")
    assert not slots_in("disk", "other/disk")
    assert all(path.is_file() for path in originals)
    for path, content in originals.items():
        path.write_bytes(content)
    monkeypatch.chdir(workplace)
    resume("true", "--save_dir", "cut")
    assert_ends_as_left_alone("cut")


def test_a_run_that_begins_in_another_runs_step_leaves_that(run: Run, workplace: Path) -> None:
    """A copy of the results alone, whose links lead to the original's slots."""
    leave_alone(run, RARELY)
    fail_after_step_5(run, RARELY)
    shutil.copytree("cut", "copied", symlinks=True)
    before = {path: path.read_bytes() for path in slots_in("disk", "other/disk")}

    resume("true", "--save_dir", "copied")

    assert_ends_as_left_alone("copied")
    assert {path: path.read_bytes() for path in slots_in("disk", "other/disk")} == before


def damage_both_steps() -> None:
    for step in (4, 5):
        damage(Path(f"cut/checkpoint-{step}"))


def remove_the_states() -> None:
    shutil.rmtree("disk")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (damage_both_steps, "(?s)(?=.*checkpoint-5)(?=.*checkpoint-4).*is damaged"),
        (remove_the_states, r"checkpoint-5 is a link to .*slot-\d, which does not exist"),
    ],
)
def test_where_no_step_is_whole_there_is_one_message_whose_advice_works(
    run: Run, workplace: Path, harm: Callable[[], None], told: str
) -> None:
    leave_alone(run, RARELY)
    fail_after_step_5(run, RARELY)
    harm()
    with pytest.raises(CheckpointError, match=told) as caught:
        resume("true", "--save_dir", "cut")
    assert "start again with --overwrite_output_dir" in str(caught.value)

    run(*SIX.split(), *RARELY.split(), "--save_dir", "cut", "--save_results", "cut.txt", "--overwrite_output_dir")

    assert_ends_as_left_alone("cut")


def test_folders_of_states_that_are_removed_in_a_run_end_it_with_one_message(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_step = TrainingLoop._after_step

    def removing(self: TrainingLoop, metrics: StepMetrics) -> StopReason | None:
        while metrics.step == 3 and Path("disk").exists():  # a thread of the run removes and makes files, too
            shutil.rmtree("disk", ignore_errors=True)
        return after_step(self, metrics)

    monkeypatch.setattr(TrainingLoop, "_after_step", removing)
    with pytest.raises(MobiusError, match=r"disk/.*slot-\d was removed during the run"):
        run(*SIX.split(), *RARELY.split(), "--save_dir", "cut")


FOLDERS = {
    "a loop of links": ("loop", "is a link that leads back to itself"),
    "a link to nowhere": ("nowhere", "is a link to .*missing, which is not there"),
    "a file": ("data.jsonl", "is a file. Name a folder"),
    "below a file": ("data.jsonl/states", "lies below the file .*data.jsonl"),
    "one in two spellings": ("disk,./other/../disk", "disk and ./other/../disk are one folder"),
    "one by a link": ("disk,link", "disk and link are one folder"),
    "a read-only one": ("closed", "cannot be written to"),
}


@pytest.mark.parametrize("case", named(FOLDERS))
def test_folders_that_cannot_have_states_are_refused_by_name(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str]
) -> None:
    folders, message = case
    Path("disk").mkdir()
    for name, target in {"loop": "loop", "nowhere": "missing", "link": "disk"}.items():
        Path(name).symlink_to(target)
    Path("closed").mkdir()
    access = os.access
    closed = Path("closed").resolve()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed and access(path, mode))
    with pytest.raises(StateFileError, match=f"--offload_states_to .*{message}"):
        run("--dtype", "bf16", "--offload_states_to", folders)
