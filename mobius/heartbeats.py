"""Owns how the ranks of a run call each other beside their process groups, when those wait for somebody for good.

A rank listens at a Unix socket that has a name but no file: the name goes with the process, and nothing is left of it.
Only processes of the same user are heard. Linux only: elsewhere, and where a socket cannot be had, nobody is heard.
Ranks of other nodes are heard through a `RemoteRanks`, which puts their calls into the own socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, Protocol

_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group of a sender, which the kernel vouches for."""
_CALL_BYTES: Final = 64
_LOOK_SECONDS: Final = 0.02


class WatchdogMessage(StrEnum):
    """Words between ranks."""

    REPORT = "tell"
    """Say where you are: the run ends."""
    REPORTED = "told"
    """I have said where I am."""
    END = "end"
    """All have been heard, or waited for long enough."""
    PROGRESS = "goes on"
    """Something was done here since my last look."""
    WAKE = "wake"
    """To the own rank, whose listening ends."""


class RemoteRanks(Protocol):
    """Ranks of other nodes, as one rank hears them."""

    @property
    def ranks(self) -> Sequence[int]:
        """Their numbers."""

    @property
    def reports(self) -> Mapping[int, str]:
        """Where those are that have told."""

    def start(self, deliver: Callable[[WatchdogMessage, int], None], seconds: float) -> None:
        """Give their calls to `deliver`, with the rank, and look for them every so many seconds."""

    def send(self, call: WatchdogMessage, report: str = "") -> None:
        """Tell them soon; END is told when this returns."""

    def close(self) -> None:
        """Hear nobody any more."""


class HeartbeatSocket:
    """This rank's socket, and the names of the others'; they are those of ranks that have the same parent process."""

    def __init__(
        self, rank: int, ranks: Sequence[int], *, remote: RemoteRanks | None = None, poll_seconds: float = 1.0
    ) -> None:
        """Listen from now on to `ranks` of this node, and to those of `remote`, every `poll_seconds`.

        Nothing is raised where that cannot be: `is_reachable` says so.
        """
        self._rank, self._others = rank, [other for other in ranks if other != rank]
        self._name = f"\0mobius-{_namespace()}-{os.getppid()}"
        self._remote = remote
        self._socket = _listen(f"{self._name}-{rank}") if self._others or remote is not None else None
        if remote is not None:
            remote.start(lambda call, other: self._send(call, rank, other), poll_seconds)

    @property
    def other_ranks(self) -> set[int]:
        """All other ranks, of this node and beyond."""
        return {*self._others, *(() if self._remote is None else self._remote.ranks)}

    def report_of(self, rank: int) -> str:
        """Where a rank of another node is, as it has told; nothing for one of this node."""
        return "" if self._remote is None else self._remote.reports.get(rank, "")

    @property
    def is_reachable(self) -> bool:
        """Whether other ranks can reach this one."""
        return self._socket is not None

    def broadcast(self, call: WatchdogMessage, report: str = "") -> None:
        """Say `call` to all other ranks, and `report` to those of other nodes, whose terminal this one does not share.

        One that is gone, or does not listen, is passed over.
        """
        for rank in self._others:
            self._send(call, rank)
        if self._remote is not None:
            self._remote.send(call, report)

    def wake(self) -> None:
        """Let the thread that listens return; any other thread may call it."""
        self._send(WatchdogMessage.WAKE, self._rank)

    def listen(self, seconds: float) -> tuple[WatchdogMessage, int] | None:
        """The next call and its rank, or None after so many seconds; what is no call of a rank is not heard."""
        assert self._socket is not None
        self._socket.settimeout(max(seconds, 1e-3))
        try:
            text, extras, _, _ = self._socket.recvmsg(_CALL_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        except OSError:  # the time is over
            return None
        users = [
            _CREDENTIALS.unpack(data)[1]
            for level, kind, data in extras
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) == _CREDENTIALS.size
        ]
        word, _, number = text.decode("ascii", "replace").rpartition(" ")
        is_of_run = number.isdecimal() and int(number) in {self._rank, *self.other_ranks}
        return (
            (WatchdogMessage(word), int(number))
            if users == [os.getuid()] and word in set(WatchdogMessage) and is_of_run
            else None
        )

    @contextlib.contextmanager
    def output_lock(self, seconds: float) -> Iterator[None]:
        """Within, no other rank has the floor; after so many seconds this one takes it all the same."""
        end, held = time.monotonic() + seconds, None
        while self._others and (held := _listen(f"{self._name}-floor")) is None and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        try:
            yield
        finally:
            if held is not None:
                held.close()

    def close(self) -> None:
        """Listen no more."""
        if self._remote is not None:
            self._remote.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, call: WatchdogMessage, rank: int, by: int | None = None) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)  # a rank that is stopped does not empty its socket
            sender.sendto(f"{call} {self._rank if by is None else by}".encode(), f"{self._name}-{rank}")


def _listen(name: str) -> socket.socket | None:
    """A socket of this name; None where another process has it, or the system has no such names."""
    if sys.platform != "linux":
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listener.bind(name)
    except OSError:
        listener.close()
        return None
    return listener


def _namespace() -> int:
    """Number of the space in which process numbers are counted: containers on one network may each have a process 7."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
