"""The program with one rank that is late, or with a fault: nobody may wait in vain.

A late rank waits behind every collective, which makes all that it does before the next one late; before the ranks
have met, in each module that is at work on a file; and in each thread of its own before it touches one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import safetensors.torch
import torch.distributed as dist

import mobius
from mobius.distributed.rendezvous import Rendezvous

_PACKAGE = str(Path(mobius.__file__).parent)
_MESSAGES = tuple(
    str(Path(_PACKAGE, "distributed", f"{name}.py"))
    for name in (
        "cuda_copies",
        "mailboxes",
        "node_rendezvous",
        "peer_memory",
        "process_groups",
        "rendezvous",
        "replicas",
        "transport",
        "world",
    )
)
"""Modules through which calls come from many places."""
_FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree")


def late_main(late: int, seconds: float, *options: str) -> None:
    """The program; rank `late` waits for `seconds` at each place, and tells at its end at how many."""
    delay = _Delay(seconds)
    if int(os.environ["RANK"]) == late:
        _be_late(delay)
    sys.argv = ["main.py", *options]
    try:
        import_module("main").main()
    finally:
        if delay.places:
            print(f"rank {late} was late at {len(delay.places)} places")


class _Delay:
    """Waits once at each place of the code."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._folder, self.places = seconds, os.getcwd(), set[object]()
        self._have_met = False

    def behind_collective(self, frame: FrameType | None) -> None:
        """Wait; the place is two functions of Mobius, for several calls come through one."""
        callers = [f"{found.f_code.co_filename}:{found.f_lineno}" for found in _own_frames(frame)]
        self._wait((*callers[:2],))

    def at_file(self, event: str, arguments: tuple[Any, ...]) -> None:
        """For the interpreter, which calls it before each act of its own: wait before those on files of the run."""
        if event in _FILE_EVENTS and isinstance(arguments[0], str | os.PathLike):
            path = os.path.join(self._folder, arguments[0])  # stays what it is if it is absolute
            if path.startswith(self._folder):
                self.before_file(sys._getframe(1))

    def before_file(self, frame: FrameType | None) -> None:
        """Wait before a file is touched."""
        name = threading.current_thread().name
        found = next(_own_frames(frame), None)
        if found is None:
            return
        if not name.startswith("MainThread"):
            self._wait((name, found.f_code.co_qualname))
        elif not self._have_met:
            self._wait(found.f_code.co_filename)

    def has_met(self) -> None:
        """From now on the main thread waits behind collectives only."""
        self._have_met = True

    def _wait(self, place: object) -> None:
        if place not in self.places:
            self.places.add(place)
            time.sleep(self._seconds)


def _own_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames of Mobius from the innermost on, without those of messages."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and not file.startswith(_MESSAGES):
            yield frame
        frame = frame.f_back


def _be_late(delay: _Delay) -> None:
    all_reduce, gather, write = dist.all_reduce, Rendezvous.gather, safetensors.torch.serialize_file

    def late_all_reduce(*arguments: Any, **named: Any) -> Any:
        delay.has_met()
        result = all_reduce(*arguments, **named)
        delay.behind_collective(sys._getframe(1))
        return result

    def late_gather(rendezvous: Rendezvous, value: Any) -> list[Any]:
        result = gather(rendezvous, value)
        delay.behind_collective(sys._getframe(1))
        return result

    def late_write(*arguments: Any, **named: Any) -> Any:
        delay.before_file(sys._getframe(1))  # the library itself opens the file, which the interpreter does not see
        return write(*arguments, **named)

    dist.all_reduce = late_all_reduce
    Rendezvous.gather = late_gather  # type: ignore[method-assign]
    safetensors.torch.serialize_file = late_write
    sys.addaudithook(delay.at_file)


def faulty_main(fault: str, *options: str) -> None:
    """The program, after the statements `fault`."""
    exec(fault, {})
    sys.argv = ["main.py", *options]
    import_module("main").main()
