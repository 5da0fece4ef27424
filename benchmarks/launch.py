"""Owns the processes of one benchmark run: starts its ranks, waits, and ends every one of them at the time limit.

Ranks are started as torchrun does, without its own seconds of start-up, each in a process group of its own so that
nothing it started outlives the run, and die with this process.
"""

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

POLL_SECONDS = 0.2
PORTS = range(20000, 32000)
"""Ports to listen on; Linux gives those from 32768 on to connections."""
_PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 5.0
"""Time for the other ranks to tell their part once one has failed."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    output: Any
    """The JSON that it wrote; None if it failed."""
    problem: str | None
    """"failed" or "timed out"; None if it ended well."""
    log_end: str
    """The last lines that its ranks printed."""
    machine_bytes: int
    """Host memory that the machine used at the most beyond what it used before, page-locked memory included."""
    seconds: float
    """Time from its start to its end."""


def run_ranks(
    command: Sequence[str],
    *,
    num_ranks: int,
    environment: Mapping[str, str],
    output: Path,
    timeout_seconds: float,
    log_lines: int = 25,
) -> RunResult:
    """Run `command` as `num_ranks` processes with torchrun's variables and read the JSON that it writes to `output`."""
    output.unlink(missing_ok=True)
    start, before = time.monotonic(), used_host_bytes()
    most, ranks = before, []
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            variables = {**environment, "BENCHMARK_START": str(start)}
            ranks += start_ranks(command, num_ranks=num_ranks, environment=variables, log=log)
            deadline = start + timeout_seconds
            while None in (codes := [process.poll() for process in ranks]):
                most = max(most, used_host_bytes())
                if any(codes):  # one has failed; None and 0 are well
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            end_ranks(ranks)
        log.seek(0)
        lines = log.read().splitlines()
    problem = None
    if any(codes) or (None not in codes and not output.is_file()):
        problem = "failed"
    elif None in codes:
        problem = "timed out"
    return RunResult(
        output=None if problem else json.loads(output.read_text()),
        problem=problem,
        log_end="\n".join(line[:400] for line in lines[-log_lines:]),
        machine_bytes=most - before,
        seconds=time.monotonic() - start,
    )


def start_ranks(
    command: Sequence[str], *, num_ranks: int, environment: Mapping[str, str], log: IO[str]
) -> list[subprocess.Popen[str]]:
    """Start `num_ranks` processes that print to `log`, with torchrun's variables and those of `environment`."""
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a process that crashes tells where
        "PYTHONWARNINGS": "ignore",  # they would fill the end of the log
        **environment,
    }
    own = [rank_variables(rank, num_ranks) for rank in range(num_ranks)]
    return [_start(command, {**shared, **variables}, log) for variables in own]


def rank_variables(rank: int, num_ranks: int, num_nodes: int = 1) -> dict[str, str]:
    """What torchrun sets for a rank, but for the place of its store.

    With several nodes the ranks of each take themselves, and NCCL takes them, for those of a machine of its own: they
    share this one's GPUs, and speak over sockets.
    """
    num_local = num_ranks // num_nodes
    variables = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank % num_local, "LOCAL_WORLD_SIZE": num_local}
    node = {"NCCL_HOSTID": f"node-{rank // num_local}"} if num_nodes > 1 else {}
    return {name: str(value) for name, value in variables.items()} | node


def end_ranks(ranks: Sequence[subprocess.Popen[str]]) -> None:
    """End the processes, and what they started and left in their groups, at once."""
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def die_with_parent() -> None:
    """End this process when the one that started it ends, however that is; a hung rank would go on using its GPU."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """A TCP port that nobody listens on now, out of those that the system gives to no connection by itself."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", secrets.choice(PORTS)))
            return int(probe.getsockname()[1])


def used_host_bytes() -> int:
    """Memory of the machine that is not available to a new process, without file caches."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(fields["MemTotal"].split()[0]) - int(fields["MemAvailable"].split()[0])) * 1024


def end_runs_when_terminated() -> None:
    """Make SIGTERM end this program as Ctrl-C does, its ranks with it."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A program's own words, and those behind ` -- `, which are Mobius's."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut + 1 :]


def _start(command: Sequence[str], environment: Mapping[str, str], log: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
