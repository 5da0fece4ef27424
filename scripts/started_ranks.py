"""Owns the processes of runs that are to be killed: starts ranks, by the launcher or by forks, and finds what is left.

As a program it is main.py with deterministic kernels, which no option asks for. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mobius.launcher import free_port
from mobius.process.ranks import prepare_environment

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS = 2
SHARED_MEMORY = Path("/dev/shm")
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
GRACE_SECONDS = 5.0
"""Time for the other ranks to tell their part once one has failed."""


def inherit_orphans() -> None:
    """From now on processes whose parent has ended become children of this one, however deep in the tree they were."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def take_own_shared_memory() -> bool:
    """Give this process, and those it starts from now on, a /dev/shm where nobody else leaves anything.

    Returns whether the system lets it, which takes the rights of root (CAP_SYS_ADMIN).
    """
    libc = ctypes.CDLL(None)
    return not (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        or libc.mount(b"tmpfs", bytes(SHARED_MEMORY), b"tmpfs", 0, b"mode=1777")
    )


def import_everything() -> None:
    """Import what a rank does, so that a forked one begins at once."""
    prepare_environment()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    for module in (
        "mobius.program",
        "mobius.training.run",
        "transformers.models.llama.modeling_llama",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
    ):
        importlib.import_module(module)
    gc.freeze()


def run_as_rank(words: list[str]) -> NoReturn:
    """Be a rank of main.py with deterministic kernels, which no option asks for."""
    prepare_environment()
    import torch

    from mobius.__main__ import main as run_main

    torch.use_deterministic_algorithms(True)
    sys.argv = ["main.py", *words]
    run_main()
    sys.stdout.flush()
    sys.exit(0)


@dataclass
class StartedRun:
    """One start of a run: its processes by name (`rank 0`, `launcher`), and the file that they print to."""

    output_file: Path
    processes: dict[str, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    is_launched: bool = False
    failed: float | None = None
    """When the first of them was found to have failed."""

    @property
    def output(self) -> str:
        """Everything that was printed so far."""
        return self.output_file.read_text(errors="replace")

    def is_over(self) -> bool:
        """Whether no process that was started here lives; ranks that are forked end with the first that fails."""
        reap(self.codes)
        if self.failed is None and self.code():
            self.failed = time.monotonic()
        if self.failed is not None and time.monotonic() - self.failed > GRACE_SECONDS and not self.is_launched:
            for process in self.processes.values() - self.codes.keys():
                os.kill(process, signal.SIGKILL)
        return all(process in self.codes for process in self.processes.values())

    def code(self) -> int:
        """The first exit code that is not 0, or 0."""
        return next((code for code in map(self.codes.get, self.processes.values()) if code), 0)

    def victims(self) -> dict[str, int]:
        """Processes to kill; the ranks of a launcher are known once they have started."""
        if not self.is_launched:
            return self.processes
        return self.processes | {f"rank {rank}": child for rank, child in ranks_of(self.processes["launcher"])}


def start(folder: Path, options: list[str], *, is_launched: bool, num_ranks: int = NUM_RANKS) -> StartedRun:
    """Start a run in `folder`."""
    started = StartedRun(folder / f"output-{time.monotonic_ns()}.txt", is_launched=is_launched)
    started.output_file.touch()
    variables = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    port = str(free_port())
    if is_launched:
        program = [str(Path(__file__).resolve())] if "cuda" in options else [str(ROOT / "main.py")]
        launcher = ["-m", "mobius.launcher", "--nproc_per_node", str(num_ranks), "--master_port", port]
        words = [sys.executable, *launcher, *program, *options]
        started.processes["launcher"] = forked(
            lambda: os.execve(sys.executable, words, variables), folder, started.output_file
        )
        return started
    for rank in range(num_ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

        def become_rank(own: Mapping[str, str] = own) -> None:
            os.environ.update({**variables, **own})
            if "cuda" in options:
                run_as_rank(options)
            sys.argv = ["main.py", *options]
            importlib.import_module("mobius.__main__").main()

        started.processes[f"rank {rank}"] = forked(become_rank, folder, started.output_file)
    return started


def forked(work: Callable[[], object], folder: Path, output_file: Path) -> int:
    """Number of a new process that does `work` in `folder` and ends."""
    sys.stdout.flush()
    if process := os.fork():
        return process
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        file = os.open(output_file, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def reap(codes: dict[int, int]) -> None:
    """Take note of the processes that have ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])


def children_of(process: int) -> set[int]:
    """Processes that a process has started or inherited."""
    found: set[int] = set()
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= set(map(int, file.read_text().split()))
    return found


def descendants() -> set[int]:
    """All processes that come from this one and live."""
    reap({})
    found, new = set[int](), children_of(os.getpid())
    while new:
        found |= new
        new = {child for process in new for child in children_of(process)} - found
    return found


def ranks_of(launcher: int) -> Iterator[tuple[int, int]]:
    """Rank and process of each rank that a launcher has started."""
    for child in children_of(launcher):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            for variable in variables:
                if variable.startswith(b"RANK="):
                    yield int(variable[5:]), child


def end_descendants() -> None:
    """Kill whatever this process has started."""
    for process in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def wait_until(condition: Callable[[], object], seconds: float, *, pause: float = 0.002) -> bool:
    """Whether a condition comes true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def left_in_shared_memory(before: set[str]) -> list[str]:
    """Files that came to /dev/shm and that no process has open or mapped: those of others go with their owners."""
    new = {path.name for path in SHARED_MEMORY.iterdir()} - before
    used: set[str] = set()
    if new:
        for process in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                used |= set(re.findall(rf"{SHARED_MEMORY}/(\S+)", Path(f"/proc/{process}/maps").read_text()))
            with contextlib.suppress(OSError):
                for link in Path(f"/proc/{process}/fd").iterdir():
                    with contextlib.suppress(FileNotFoundError):  # of this very listing, for one
                        used.add(os.path.basename(os.readlink(link)))
    return sorted(name for name in new - used if (SHARED_MEMORY / name).exists())


if __name__ == "__main__":
    run_as_rank(sys.argv[1:])
