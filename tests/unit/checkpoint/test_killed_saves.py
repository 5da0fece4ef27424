"""A run is killed before each single step of a save, a removal and a settlement: complete or invisible, each time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from harness.checkpoints import has_values, names, save, values_of
from harness.kills import run_killed

from mobius.checkpoint.folders import find_checkpoints, open_checkpoint, recover_interrupted_saves, rotate_checkpoints

Action = Callable[[Path], object]

TENSORS = {seed: values_of(seed, torch.bfloat16) for seed in (8, 108)}


def save_first(folder: Path) -> None:
    save(folder, 8, number=7, tensors=TENSORS[8])


def save_again(folder: Path) -> None:
    save(folder, 8, number=7, tensors=TENSORS[108])


def nothing_before(folder: Path) -> None:
    save(folder, 4, number=1)


def older_before(folder: Path) -> None:
    save(folder, 4, number=1)
    save(folder, 8, number=2)


def several_before(folder: Path) -> None:
    for step in (2, 4, 8):
        save(folder, step, number=step)


def state_of(folder: Path) -> set[tuple[str, int]]:
    return {(path.relative_to(folder).as_posix(), path.stat().st_size) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("before", "action", "seeds"),
    [
        pytest.param(nothing_before, save_first, [None, 8], marks=pytest.mark.extended),
        (older_before, save_again, [8, 108]),
        (several_before, partial(rotate_checkpoints, keep=1, protected=[Path("checkpoint-4")]), [8]),
    ],
    ids=["first", "again", "removal"],
)
def test_a_kill_before_any_step_leaves_complete_checkpoints_only(
    before: Action, action: Action, seeds: list[int | None], tmp_path: Path
) -> None:
    before(template := tmp_path / "template")
    seen: set[int | None] = set()
    for at in count(1):
        shutil.copytree(template, folder := tmp_path / f"killed-{at}")
        was_killed = run_killed(partial(action, folder), at, counts_writes=True)

        for path, _ in find_checkpoints(folder).valid:
            open_checkpoint(path).verify_all()
        recover_interrupted_saves(folder)
        found = find_checkpoints(folder)
        assert found.invalid == ()
        assert sorted(path.name for path, _ in found.valid) == names(folder)
        by_step = {manifest.step: open_checkpoint(path) for path, manifest in found.valid}
        if action is not save_first and action is not save_again:
            assert 8 in by_step
        else:
            assert has_values(by_step[4], seed=4)
        seen.add(next((seed for seed in (8, 108) if 8 in by_step and has_values(by_step[8], seed)), None))
        assert recover_interrupted_saves(folder) == []
        shutil.rmtree(folder)
        if not was_killed:
            break
    assert at > 10
    assert seen == set(seeds)


def settle_with_kills(left: Path, folder: Path, first: int) -> int:
    """Settle what is in `left` with a kill before every third step from `first` on, and again without one.

    Returns the number of kills.
    """
    for at in count(first, 3):
        shutil.copytree(left, folder)
        was_killed = run_killed(partial(recover_interrupted_saves, folder), at, counts_writes=True)
        recover_interrupted_saves(folder)
        assert names(folder) == ["checkpoint-4", "checkpoint-8"]
        reader = open_checkpoint(folder / "checkpoint-8")
        assert has_values(reader, 8) or has_values(reader, 108)
        shutil.rmtree(folder)
        if not was_killed:
            break
    return (at - first) // 3


@pytest.mark.extended
def test_a_kill_while_leftovers_are_settled_is_settled_by_the_next_start(tmp_path: Path) -> None:
    older_before(template := tmp_path / "template")
    num_settled = 0
    seen = {frozenset(state_of(template))}  # most steps change nothing that a later start could see
    for at in count(1):
        shutil.copytree(template, left := tmp_path / f"left-{at}")
        was_killed = run_killed(partial(save_again, left), at, counts_writes=True)
        if (state := frozenset(state_of(left))) not in seen:
            seen.add(state)
            num_settled += settle_with_kills(left, tmp_path / "folder", first=1 + at % 3)
        shutil.rmtree(left)
        if not was_killed:
            break
    assert num_settled > 30
