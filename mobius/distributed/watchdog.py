"""Watchdog: if a run makes no progress, every rank reports its current activity, and then all ranks exit.

If a rank hangs, all ranks wait. So the first rank that notices calls all ranks, through the launcher's store and a
separate thread:

    rank 0, waits    no progress: time limit -> "call" -> reports --+-> all have reported, or the time
    rank 1, hangs                  reads "call" --------> reports --+   is over -> "end" -> exit

A rank may wait long for another rank that writes to a slow disk. So ranks that make progress increment one counter of
the store ("beats"), and the run has stalled when this counter stops. A first step or evaluation may compile, which
shows no progress; its limit is ten times as long, but at most an hour.

torch's time-outs do not cover copies by copy engines (`mailboxes.py`), and its flight recorder does not show stages or
microbatches. If a call in C holds the interpreter of a rank, the rank runs no Python thread. Then faulthandler's thread
writes the stacks a little later, and the other ranks report that the rank does not answer. A run of one rank is not
ended in this state. Time in which the process was stopped (SIGSTOP, a frozen container) does not count: the watchdog
adds up the time between its checks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType, FunctionType
from typing import Any, Final

from mobius.process.activity import Activity, format_duration
from mobius.process.ranks import Ranks

EXIT_CODE: Final = 75
"""Exit code of a rank that ends because the run has stalled: EX_TEMPFAIL of sysexits.h, which means "try again"."""

WARM_UP_FACTOR: Final = 10
"""Factor by which the time limit is longer while code may be compiled."""
_WARM_UP_SECONDS: Final = 3600.0
"""Maximum of the time limit with `WARM_UP_FACTOR`."""
_LOOK_SECONDS: Final = 2.0
_LOOKS: Final = 10
"""Minimum number of checks within the time limit."""
_REPORT_TIMEOUT_SECONDS: Final = 10.0
"""Time in which all ranks must report their activity."""
_TURN_SECONDS: Final = 3.0
"""Maximum time that a rank waits until lower ranks have written their reports, so that texts do not mix."""
_ENDING_LOOK_SECONDS: Final = 0.1
_DEVICE_SECONDS: Final = 2.0
_OWN_THREADS: Final = ("watchdog", "watchdog's store", "reporter", "device")
_MAX_FRAMES: Final = 40
"""Maximum number of frames shown for each thread; innermost frames are shown."""
_MAX_REPORT: Final = 2000
"""Maximum number of characters of a rank's report that other nodes show."""


class _Peers:
    """Thread that exchanges state with the watchdogs of all other ranks, as long as the store answers."""

    def __init__(self, ranks: Ranks, open_store: Callable[[], Any] | None, seconds: float) -> None:
        """Start the thread, which checks the store every `seconds`. Without `open_store`, there are no other ranks."""
        self.others = [] if open_store is None else [rank for rank in range(ranks.num_ranks) if rank != ranks.rank]
        self.num_beats = 0
        """Number of checks that found progress of this rank; only the watchdog thread writes it."""
        self.has_progress = False
        """Whether another rank has made progress since the watchdog last reset this flag."""
        self.caller: int | None = None
        """The rank that has called all ranks to report."""
        self.reports: dict[int, str] = {}
        self.has_ended, self.is_lost = False, False
        self.wake = threading.Event()
        """Event that is set when a rank has called, or when this rank's watchdog stops."""
        self._interval = seconds
        self._outgoing = SimpleQueue[tuple[str, str] | None]()
        self._thread = threading.Thread(target=self._run, args=(open_store,), name="watchdog's store", daemon=True)
        if open_store is not None:
            self._thread.start()

    def post(self, key: str, value: str = "") -> None:
        """Queue a key for the store. From now on, the store is checked often, because the run ends."""
        self._interval = _ENDING_LOOK_SECONDS
        self._outgoing.put((key, value))

    def post_end(self) -> None:
        """Tell all ranks to end, and wait until they can have read it, because the store may end with this node."""
        self.post("end")
        end = time.monotonic() + 1.0
        while not self.has_ended and time.monotonic() < end:
            time.sleep(_ENDING_LOOK_SECONDS / 2)
        time.sleep(4 * _ENDING_LOOK_SECONDS)

    def close(self) -> None:
        """Stop the thread."""
        self._outgoing.put(None)
        if self.others:
            self._thread.join(1.0)

    def _run(self, open_store: Callable[[], Any]) -> None:
        try:
            store = open_store()
            known, num_posted = store.add("beats", 0), 0
            while True:
                own, num_posted = self.num_beats - num_posted, self.num_beats
                total = store.add("beats", own)
                self.has_progress |= total - own > known
                known = total
                self._read_call(store)
                with contextlib.suppress(Empty):
                    outgoing = self._outgoing.get(timeout=self._interval)
                    if outgoing is None:
                        return
                    store.set(*outgoing)
        except Exception:  # after any error, the rank continues without the other ranks
            self.is_lost = True

    def _read_call(self, store: Any) -> None:
        if not store.check(["call"]):
            return
        for rank in self.others:
            if rank not in self.reports and store.check([f"report {rank}"]):
                self.reports[rank] = store.get(f"report {rank}").decode(errors="replace")
        self.has_ended = store.check(["end"])
        if self.caller is None:
            self.caller, self._interval = int(store.get("call")), _ENDING_LOOK_SECONDS
            self.wake.set()


