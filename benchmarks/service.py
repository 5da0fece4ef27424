"""Makes one run of worker.py after the other in the same processes, which saves most of each one's start.

A run that fails or takes too long ends the processes, and the next one starts new ones; that the planner refuses one
changes nothing.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from launch import GRACE_SECONDS, POLL_SECONDS, RunResult, end_ranks, free_port, start_ranks, used_host_bytes

WORKER = Path(__file__).parent / "worker.py"
LOG, LOG_LINES = "log.txt", 25
"""File that all ranks print to, and how many of its last lines are told."""


class Service:
    """Owns the ranks' processes, and a folder in which they are told what to run; use it with `with`."""

    def __init__(
        self,
        *,
        num_ranks: int,
        environment: Mapping[str, str],
        worker: Path = WORKER,
    ) -> None:
        """Processes start with the first run, with `environment` beside this process's own.

        `worker` is the program that serves.
        """
        self._num_ranks, self._environment, self._worker = num_ranks, environment, worker
        self._ranks: list[subprocess.Popen[str]] = []
        self._stack = contextlib.ExitStack()
        self._folder: Path
        self._number = 0

    def __enter__(self) -> "Service":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def run(self, options: Sequence[str], *, timeout_seconds: float) -> RunResult:
        """One run with `options`, which are those of worker.py behind its output."""
        start, before = time.monotonic(), used_host_bytes()
        if not self._ranks:
            self._begin()
        order, output = self._folder / f"{self._number}.json", self._folder / f"{self._number}.out"
        self._number += 1
        self._tell(order, {"options": list(options), "port": str(free_port()), "start": str(start)})
        most, deadline, problem = before, start + timeout_seconds, None
        while problem is None and not output.exists():
            most = max(most, used_host_bytes())
            if any(process.poll() is not None for process in self._ranks):
                self._let_the_others_tell()
                problem = "failed"
            elif time.monotonic() > deadline:
                problem = "timed out"
            else:
                time.sleep(POLL_SECONDS)
        if problem is not None:
            codes = [process.poll() for process in self._ranks]
            end_ranks(self._ranks)  # before the log is read
        # Of earlier runs too: what ends a rank may have been printed before the run in which it is seen to be gone.
        lines = (self._folder / LOG).read_text(errors="replace").splitlines()
        told: Any = None if problem is not None else json.loads(output.read_text())
        if told is not None and "refused" in told:
            told, problem, lines = None, "refused", [told["refused"]]
        elif problem is not None:
            lines.append(f"exit codes of the ranks: {codes}")
            self._end()
        return RunResult(
            output=told,
            problem=problem,
            log_end="\n".join(line[:400] for line in lines[-LOG_LINES:]),
            machine_bytes=most - before,
            seconds=time.monotonic() - start,
        )

    def _begin(self) -> None:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._number = 0
        with (self._folder / LOG).open("a") as log:
            self._ranks = start_ranks(
                [sys.executable, str(self._worker), "--serve", str(self._folder)],
                num_ranks=self._num_ranks,
                environment=self._environment,
                log=log,
            )
        self._stack.callback(end_ranks, list(self._ranks))

    def _let_the_others_tell(self) -> None:
        """Wait for the ranks that have not ended; some wait for the one that has."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in self._ranks):
            time.sleep(POLL_SECONDS)

    def _tell(self, order: Path, what: object) -> None:
        """Write the file whole: the ranks may look at any moment."""
        temporary = order.with_suffix(".new")
        temporary.write_text(json.dumps(what))
        temporary.replace(order)

    def _end(self) -> None:
        self._stack.close()
        self._ranks = []
