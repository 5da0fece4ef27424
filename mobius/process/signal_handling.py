"""Ends a process early: at Ctrl-C, SIGTERM or SIGHUP, or because the parent process has ended.

A signal handler in Python runs between two instructions of the main thread, and that thread may be blocked in C,
waiting for a neighbour or a GPU. So a separate thread receives the signal's number:

    signal -> C handler of Python -> socket -> thread "interruption": clear up, one line from the first rank, os._exit

While the run can save (`save_on_signal`), the first Ctrl-C only requests a stop, and the second ends the process as
above. One press can reach a rank twice, from the terminal and from the launcher:

    Ctrl-C -> terminal -> rank            the request: stop_signal is set, one line from the first rank
           -> launcher -> rank            the same press, within _DUPLICATE_SIGNAL_SECONDS
    rank died -> launcher -> SIGTERM      no request: nothing can be saved without that rank, all ranks end at once
"""

import contextlib
import ctypes
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

from tqdm import tqdm

from mobius.process.ranks import (
    caller_pid,
    export_parent_pid,
    exported_parent_pid,
    has_lost_rank,
    is_started_by_torchrun,
    seconds_until_killed,
)

EXIT_CODE: Final = 130
"""Exit code of an interrupted process, for every signal: 128 + SIGINT, as in shells."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FIRST_RANK_SECONDS: Final = 0.5
"""Seconds for rank 0 to print the message of all ranks before it sees the other ranks end as lost neighbours."""
_ERROR_SECONDS: Final = 0.3
"""Longest time from an error to the signal that caused it: a signal does not reach all ranks at once."""
_DUPLICATE_SIGNAL_SECONDS: Final = 2.0
"""Longest time between the two arrivals of one press at a rank, even if the launcher's cores are busy. If a second
press counts as the first, the user must press a third time; but if one press counts as two, the work since the last
save is lost."""
_HEARING_SECONDS: Final = 0.3
"""Longest time until the thread has read a signal's number."""
_ENDING_SECONDS: Final = 2.0
_PR_SET_PDEATHSIG: Final = 1

_being_started: Final = threading.Lock()
"""Lock that is held while a worker process is started."""


Text = str | Callable[[], str]
"""A text, or a function that returns the text when it is needed."""


class SavedAndStopped(BaseException):
    """Raised when a run has saved after a stop request; its text completes "interrupted (SIGINT) "."""


class RunStatus:
    """Text about the results that a run would leave if it ended now; the run sets it, the signal handler prints it.

    A run that can save calls `save_on_signal` and checks `stop_signal` after each step, on every rank, because a signal
    may reach only one rank. Once all ranks have saved, the run raises SavedAndStopped.
    """

    def __init__(self) -> None:
        self.announce: Callable[[str], None] = lambda _: None
        """Function that prints the line of a stop request."""
        self.is_detached = False
        """Whether to ignore the end of other ranks: they are done, and only rank 0 continues."""
        self.stop_signal: str | None = None
        """Name of the signal that asked the run to save and end, such as SIGTERM; None before such a signal."""
        self._stop_time = 0.0
        self._offer: tuple[Text, float | None] | None = None
        self.set_status("before the first step: nothing was trained, and nothing is left")

    def set_status(self, text: Text, *, clean_up: Callable[[], None] | None = None) -> None:
        """Set the function that an interruption calls, and the line `text`, which completes "interrupted (SIGINT) ".

        `clean_up`, and `text` if it is a function, run in another thread while the main thread continues.
        """
        self._now = text, clean_up  # one assignment, so that the other thread never sees only a part

    @contextlib.contextmanager
    def cleaning(self, clean_up: Callable[[], None]) -> Iterator[None]:
        """Context in which an interruption, or an exception, also calls `clean_up`."""
        text, outer = self._now

        def both() -> None:
            clean_up()
            if outer is not None:
                outer()

        self._now = text, both
        try:
            yield
        except BaseException:
            clean_up()
            raise
        finally:
            self._now = text, outer

    def clean_up(self) -> str:
        """Remove temporary files; returns the text."""
        text, clean_up = self._now
        if clean_up is not None:
            with contextlib.suppress(OSError):  # the run may just have removed the file
                clean_up()
        return _text_now(text)

    def save_on_signal(self, lost: Text, *, seconds: float | None = None) -> None:
        """Let the first signal only set `stop_signal`; the second still ends the process.

        `lost` describes what an immediate exit would lose, such as "steps 21 to 37 would be lost"; `seconds` is the
        predicted time of the step and the save. Both are printed only after a signal.
        """
        self._offer = lost, seconds

    def stop_saving_on_signal(self) -> None:
        """Let the first signal end the process again; a pending stop request remains."""
        self._offer = None

    @property
    def can_save(self) -> bool:
        """Whether a signal requests a save."""
        return self._offer is not None

    def request_stop(self, signal_name: str) -> None:
        """Set `stop_signal`, after a signal on this or another rank; rank 0 logs it once."""
        if self.stop_signal is None:
            self.stop_signal, self._stop_time = signal_name, time.monotonic()
            self.announce(f"interrupted ({signal_name}): saving after this step, then ending; {self._warning()}")

    def is_duplicate_signal(self) -> bool:
        """Whether a signal that comes now is a second delivery of the signal in `stop_signal`."""
        return self.stop_signal is not None and time.monotonic() - self._stop_time < _DUPLICATE_SIGNAL_SECONDS

    def _warning(self) -> str:
        lost, seconds = self._offer or ("nothing would be saved", None)
        warning = f"a second signal ends the run at once ({_text_now(lost)})"
        limit = seconds_until_killed()
        if limit is None or (seconds is not None and seconds < limit):
            return warning
        duration = "may take longer" if seconds is None else f"takes about {seconds:.0f} s"
        return f"{warning}. torchrun kills all ranks {limit:.0f} s after a signal, a save {duration}; train.sh waits"


