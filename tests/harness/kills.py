"""Processes that end, as by a kill, in the middle of what they do to the file system."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

from mobius.checkpoint import tensor_files

CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir")
"""Calls that change names."""
_KILLED = 9


def run_killed(action: Callable[[], object], at: int, *, counts_writes: bool = False) -> bool:
    """Do `action` in a forked process that ends in place of its change number `at`; False if it ended by itself before.

    `counts_writes`: each part of a file that is written counts, too.
    """
    child = os.fork()
    if child == 0:
        try:
            logging.disable()
            _die_at(at, counts_writes)
            action()
            os._exit(0)
        finally:  # a failure of the action is none of the parent's tests, which would run twice
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, _KILLED)
    return code == _KILLED


def _die_at(at: int, counts_writes: bool) -> None:
    done = count(1)

    def step() -> None:
        if next(done) == at:
            os._exit(_KILLED)

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

    def save_in_parts(tensors: dict[str, torch.Tensor], path: Path, parts: tensor_files.Parts) -> dict[str, int]:
        step()
        save_file(tensors, path, parts)
        whole = path.stat().st_size
        for size in (0, whole // 2, whole):
            os.truncate(path, size)
            step()
        return save_file(tensors, path, parts)

    save_file = tensor_files.save_file
    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    if counts_writes:
        Path.write_text = write_in_halves  # type: ignore[assignment,method-assign]
        tensor_files.save_file = save_in_parts
