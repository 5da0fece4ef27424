"""Runs works in forked processes: if a work hangs, fails or crashes, only the result of this work is lost.

A forked process has all modules that its parent process has imported. A forked process may use CUDA if its parent
process never does.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from mobius.errors import MobiusError, first_line

Work = Callable[[], object]
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Problem:
    """Reason why a work has no result."""

    text: str
    is_late: bool = False


def run_apart(
    works: Mapping[str, Work],
    *,
    end: float,
    most_at_once: int,
    tick: Callable[[], object] = lambda: None,
    ends: Mapping[str, float] = {},
) -> dict[str, object]:
    """Return the result of each work, or its Problem.

    No work runs beyond its time in `ends`, or else beyond `end` (`time.monotonic`). The works start in the given order.
    `tick` is called after each work.
    """
    waiting, results = [*works], dict[str, object]()
    running = dict[Connection, tuple[str, BaseProcess]]()
    try:
        while waiting or running:
            while waiting and len(running) < most_at_once:
                reader, writer = _FORK.Pipe(duplex=False)
                process: BaseProcess = _FORK.Process(target=_run, args=(works[waiting[0]], writer), daemon=True)
                process.start()
                writer.close()
                running[reader] = waiting.pop(0), process
            limits = {reader: ends.get(name, end) for reader, (name, _) in running.items()}
            done = wait([*running], timeout=max(0.0, min(limits.values()) - time.monotonic()))
            late = [reader for reader, limit in limits.items() if limit <= time.monotonic()]
            for reader in [each for each in running if each in done] or late:
                name, process = running.pop(reader)
                is_done = reader in done
                results[name] = _result(reader) if is_done else Problem("it was not done in time", is_late=True)
                process.kill()  # do not join: a hanging driver delays even a kill
                tick()
    finally:
        for _, process in running.values():
            process.kill()
    return results


def _result(reader: Connection) -> object:
    try:
        return reader.recv()
    except EOFError:
        return Problem("its process crashed")


def _run(work: Work, writer: Connection) -> None:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)  # discard output of libraries
    try:
        result = work()
    except MobiusError as error:
        result = Problem(first_line(error))
    except Exception as error:
        result = Problem(f"{type(error).__name__}: {first_line(error)}")
    writer.send(result)
    writer.close()
    os._exit(0)  # skips the cleanup that belongs to the parent process
