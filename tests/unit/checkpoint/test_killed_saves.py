"""A run is killed before each single step of a save, a removal and a settlement: complete or invisible, each time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.checkpoints import has_values, save, values_of

from mobius.checkpoint import tensor_files
from mobius.checkpoint.folders import find_checkpoints, open_checkpoint, recover_interrupted_saves, rotate_checkpoints

Action = Callable[[Path], object]

KILLED = 9
TENSORS = {seed: values_of(seed, torch.bfloat16) for seed in (8, 108)}
STEPS_OF_THE_SYSTEM = ("rename", "replace", "unlink", "rmdir", "mkdir")
"""Calls that change names; each write of a file is counted too."""


def run_killed(action: Action, folder: Path, at: int) -> bool:
    """Do `action` in a forked process that ends before step number `at`; False if it ended by itself before."""
    child = os.fork()
    if child == 0:
        try:
            die_at(at)
            action(folder)
            os._exit(0)
        finally:  # a failure of the action is none of the parent's tests, which would run twice
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def die_at(at: int) -> None:
    """Count what this process does to the file system, and end it in the middle."""
    done = count(1)

    def step() -> None:
        if next(done) == at:
            os._exit(KILLED)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def stepping(*arguments: Any, **words: Any) -> Any:
            step()
            return call(*arguments, **words)

        return stepping

    def write_in_halves(path: Path, text: str, encoding: str) -> None:
        with open(path, "w", encoding=encoding) as file:
            for half in (text[: len(text) // 2], text[len(text) // 2 :]):
                step()
                file.write(half)
                file.flush()

    def save_in_parts(values: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        step()
        save_file(values, path, metadata=metadata)
        whole = path.stat().st_size
        for size in (0, whole // 2, whole):
            os.truncate(path, size)
            step()
        save_file(values, path, metadata=metadata)

    save_file = tensor_files.save_file
    for name in STEPS_OF_THE_SYSTEM:
        setattr(os, name, counted(getattr(os, name)))
    Path.write_text = write_in_halves  # type: ignore[assignment,method-assign]
    tensor_files.save_file = save_in_parts


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


def only_checkpoints(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


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
        was_killed = run_killed(action, folder, at)

        for path, _ in find_checkpoints(folder).valid:
            open_checkpoint(path).verify_all()
        recover_interrupted_saves(folder)
        found = find_checkpoints(folder)
        assert found.invalid == ()
        assert {path.name for path, _ in found.valid} == only_checkpoints(folder)
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
        was_killed = run_killed(recover_interrupted_saves, folder, at)
        recover_interrupted_saves(folder)
        assert only_checkpoints(folder) == {"checkpoint-4", "checkpoint-8"}
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
        was_killed = run_killed(save_again, left, at)
        if (state := frozenset(state_of(left))) not in seen:
            seen.add(state)
            num_settled += settle_with_kills(left, tmp_path / "folder", first=1 + at % 3)
        shutil.rmtree(left)
        if not was_killed:
            break
    assert num_settled > 30
