"""Programs as `launch.start_ranks` starts them, forked from a process that has imported torch and Mobius already.

Each of two ranks imports for five seconds of a core, and a benchmark has up to four runs of new ranks. What a benchmark
does with its processes stays as it is: they have sessions of their own, variables, a log, and exit codes.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from harness.forked import Ranks
from launch import PARENT_PID_VARIABLE, free_port, rank_variables


class ForkedProgram:
    """A process that runs a Python program, with what `launch` uses of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start it; `command` begins with Python. What it prints is appended to `log`."""
        ranks = Ranks(
            "harness.forked_programs",
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
    command: Sequence[str], *, num_ranks: int, environment: Mapping[str, str], log: IO[str], num_nodes: int = 1
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
    own = [rank_variables(rank, num_ranks, num_nodes) for rank in range(num_ranks)]
    return [ForkedProgram(command, {**shared, **variables}, path) for variables in own]


def be_program(script: str, *words: str) -> None:
    """Be the program, in a new process."""
    os.setsid()
    os.environ[PARENT_PID_VARIABLE] = str(os.getppid())  # the server that forks
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
