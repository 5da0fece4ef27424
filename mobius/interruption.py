"""Owns how a process ends that is not done: by Ctrl-C or SIGTERM, or because the process that started it is gone.

A signal handler in Python runs between two instructions of the main thread, and that thread may be waiting in C for a
neighbour or a GPU that never comes. So the signal's number goes to a thread of its own:

    signal -> C handler of Python -> socket -> thread "interruption": clear up, one line from the first rank, os._exit
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from tqdm import tqdm

from mobius.ranks import is_started_by_torchrun, name_parent_to_workers, parent_of_worker

EXIT_CODE: Final = 130
"""Exit code of an interrupted process, whatever the signal: 128 + SIGINT, as shells tell it."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_FIRST_RANK_SECONDS: Final = 0.5
"""Time for the first rank, which speaks for all, before the end of the others can reach it as a lost neighbour."""
_ERROR_SECONDS: Final = 0.3
"""Longest time by which a signal may come after the error that it caused: it does not reach all ranks at once."""
_PR_SET_PDEATHSIG: Final = 1

_being_started: Final = threading.Lock()
"""Held while a worker process is started."""


class Standing:
    """The state that a run would leave if it ended now: the run tells it, an interruption passes it on."""

    def __init__(self) -> None:
        self.becomes("before the first step: nothing was trained, and nothing is left")

    def becomes(self, text: str, *, clear: Callable[[], None] | None = None) -> None:
        """From now on an interruption calls `clear` and says `text`, which goes on from "interrupted (SIGINT) ".

        `clear` runs in another thread, while the run's own goes on.
        """
        self._now = text, clear  # one assignment: the other thread never sees half of it

    def clear(self) -> str:
        """Remove what is not to be left; returns the text."""
        text, clear = self._now
        if clear is not None:
            with contextlib.suppress(OSError):  # removed by the run itself at this moment
                clear()
        return text


class Interruption:
    """Owns the signals of a process from `watch` to `stand_down`: the first that comes ends it within a second."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._has_come = threading.Event()
        self._sender: socket.socket | None = None
        self._watched: list[signal.Signals] = []

    def watch(self, *, speaks: bool) -> None:
        """End this process at a signal; the one that `speaks` says the run's standing. Call it in the main thread."""
        receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._watched = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        for number in self._watched:  # a job in the background of a script ignores Ctrl-C
            signal.signal(number, lambda *_: None)  # without a handler Python would not write the number to the socket
        os.register_at_fork(after_in_child=self.stand_down)  # a signal for a fork is not one for this process
        threading.Thread(target=self._end_at_signal, args=(receiver, speaks), name="interruption", daemon=True).start()

    def stand_down(self) -> None:
        """Leave signals to the system again: they end the process without a word."""
        if self._sender is not None:
            signal.set_wakeup_fd(-1)
            for number in self._watched:
                signal.signal(number, signal.SIG_DFL)
            self._sender = None

    def goes_first(self) -> None:
        """Return if no signal has caused the error of now; else the process ends here, by the signal."""
        if self._sender is not None and self._has_come.wait(_ERROR_SECONDS):
            threading.Event().wait()
        self.stand_down()

    def _end_at_signal(self, receiver: socket.socket, speaks: bool) -> None:
        if not (received := receiver.recv(1)):  # closed: the watch is over
            return
        self._has_come.set()
        _being_started.acquire(timeout=5)  # the start of a worker may hold an interruption up, not stop it
        if speaks:
            text = f"interrupted ({signal.Signals(received[0]).name}) {self._standing.clear()}\n"
            # The line that standard error is in may have "^C" or a progress bar in it.
            start = "\r\x1b[K" if os.isatty(2) else "\n" if getattr(tqdm, "_instances", ()) else ""
            with contextlib.suppress(OSError):
                os.write(2, (start + text).encode())  # the main thread may hold the locks of sys.stderr and `logging`
        else:
            time.sleep(_FIRST_RANK_SECONDS)
        os._exit(EXIT_CODE)


def end_with_launcher() -> None:
    """Let Linux kill this process when torchrun, which started it, has ended.

    A launcher that ends before this call is noticed when the ranks meet in its store.
    """
    if is_started_by_torchrun():
        _end_with(os.getppid())


def end_with_parent() -> None:
    """In a worker of `multiprocessing`: leave Ctrl-C to the parent, and end when it ends. Linux only for the latter."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if (parent := parent_of_worker()) is not None:
        _end_with(parent)


def _end_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before that
            os._exit(EXIT_CODE)


@contextlib.contextmanager
def workers_not_interrupted() -> Iterator[None]:
    """Start worker processes within: Ctrl-C, which this process still gets, waits for their `end_with_parent`."""
    name_parent_to_workers()
    with _being_started:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
