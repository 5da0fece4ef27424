"""Owns the end of a run that stands still: every rank tells where it is, and then all of them end.

A rank that hangs makes the others wait for it, so the first that notices calls all of them, past their main threads:

    rank 0, waits    no progress for so long -> TELL to all -> tells -> TOLD to all --+-> all have told, or the patience
    rank 1, hangs                 hears TELL ----------------> tells -> TOLD to all --+   is over -> END to all -> exit

A rank may well wait for long, for one that writes to a slow disk: ranks in which something is done tell the others so
(PROGRESS), those of other nodes too, and the run stands still when all do. A first step or evaluation may compile, of
which nobody sees how far it is; it gets ten times as long, but an hour at the most.

Nets below that one: a rank whose interpreter is held by a call in C runs no thread of Python. faulthandler's own thread
writes its stacks a little later, and the others say that it does not answer. Alone it stays, for nobody is there to end
it. A process that was stopped (SIGSTOP, a frozen container) stood still for no reason of its own: time is counted only
from look to look of this thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType, FunctionType
from typing import Final

from mobius.activity import Activity, format_duration
from mobius.heartbeats import HeartbeatSocket, RemoteRanks, WatchdogMessage

EXIT_CODE: Final = 75
"""Exit code of a rank that ends because the run stands still: "try again", as EX_TEMPFAIL of sysexits.h."""

WARM_UP_FACTOR: Final = 10
"""Times the allowed time without progress while code may be compiled."""
_WARM_UP_SECONDS: Final = 3600.0
"""Most that this factor makes of it."""
_LOOK_SECONDS: Final = 5.0
_LOOKS: Final = 10
"""At least so many looks in the time without progress that is allowed."""
_REPORT_TIMEOUT_SECONDS: Final = 10.0
"""Time for all ranks to tell where they are."""
_FLOOR_SECONDS: Final = 3.0
_DEVICE_SECONDS: Final = 2.0
_MAX_FRAMES: Final = 40
"""Frames of each thread, the innermost ones."""


class Watchdog:
    """Owns a thread that looks at this rank's `Activity` from `start` to `stop`, and may end the process."""

    def __init__(
        self,
        activity: Activity,
        *,
        rank: int,
        num_ranks: int,
        first_rank: int = 0,
        minutes: float,
        clean_up: Callable[[], str] | None = None,
        report_timeout_seconds: float = _REPORT_TIMEOUT_SECONDS,
        remote: RemoteRanks | None = None,
    ) -> None:
        """Watch rank `rank` of a node's `num_ranks`, which are numbered from `first_rank` on, and hear `remote` ones.

        End the process after `minutes` without progress of any rank; 0: never, and `start` does nothing.

        `clean_up` clears up and returns what the run leaves, as a text that goes on from "all ranks end ": one rank has
        it.
        """
        self.activity = activity
        """Told by whatever is to be watched."""
        self._rank, self._ranks = rank, range(first_rank, first_rank + num_ranks)
        self._limit, self._clean_up, self._patience = 60 * minutes, clean_up, report_timeout_seconds
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._heartbeats: HeartbeatSocket | None = None
        self._remote = remote
        self._position: object = None
        self._asking: threading.Thread | None = None

    def start(self) -> None:
        """Watch from now on; what was before counts as progress."""
        if self._limit == 0 or self._thread is not None:
            return
        self._is_stopped.clear()
        self._heartbeats = HeartbeatSocket(self._rank, self._ranks, remote=self._remote, poll_seconds=self._interval)
        self.activity.progress()
        # Stacks that faulthandler writes do not say whose they are, but the names of functions.
        code = Watchdog._watch.__code__.replace(co_name=f"watchdog_of_rank_{self._rank}")
        watch = FunctionType(code, Watchdog._watch.__globals__)
        self._thread = threading.Thread(target=watch, args=(self, self._heartbeats), name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more; `start` begins anew."""
        if self._thread is None or self._heartbeats is None:
            return
        self._is_stopped.set()
        self._heartbeats.wake()
        self._thread.join()
        self._heartbeats.close()
        self._thread = self._heartbeats = None

    def _watch(self, heartbeats: HeartbeatSocket) -> None:
        interval = self._interval
        seen, idle, last = self.activity.last_progress, 0.0, time.monotonic()
        while not self._is_stopped.is_set():
            limit = self._stall_limit_seconds()
            # Later than this thread would notice it: it speaks only where this one cannot.
            faulthandler.dump_traceback_later(max(limit - idle, 0) + 2 * interval, exit=False, file=2)
            call, others_go_on = self._listen(heartbeats, interval)
            now = time.monotonic()
            elapsed, last = now - last, now
            if call is None and elapsed > 2 * interval:  # held up meanwhile: what came since then comes first
                call, others_go_on = self._listen(heartbeats, 0)
            if self._is_stopped.is_set():
                break
            if call is not None and call[0] is not WatchdogMessage.WAKE:
                self._pass_on(heartbeats, call)
                self._end(heartbeats, f"rank {call[1]} has called all ranks", told=_reporting_ranks(call))
            if elapsed > limit:
                self._write(
                    f"rank {self._rank} was stopped, or held up in C, for {format_duration(elapsed)}; it goes on"
                )
            progress = self.activity.last_progress
            goes_on = progress != seen or (idle >= limit / 2 and self._device_has_moved())
            if goes_on:
                heartbeats.broadcast(WatchdogMessage.PROGRESS)
            idle = 0.0 if goes_on or others_go_on else idle + min(elapsed, 2 * interval)
            seen = progress
            if idle >= limit:
                reason = f"no progress for {format_duration(idle)} (--watchdog_minutes {self._limit / 60:g})"
                heartbeats.broadcast(WatchdogMessage.REPORT)
                self._end(heartbeats, reason, told=set())
        faulthandler.cancel_dump_traceback_later()

    @property
    def _interval(self) -> float:
        """Seconds between two looks."""
        return min(self._limit / _LOOKS, _LOOK_SECONDS)

    def _stall_limit_seconds(self) -> float:
        if not self.activity.is_warming_up:
            return self._limit
        return max(self._limit, min(WARM_UP_FACTOR * self._limit, _WARM_UP_SECONDS))

    def _listen(self, heartbeats: HeartbeatSocket, seconds: float) -> tuple[tuple[WatchdogMessage, int] | None, bool]:
        """A call to do something, if one comes within so many seconds, and whether any other rank goes on."""
        if not heartbeats.is_reachable:
            self._is_stopped.wait(seconds)
            return None, False
        end, others_go_on = time.monotonic() + seconds, False
        while (call := heartbeats.listen(end - time.monotonic())) is not None and call[0] is WatchdogMessage.PROGRESS:
            others_go_on = True
        return call, others_go_on

    def _device_has_moved(self) -> bool:
        """Whether the device is elsewhere than when it was last asked; the first answer is none."""
        before, self._position = self._position, self._ask_device()
        return before is not None and self._position is not None and before != self._position

    def _ask_device(self) -> object:
        """The text of the device's position, or None; a driver that hangs does not hold up whoever asks."""
        answers: list[object] = []

        def ask() -> None:
            with contextlib.suppress(Exception):  # the run is about to end for another reason
                if self.activity.device_position is not None:
                    answers.append(str(self.activity.device_position()))

        if self.activity.device_position is None:
            return None
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=ask, name="device", daemon=True)
            self._asking.start()
            self._asking.join(_DEVICE_SECONDS)
        return answers[0] if answers else "no answer"

    def _end(self, heartbeats: HeartbeatSocket, reason: str, *, told: set[int]) -> None:
        """Tell where this rank is, wait until the others have, and end the process."""
        faulthandler.cancel_dump_traceback_later()
        teller = threading.Thread(target=self._write_report, args=(heartbeats, reason), name="teller", daemon=True)
        teller.start()  # whoever reads standard error may have stopped
        other_ranks = heartbeats.other_ranks
        end, is_told = time.monotonic() + self._patience, False
        while time.monotonic() < end and not (is_told and told >= other_ranks):
            call = heartbeats.listen(0.05) if heartbeats.is_reachable else None
            if call is not None and call[0] is WatchdogMessage.END:
                os._exit(EXIT_CODE)
            told |= _reporting_ranks(call)
            self._pass_on(heartbeats, call)
            if not is_told and not teller.is_alive():
                is_told = True
                heartbeats.broadcast(WatchdogMessage.REPORTED, "\n".join(self._describe_rank(reason)))
            if not heartbeats.is_reachable:
                time.sleep(0.05)
        if is_told:
            self._write(*self._closing(other_ranks - told if heartbeats.is_reachable else set()))
        heartbeats.broadcast(WatchdogMessage.END)
        os._exit(EXIT_CODE)

    def _closing(self, silent: Collection[int]) -> list[str]:
        lines = [
            f"rank {rank} does not answer: it is stopped, or hangs in a call that holds Python's interpreter"
            + ("" if rank in self._ranks else ", or its node is gone")
            for rank in sorted(silent)
        ]
        return [*lines, "the run stands still: all ranks end"]

    def _write_report(self, heartbeats: HeartbeatSocket, reason: str) -> None:
        lines = self._describe_rank(reason)
        if (position := self._ask_device()) is not None:
            lines.append(f"    its device: {position}")
        lines += [f"    {line}" for line in thread_stacks(but={"watchdog", "teller", "device"})]
        with heartbeats.output_lock(_FLOOR_SECONDS):
            self._write(*lines)
        if self._clean_up is not None:
            self._write(f"all ranks end {self._clean_up()}")

    def _pass_on(self, heartbeats: HeartbeatSocket, call: tuple[WatchdogMessage, int] | None) -> None:
        """Write where the rank of another node is that has told, once for this node."""
        for rank in _reporting_ranks(call):
            if self._rank == self._ranks[0] and (report := heartbeats.report_of(rank)):
                self._write(*report.splitlines())

    def _describe_rank(self, reason: str) -> list[str]:
        """Lines that say which rank this is, why it tells, and what it does."""
        head = f"rank {self._rank} (process {os.getpid()} on {socket.gethostname()}): {reason}"
        return [head, *(f"    {line}" for line in self.activity.describe())]

    def _write(self, *lines: str) -> None:
        """Past `sys.stderr` and `logging`, whose locks a thread that hangs may hold."""
        text = "\n" + "".join(f"watchdog: {line}\n" for line in lines)
        left = text.encode(sys.stderr.encoding or "utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            while left:
                left = left[os.write(2, left) :]


def _reporting_ranks(call: tuple[WatchdogMessage, int] | None) -> set[int]:
    return {call[1]} if call is not None and call[0] is WatchdogMessage.REPORTED else set()


def thread_stacks(*, but: Collection[str] = ()) -> list[str]:
    """Lines with the stack of every Python thread but those named so, the outermost frame first.

    No file is read: the disk may be what hangs.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, f"of number {ident}, not started by Python")
        if name not in but:
            lines += [f"thread {name}:", *(f"    {line}" for line in _frame_lines(frame))]
    return lines


def _frame_lines(innermost: FrameType) -> list[str]:
    frames: list[str] = []
    frame: FrameType | None = innermost
    while frame is not None:
        code = frame.f_code
        file = "/".join(Path(code.co_filename).parts[-3:])
        frames.append(f"{file}:{frame.f_lineno} in {code.co_qualname}")
        frame = frame.f_back
    cut = [f"... {len(frames) - _MAX_FRAMES} more"] if len(frames) > _MAX_FRAMES else []
    return [*cut, *reversed(frames[:_MAX_FRAMES])]