class Watchdog:
    """Thread that checks this rank's `Activity` from `start` to `stop`, and may end the process."""

    def __init__(
        self,
        activity: Activity,
        ranks: Ranks,
        *,
        minutes: float,
        open_store: Callable[[], Any] | None = None,
        clean_up: Callable[[], str] | None = None,
        report_timeout_seconds: float = _REPORT_TIMEOUT_SECONDS,
    ) -> None:
        """End the process after `minutes` without progress of any rank; with 0, `start` does nothing.

        `open_store` connects to the store that all ranks share, in a separate thread; None for a single rank. Only one
        rank has `clean_up`: it cleans up and returns the results that the run leaves, as a text that completes "all
        ranks end ".
        """
        self.activity = activity
        """Current activity of this rank; the watched code updates it."""
        self._ranks, self._open_store = ranks, open_store
        self._limit, self._clean_up, self._patience = 60 * minutes, clean_up, report_timeout_seconds
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._peers: _Peers
        self._position: object = None
        self._asking: threading.Thread | None = None

    def start(self) -> None:
        """Start watching; the time limit begins now."""
        if self._limit == 0 or self._thread is not None:
            return
        self._is_stopped.clear()
        self._peers = _Peers(self._ranks, self._open_store, self._interval)
        self.activity.progress()
        # faulthandler's stacks show names of functions but no ranks, so the name of this function contains the rank.
        code = Watchdog._watch.__code__.replace(co_name=f"watchdog_of_rank_{self._ranks.rank}")
        watch = FunctionType(code, Watchdog._watch.__globals__)
        self._thread = threading.Thread(target=watch, args=(self,), name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; `start` may be called again."""
        if self._thread is None:
            return
        self._is_stopped.set()
        self._peers.wake.set()
        self._thread.join()
        self._peers.close()
        self._thread = None

    def _watch(self) -> None:
        interval, peers = self._interval, self._peers
        previous, idle, last = self.activity.last_progress, 0.0, time.monotonic()
        while not self._is_stopped.is_set():
            limit = self._stall_limit_seconds()
            # faulthandler's limit is later than this thread's limit, so it writes only if this thread cannot run.
            faulthandler.dump_traceback_later(max(limit - idle, 0) + 2 * interval, exit=False, file=2)
            peers.wake.wait(interval)
            if self._is_stopped.is_set():
                break
            if peers.caller is not None:
                self._end(f"rank {peers.caller} has called all ranks")
            now = time.monotonic()
            elapsed, last = now - last, now
            if elapsed > limit:
                self._write(
                    f"rank {self._ranks.rank} was stopped or blocked in C for {format_duration(elapsed)}; it continues"
                )
            progress = self.activity.last_progress
            goes_on = progress != previous or (idle >= limit / 2 and self._device_has_moved())
            previous = progress
            peers.num_beats += goes_on
            goes_on, peers.has_progress = goes_on or peers.has_progress, False
            idle = 0.0 if goes_on else idle + min(elapsed, 2 * interval)
            if idle >= limit:
                self._end(f"no progress for {format_duration(idle)} (--watchdog_minutes {self._limit / 60:g})")
        faulthandler.cancel_dump_traceback_later()

    @property
    def _interval(self) -> float:
        """Seconds between two checks."""
        return min(self._limit / _LOOKS, _LOOK_SECONDS)

    def _stall_limit_seconds(self) -> float:
        if not self.activity.is_warming_up:
            return self._limit
        return max(self._limit, min(WARM_UP_FACTOR * self._limit, _WARM_UP_SECONDS))

    def _device_has_moved(self) -> bool:
        """Whether the device's position has changed since the last call; False on the first call."""
        before, self._position = self._position, self._ask_device()
        return before is not None and self._position is not None and before != self._position

    def _ask_device(self) -> object:
        """Return the device's position as text, or None. If the driver hangs, the caller does not."""
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

    def _end(self, reason: str) -> None:
        """Report this rank's activity, wait for the other ranks' reports, and end the process."""
        faulthandler.cancel_dump_traceback_later()
        peers = self._peers
        if peers.caller is None:
            peers.post("call", str(self._ranks.rank))
        head = f"rank {self._ranks.rank} (process {os.getpid()} on {socket.gethostname()}): {reason}"
        report = [head, *(f"    {line}" for line in self.activity.describe())]
        reporter = threading.Thread(target=self._write_report, args=(report,), name="reporter", daemon=True)
        reporter.start()  # in a thread, because writing blocks if nobody reads standard error
        end, has_reported = time.monotonic() + self._patience, False
        while time.monotonic() < end and not peers.has_ended:
            if not has_reported and not reporter.is_alive():
                has_reported = True
                peers.post(f"report {self._ranks.rank}", "\n".join(report)[:_MAX_REPORT])
            if has_reported and (peers.is_lost or len(peers.reports) == len(peers.others)):
                break
            time.sleep(_ENDING_LOOK_SECONDS / 2)
        if has_reported:
            self._write_closing()
        if peers.others and not peers.has_ended:
            peers.post_end()
        os._exit(EXIT_CODE)

    def _write_closing(self) -> None:
        """Write the reports of ranks on other nodes, which have another terminal, and name ranks that do not answer."""
        peers, ranks = self._peers, self._ranks
        reports = dict(peers.reports)
        own_node = range(ranks.node * ranks.num_local, (ranks.node + 1) * ranks.num_local)
        for rank, report in sorted(reports.items()):
            if ranks.local_rank == 0 and rank not in own_node:
                self._write(*report.splitlines())
        if peers.has_ended:
            return
        silent = [
            f"rank {rank} does not answer: it is stopped, or hangs in a call that holds Python's interpreter"
            + ("" if rank in own_node else ", or its node is gone")
            for rank in peers.others
            if rank not in reports and not peers.is_lost
        ]
        self._write(*silent, "the run stands still: all ranks end")

    def _write_report(self, report: Sequence[str]) -> None:
        lines = [*report]
        if (position := self._ask_device()) is not None:
            lines.append(f"    its device: {position}")
        lines += [f"    {line}" for line in _thread_stacks()]
        end, peers = time.monotonic() + _TURN_SECONDS, self._peers
        lower = {rank for rank in peers.others if rank < self._ranks.rank}
        while time.monotonic() < end and not lower <= peers.reports.keys():
            time.sleep(_ENDING_LOOK_SECONDS / 2)
        self._write(*lines)
        if self._clean_up is not None:
            self._write(f"all ranks end {self._clean_up()}")

    def _write(self, *lines: str) -> None:
        """Write without `sys.stderr` and `logging`, whose locks a hanging thread may hold."""
        text = "\n" + "".join(f"watchdog: {line}\n" for line in lines)
        left = text.encode(sys.stderr.encoding or "utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            while left:
                left = left[os.write(2, left) :]


def _thread_stacks() -> list[str]:
    """Return the stacks of all Python threads except the watchdog's, outermost frame first, as lines.

    It reads no file, because the disk may hang.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, f"of number {ident}, not started by Python")
        if name not in _OWN_THREADS:
            lines += [f"thread {name}:", *(f"    {line}" for line in _frame_lines(frame))]
    return lines


def _frame_lines(innermost: FrameType) -> list[str]:
    frames = [
        f"{'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{line} in {frame.f_code.co_qualname}"
        for frame, line in traceback.walk_stack(innermost)
    ]
    cut = [f"... {len(frames) - _MAX_FRAMES} more"] if len(frames) > _MAX_FRAMES else []
    return [*cut, *reversed(frames[:_MAX_FRAMES])]
