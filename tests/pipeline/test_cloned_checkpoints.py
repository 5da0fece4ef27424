"""Checkpoints that share blocks with durable steps are those that would have been written, and outlive the steps.

Where the file system cannot share blocks, `harness.shared_blocks` copies them: all but one call of the system is run.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from harness.durable_runs import DISKS, SIX, fail_after_step_5, leave_alone
from harness.forked import Ranks
from harness.grids import named
from harness.runs import (
    assert_equal_tensors,
    assert_goes_on_exactly,
    environment,
    make_checkpoint,
    manifest_of,
    steps_of,
    tensors_of,
)
from harness.sessions import resume
from harness.shared_blocks import clone_by_copies, mounted
from harness.small_run import SMALL, Run
from transformers import AutoModelForCausalLM

from mobius.checkpoint import cloned_stages, saver
from mobius.checkpoint.folders import find_checkpoints, open_checkpoint

VARIANTS = {
    "striped, every step": f"{DISKS} --save_steps 1",
    "compact, a resident stage": f"{DISKS} --optimizer_states compact --resident_stages 1 --max_grad_norm 0",
    "frozen stages": f"{DISKS} --num_stages 4 --freeze embedding,layers.0-1",
    "tied": f"{DISKS} --model_path tied --num_stages 4",
    "weights on the disks": f"{DISKS} --weights_on_disks --num_stages 4 --freeze embedding,layers.0-1",
    "fp16, whose first steps are skipped": "--dtype fp16 --offload_states_to disk --save_steps 1",
}
ON_DEMAND = ["tied", "fp16, whose first steps are skipped", "compact, a resident stage", "frozen stages"]


@pytest.fixture
def clones(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are made by clones, which are copies."""
    for name in ("clone_range", "SMALLEST_CLONE"):
        monkeypatch.setattr(cloned_stages, name, getattr(cloned_stages, name))  # as it was, after the test
    return clone_by_copies()


@pytest.fixture
def whole(run: Run, workplace: Path) -> None:
    """The folder `whole` of a run without durable steps."""
    leave_alone(run, DISKS)


def checksums_of(checkpoint: Path) -> dict[str, int]:
    """Checksum of each tensor by the manifest."""
    files = json.loads((checkpoint / "checkpoint.json").read_text())["files"]
    return {name: checksum for file in files for name, checksum in file["checksums"].items()}


def assert_is_as_written(cloned: Path, written: Path) -> None:
    open_checkpoint(cloned).verify_all()
    assert checksums_of(cloned) == checksums_of(written)
    assert_equal_tensors(cloned, written)
    assert manifest_of(cloned) == manifest_of(written)
    names = [{path.name for path in folder.iterdir() if "safetensors" not in path.name} for folder in (cloned, written)]
    assert names[0] == names[1]


@pytest.mark.parametrize("options", named(VARIANTS, on_demand=ON_DEMAND))
def test_they_are_as_if_written(run: Run, workplace: Path, options: str, clones: list[str]) -> None:
    make_checkpoint(workplace / "tied", is_tied=True)
    leave_alone(run, options)

    run(*SIX.split(), *options.split(), "--save_dir", "cloned", "--save_results", "cloned.txt")

    kinds = {Path(name).name.partition("-")[0] for name in clones if name.endswith(".safetensors")}
    assert kinds == {"model", "optimizer"}, "what is compared was cloned"
    steps = range(1, 7) if "--save_steps 1" in options else (2, 4, 6)
    assert sorted(path.name for path in Path("cloned").glob("checkpoint-*")) == [f"checkpoint-{each}" for each in steps]
    for step in steps:
        assert_is_as_written(Path(f"cloned/checkpoint-{step}"), Path(f"whole/checkpoint-{step}"))
    assert steps_of(Path("cloned")) == steps_of(Path("whole"))


def test_a_run_goes_on_from_one_and_other_programs_load_it(
    run: Run, workplace: Path, whole: None, clones: list[str]
) -> None:
    fail_after_step_5(run, DISKS)
    Path("cut/checkpoint-5").unlink()
    shutil.rmtree("disk")
    shutil.rmtree("other/disk")
    checkpoint = Path("cut/checkpoint-4")
    assert clones
    stored = tensors_of(checkpoint)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(value, stored[name]) for name, value in loaded.items())

    resume("true", "--save_dir", "cut")

    assert_goes_on_exactly(Path("whole"), Path("cut"), step=4)
    assert checkpoint.is_dir(), "it is the run's own, and no durable step"