class SignalHandler:
    """Handles a process's signals from `watch` to `restore_handlers`.

    A signal ends the process within a second, unless the run saves first: then the signal is a request, see
    `RunStatus`.
    """

    def __init__(self, run_status: RunStatus) -> None:
        self._run_status = run_status
        self._has_come = threading.Event()
        self._has_saved = threading.Event()
        self._is_first = False
        self._sender: socket.socket | None = None
        self._watched: list[signal.Signals] = []

    def watch(self, *, is_first: bool) -> None:
        """End this process at a signal; the first rank (`is_first`) prints the status. Call it in the main thread."""
        self._is_first = is_first
        if is_first:
            self._run_status.announce = _say
        receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._watched = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        for number in self._watched:  # not signals that are ignored, such as Ctrl-C in a background job
            signal.signal(number, self._release_interpreter)
        os.register_at_fork(after_in_child=self.restore_handlers)  # a signal to a fork must not end this process
        threading.Thread(target=self._heed_signals, args=(receiver,), name="interruption", daemon=True).start()

    def restore_handlers(self) -> None:
        """Restore the default handlers: signals end the process without a message."""
        if self._sender is not None:
            signal.set_wakeup_fd(-1)
            for number in self._watched:
                signal.signal(number, signal.SIG_DFL)
            self._sender = None

    def await_pending_signal(self) -> None:
        """Return if no signal has caused the current error; otherwise the signal ends the process here."""
        if self._sender is not None and self._has_come.wait(_ERROR_SECONDS):
            threading.Event().wait()
        self.restore_handlers()

    def exit_after_save(self, text: str) -> NoReturn:
        """End this process with code 130 after a stop request and a save; rank 0 prints `text`.

        Call it on every rank after the save and a barrier: a launcher ends all ranks as soon as one has ended.
        """
        self._has_saved.set()
        sys.stdout.flush()
        sys.stderr.flush()
        if self._is_first:
            _say(f"interrupted ({self._run_status.stop_signal}) {text}")
        else:
            time.sleep(_FIRST_RANK_SECONDS)
        os._exit(EXIT_CODE)

    def _release_interpreter(self, *_: object) -> None:
        """Wait in the main thread until the signal thread has decided; long arithmetic would keep Python's lock."""
        asked, start = self._run_status.stop_signal, time.monotonic()
        while not self._has_come.is_set() and self._run_status.stop_signal == asked:
            if time.monotonic() - start > _HEARING_SECONDS:
                return
            time.sleep(0.001)
        while self._has_come.is_set() and time.monotonic() - start < _ENDING_SECONDS:  # it may need this thread's lock
            time.sleep(0.01)

    def _heed_signals(self, receiver: socket.socket) -> None:
        while received := receiver.recv(1):  # empty when the socket is closed
            if received[0] not in self._watched:  # other signals with a Python handler arrive, too
                continue
            name = signal.Signals(received[0]).name
            if received[0] == signal.SIGHUP:
                redirect_closed_terminal()
            if not self._run_status.is_detached and has_lost_rank():
                # torchrun reports a failure and stops the other ranks; it would list their ends as further failures.
                self._end("another rank has ended", exit_code=EXIT_CODE if self._is_first else 0)
            elif self._run_status.stop_signal is None and self._run_status.can_save:
                self._run_status.request_stop(name)
            elif not self._run_status.is_duplicate_signal():
                self._end(name)

    def _end(self, cause: str, *, exit_code: int = EXIT_CODE) -> None:
        if self._has_saved.is_set():
            return
        self._has_come.set()
        _being_started.acquire(timeout=5)  # the start of a worker may delay an interruption, but not prevent it
        if self._is_first:
            _say(f"interrupted ({cause}) {self._run_status.clean_up()}")
        else:
            time.sleep(_FIRST_RANK_SECONDS)
        os._exit(exit_code)


def redirect_closed_terminal() -> None:
    """Discard output to a closed terminal, because each line would raise an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode):  # not `isatty`, which is False for a closed terminal
                os.dup2(nowhere, stream)
    os.close(nowhere)


def _text_now(text: Text) -> str:
    return text if isinstance(text, str) else text()


def _say(text: str) -> None:
    """Write a line to standard error without `sys.stderr` and `logging`, whose locks another thread may hold."""
    # The current line of standard error may contain "^C" or a progress bar.
    start = "\r\x1b[K" if os.isatty(2) else "\n" if getattr(tqdm, "_instances", ()) else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{start}{text}\n".encode())


def die_with_launcher() -> None:
    """Let Linux kill this process when its parent, torchrun, ends.

    If the launcher ended before this call, the rendezvous at its store fails.
    """
    if is_started_by_torchrun():
        _die_with(os.getppid())


def stop_with_caller() -> None:
    """Let Linux interrupt this launcher, whose ranks then save, when the Python program that started it ends."""
    if sys.platform == "linux" and (caller := caller_pid()) is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != caller:
            os._exit(EXIT_CODE)


def die_with_parent() -> None:
    """Leave Ctrl-C to the parent of a `multiprocessing` worker, and end with the parent (the latter on Linux only)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if (parent := exported_parent_pid()) is not None:
        _die_with(parent)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(EXIT_CODE)


@contextlib.contextmanager
def sigint_blocked() -> Iterator[None]:
    """Keep Ctrl-C from workers that start in the block until they call `die_with_parent`; this process gets it."""
    export_parent_pid()
    with _being_started:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
