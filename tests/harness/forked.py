"""Processes that have imported torch, transformers and Mobius when they start: forked from one that imported them once.

A process of its own imports for four seconds, on a core that other tests want. What is forked is a process like any
other: its own memory, environment, folder, output and end. It is not started by torchrun; tests of that start it.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
from launch import free_port, rank_variables

from mobius.process.ranks import prepare_environment

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "main",
    "mobius.training.run",
    "mobius.planner.forecast",
    "transformers.models.llama.modeling_llama",
    "matplotlib.figure",  # for the picture at a run's end
    "matplotlib.backends.backend_agg",
    "harness.frozen",  # the last one
)
HANG_SECONDS = 1200.0
"""After which something hangs: ten times what the slowest test takes on the slowest machine that ran them."""


class Ranks:
    """Processes that call a function of a module, with torchrun's variables if there are several.

    A `main` finds `arguments` in sys.argv, any other function is given them.
    """

    def __init__(
        self,
        module: str,
        function: str,
        arguments: Sequence[Any],
        *,
        num_ranks: int,
        folder: Path,
        environment: Mapping[str, str],
        program: str = "main.py",
        output_file: Path | None = None,
        num_nodes: int = 1,
        draws: bool = False,
    ) -> None:
        """Start them in `folder`; what they print goes to one file there or to `output_file`, which is there.

        `program` is their sys.argv[0]. They take themselves for those of `num_nodes` nodes. Unless a run `draws`, its
        picture is an empty file: a real one takes a third of a small run.
        """
        self.output_file = output_file or folder / f"output-{time.monotonic_ns()}.txt"
        self.output_file.touch()
        self.processes: list[ForkServerProcess] = []
        port = str(free_port())
        for rank in range(num_ranks):
            variables = dict(environment)
            if num_ranks > 1:
                variables |= rank_variables(rank, num_ranks, num_nodes)
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            given = (module, function, list(arguments), str(folder), variables, str(self.output_file), program, draws)
            self.processes.append(_context().Process(target=_run, args=given))
            self.processes[-1].start()

    def wait(self, *, seconds: float = HANG_SECONDS) -> int:
        """The first exit code that is not 0, or 0; when one fails or time is out, the others are killed."""
        deadline = time.monotonic() + seconds
        while any(process.is_alive() for process in self.processes):
            is_over = time.monotonic() > deadline
            if is_over or any(process.exitcode for process in self.processes):
                for process in self.processes:
                    process.join(0 if is_over else 20)  # they tell their part, too
                    process.kill()
                assert not is_over, f"hangs: {self.output()}"
            time.sleep(0.01)
        codes = [process.exitcode for process in self.processes]
        return next((code for code in codes if code), 0)

    def output(self) -> str:
        """What they have printed, on both streams."""
        return self.output_file.read_text(errors="replace")


def import_all() -> None:
    """Import IMPORTED here, and read the options' descriptions as each run does, before `fork_server`."""
    with library_environment():
        for name in IMPORTED:
            importlib.import_module(name)
        importlib.import_module("mobius.config.cli").parse_args([])


def fork_server() -> None:
    """Let the server be a fork of this process, which has imported IMPORTED and has no other thread."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    read, write = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := connection.arbitrary_address("AF_UNIX"))
        listener.listen()
        if not (number := os.fork()):
            _be_server(listener, read, write)
    os.close(read)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, write, number


def _be_server(listener: socket.socket, read: int, write: int) -> NoReturn:
    try:
        os.close(write)
        # What pytest has changed.
        sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
        forkserver.main(listener.detach(), read, [])
    finally:
        os._exit(0)


def _context() -> ForkServerContext:
    """The context whose server imports IMPORTED when the first process is asked for, unless there is one already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with library_environment():
        # One thread, because a fork takes no others along.
        os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def library_environment() -> Iterator[None]:
    """What libraries read while a run imports them."""
    before = dict(os.environ)
    prepare_environment()
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Whoever asks for GPUs while they are imported asks the driver's library, and starts no CUDA: forks cannot use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def leave_pictures_empty() -> None:
    """Let runs of this process end without drawing."""
    importlib.import_module("mobius.training.reporting").draw_training = lambda _, path, **__: path.touch()


def take_environment(environment: Mapping[str, str]) -> None:
    """Have this environment and no other, and the threads that torch would take with it."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or 1))


def _run(
    module: str,
    function: str,
    arguments: list[Any],
    folder: str,
    environment: Mapping[str, str],
    output: str,
    program: str,
    draws: bool,
) -> None:
    """In the new process: its folder, environment and output, then the function."""
    # The tests may run in the background of a script, where programs ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    take_environment(environment)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # Python's own streams were made for what the server had.
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = [program, *map(str, arguments)]
    if not draws:
        leave_pictures_empty()
    call: Callable[..., object] = getattr(importlib.import_module(module), function)
    call() if function == "main" else call(*arguments)
