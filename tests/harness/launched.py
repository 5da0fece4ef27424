"""Launchers and programs that have imported torch when they start, as they are forked; and the processes of others.

A launcher of its own imports for two seconds, each rank for four, on cores that other tests want. Here the launcher's
code is the real one, and so are processes, their parents, sessions and signals; only no program is loaded anew. A rank
that is forked is called `rank 0` in /proc/NUMBER/comm, because its environ is that of whoever loaded Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from subprocess import TimeoutExpired
from typing import IO, Any, NoReturn

from harness.forked import ROOT, Ranks, take_environment
from launch import die_with_parent, free_port, rank_variables

_PR_SET_NAME = 15


class Launched:
    """A launcher with a process group of its own, as a terminal starts it; what all print goes to `output_file`."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        forks_ranks: bool = False,
        ignores_hang_up: bool = False,
    ) -> None:
        """Start `mobius.launcher` with `words` in `folder`."""
        self._run = Ranks(
            "harness.launched",
            "be_launcher",
            [list(words), forks_ranks, ignores_hang_up],
            num_ranks=1,
            folder=folder,
            environment=environment,
        )
        self.output_file = self._run.output_file
        (self._process,) = self._run.processes
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal's number; None while it lives."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same, as `subprocess` has it."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code once it has ended; raises TimeoutExpired if it has not after so many seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired("the launcher", timeout or 0)
        return self.returncode

    def output(self) -> str:
        """What was printed so far."""
        return self._run.output()

    def kill(self) -> None:
        """Kill the launcher alone."""
        if self.returncode is None:
            self._process.kill()


def be_launcher(words: list[str], forks_ranks: bool, ignores_hang_up: bool) -> NoReturn:
    """Be the launcher, in a new process; `words` are its arguments."""
    os.setsid()
    # The tests may run in the background of a script, where programs ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores_hang_up else signal.SIG_DFL)
    from torch.distributed.elastic.multiprocessing import subprocess_handler

    from mobius import launcher

    if forks_ranks:
        subprocess_handler.subprocess_handler.Popen = ForkedRank  # type: ignore[attr-defined]
    sys.argv = [str(ROOT / "mobius" / "launcher.py"), *words]
    sys.exit(launcher.main(words))


class ForkedRank:
    """A rank of main.py for torchrun, which takes it for a `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **_: Any) -> None:
        """Fork it; `args` are the words of a command line that begins with Python."""
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            _be_rank(list(args), env)

    def poll(self) -> int | None:
        """The exit code, negative for a signal's number; None while it lives."""
        if self.returncode is None:
            number, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if number else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code once it has ended; raises TimeoutExpired if it has not after so many seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise TimeoutExpired("a rank", timeout or 0)
            time.sleep(0.01)
        return code


def _be_rank(words: list[str], environment: Mapping[str, str]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        tracker = resource_tracker._resource_tracker  # type: ignore[attr-defined]
        tracker._fd = tracker._pid = None  # that of the tests would outlive the rank
        logging.disable(logging.NOTSET)  # which the launcher does for itself
        take_environment(environment)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank {environment['RANK']}".encode())
        place = next(number for number, word in enumerate(words) if word.endswith("main.py"))
        sys.argv = words[place:]
        runpy.run_path(words[place], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)


class ForkedProgram:
    """A process that runs a Python program, with what `launch` uses of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start it; `command` begins with Python. What it prints is appended to `log`."""
        ranks = Ranks(
            "harness.launched",
            "be_program",
            command[1:],
            num_ranks=1,
            folder=Path.cwd(),
            environment=environment,
            output_file=log,
        )
        (self._process,) = ranks.processes
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal's number; None while it lives."""
        return self._process.exitcode

    def wait(self) -> None:
        """End it, which comes before a look at how it ended: nobody else waits for one that is to live on."""
        self._process.kill()  # its session may not have been there when its group was to be killed
        self._process.join()


def start_forked(
    command: Sequence[str], *, num_ranks: int, environment: Mapping[str, str], log: IO[str]
) -> list[ForkedProgram]:
    """The same as `launch.start_ranks`, forked."""
    # A file without a name is open for as long as its processes live.
    path = Path(log.name if isinstance(log.name, str) else f"/proc/{os.getpid()}/fd/{log.fileno()}")
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONWARNINGS": "ignore",
        **environment,
    }
    own = [rank_variables(rank, num_ranks) for rank in range(num_ranks)]
    return [ForkedProgram(command, {**shared, **variables}, path) for variables in own]


def be_program(script: str, *words: str) -> None:
    """Be the program, in a new process."""
    os.setsid()
    die_with_parent()  # the server that forks
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def is_alive(process: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def family(process: int) -> set[int]:
    """All that a process has started, and what that has started."""
    found: set[int] = set()
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = [int(child) for child in file.read_text().split()]
        except OSError:
            continue
        found |= {*children, *(number for child in children for number in family(child))}
    return found


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> process, of those that live; one that is forked has it in its name."""
    found = {}
    for child in family(launcher):
        try:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            name, _, rest = Path(f"/proc/{child}/stat").read_text().partition(" (")[2].rpartition(")")
        except OSError:
            continue
        words, parent = [*variables, name.replace("rank ", "RANK=").encode()], int(rest.split()[1])
        rank = next((int(each.partition(b"=")[2]) for each in words if each.startswith(b"RANK=")), None)
        if rank is not None and parent == launcher:
            found[rank] = child
    return found