@pytest.mark.parametrize("kind", ["xfs", pytest.param("btrfs", marks=pytest.mark.extended)])
def test_file_systems_that_share_blocks_do(
    run: Run, workplace: Path, whole: None, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cloned_stages, "SMALLEST_CLONE", 4096)
    caplog.set_level(logging.INFO, logger="mobius")
    with mounted(kind, workplace) as place:
        folders = f"--save_dir {place}/cloned --offload_states_to {place}/a,{place}/b --save_total_limit 2"
        run(*SIX.split(), "--dtype", "bf16", *folders.split(), "--save_results", "cloned.txt")

        assert sum("in blocks of its durable step" in message for message in caplog.messages) == 3
        names = {"checkpoint-4", "checkpoint-6"}  # the last step has overwritten what the first one is a clone of
        assert {path.name for path in place.glob("cloned/checkpoint-*")} == names
        for name in names:
            assert_is_as_written(place / "cloned" / name, Path("whole") / name)


def test_where_a_folder_cannot_share_blocks_they_are_written_and_the_reason_is_told_once(
    run: Run, workplace: Path, whole: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def clone_range(source: int, *_: int) -> None:
        if "/other/disk/" in os.readlink(f"/proc/self/fd/{source}"):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(cloned_stages, "clone_range", clone_range)
    caplog.set_level(logging.INFO, logger="mobius")

    run(*SIX.split(), *DISKS.split(), "--save_dir", "written", "--save_results", "written.txt")

    (told,) = (message for message in caplog.messages if "not cloned" in message)
    assert told.endswith("written shares no blocks with other/disk: Invalid cross-device link"), told
    assert_is_as_written(Path("written/checkpoint-2"), Path("whole/checkpoint-2"))


def test_a_clone_that_fails_is_a_save_that_fails(
    run: Run,
    workplace: Path,
    whole: None,
    clones: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clone_range = cloned_stages.clone_range

    def failing(*numbers: int) -> None:
        clone_range(*numbers)
        if "checkpoint-2.partial/optimizer" in clones[-1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cloned_stages, "clone_range", failing)

    run(*SIX.split(), *DISKS.split(), "--save_dir", "cloned", "--save_results", "cloned.txt")

    (warning,) = (record.getMessage() for record in caplog.records if "is not saved" in record.getMessage())
    assert "checkpoint of step 2 is not saved, and training goes on: cannot clone" in warning
    assert "No space left on device" in warning
    assert {path.name for path in Path("cloned").glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    assert_is_as_written(Path("cloned/checkpoint-4"), Path("whole/checkpoint-4"))


def test_room_is_asked_for_that_the_next_steps_take(
    run: Run, workplace: Path, clones: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that share blocks with checkpoints take new ones when they are overwritten: one of them, or both.

    This step's own ones are taken by then: else the disk would be full in the middle of one that is written.
    """
    asked: list[int] = []

    def check(save_dir: Path, num_bytes: int) -> None:
        asked.append(num_bytes)
        assert (save_dir / f"checkpoint-{len(asked)}").is_symlink(), "the step is not durable yet"

    monkeypatch.setattr(saver, "check_disk_space", check)

    words = f"--num_iterations 3 --save_params none --save_steps 1 {DISKS}"
    run(*words.split())

    assert [each // asked[0] for each in asked] == [1, 2, 2]
    assert Path("out/checkpoint-3").is_dir()


def cloning_ranks(workplace: Path, options: str, *, num_ranks: int = 1, dies_in: str = "") -> Ranks:
    """Start processes whose clones are copies; the first file whose path has `dies_in` in it ends them."""
    arguments = f"{SMALL} {options}".replace("--device cpu", "").split()
    return Ranks(
        "harness.shared_blocks",
        "run_with_clones",
        [dies_in, *arguments],
        num_ranks=num_ranks,
        folder=workplace,
        environment=environment(workplace / "cache"),
    )


def test_a_kill_in_the_middle_leaves_the_checkpoint_before_it_whole(
    run: Run, workplace: Path, whole: None, clones: list[str]
) -> None:
    killed = cloning_ranks(workplace, f"{SIX} {DISKS} --save_dir cut", dies_in="checkpoint-4.partial/optimizer")
    assert killed.wait() == -9, killed.output()
    assert list(Path("cut/checkpoint-4.partial").glob("optimizer*"))
    assert Path("cut/checkpoint-4").is_symlink(), "the step is durable before it is cloned"
    assert {path.name for path, _ in find_checkpoints(Path("cut")).valid} == {"checkpoint-2", "checkpoint-4"}
    assert_is_as_written(Path("cut/checkpoint-2"), Path("whole/checkpoint-2"))

    resume("true", "--save_dir", "cut")

    assert_goes_on_exactly(Path("whole"), Path("cut"), step=4)
    assert not Path("cut/checkpoint-4.partial").exists()


def test_ranks_clone_their_stages_each(run: Run, workplace: Path) -> None:
    options = f"{SIX} {DISKS} --num_stages 4 --resident_stages 1"
    leave_alone(run, options)
    ranks = cloning_ranks(workplace, f"{options} --save_dir cloned", num_ranks=2)

    assert ranks.wait() == 0, ranks.output()
    assert ranks.output().count("in blocks of its durable step") == 3
    for step in (2, 4, 6):
        assert_is_as_written(Path(f"cloned/checkpoint-{step}"), Path(f"whole/checkpoint-{step}"))
