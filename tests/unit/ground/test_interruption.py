"""A signal ends a process whatever it is doing, and a worker ends with its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[3]

STUCK = """
import ctypes, sys, time
from pathlib import Path
from mobius.interruption import Interruption, Standing
standing = Standing()
interruption = Interruption(standing)
interruption.watch(speaks=True)
standing.becomes("after step 3 of 4", clear=Path("left").unlink)
Path("left").touch()
print("ready", flush=True)
{then}
"""
# Twice the same lock: a wait in C that no signal ends and that never comes back to Python.
DEADLOCK = "libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(256)\nwhile True: libc.pthread_mutex_lock(lock)"
BUSY = "while True: pass"

WORKER = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from mobius.interruption import end_with_parent, workers_not_interrupted

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), end_with_parent)
    with workers_not_interrupted():
        process = pool.submit(os.getpid)
    print(process.result(), flush=True)
    time.sleep(10_000)
"""


def heed_ctrl_c() -> None:
    """The tests may run in the background of a script, where programs ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(folder: Path, program: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(program)
    return subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_ctrl_c,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("then", [DEADLOCK, BUSY], ids=["waiting in C", "computing in Python"])
def test_a_signal_ends_a_process_with_one_line_and_its_own_code(
    tmp_path: Path, then: str, number: signal.Signals
) -> None:
    with start(tmp_path, STUCK.format(then=then)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        output, _ = process.communicate(timeout=HANG_SECONDS)

    assert output == f"interrupted ({number.name}) after step 3 of 4\n"
    assert process.returncode == 130
    assert not (tmp_path / "left").exists()


def test_an_error_that_a_signal_caused_is_not_told_beside_it(tmp_path: Path) -> None:
    """A neighbour that got the signal a moment earlier has closed its connection."""
    then = "interruption.goes_first()\nprint('lost a neighbour', flush=True)"
    with start(tmp_path, STUCK.format(then=f"time.sleep(0.2)\n{then}")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=HANG_SECONDS)[0] == "interrupted (SIGINT) after step 3 of 4\n"

    with start(tmp_path, STUCK.format(then=then)) as process:
        assert process.communicate(timeout=HANG_SECONDS)[0] == "ready\nlost a neighbour\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_worker_leaves_ctrl_c_to_its_parent_and_ends_with_it(tmp_path: Path, number: signal.Signals) -> None:
    with start(tmp_path, WORKER) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        if number == signal.SIGINT:
            os.kill(worker, signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            assert Path(f"/proc/{worker}").exists()
        process.kill()
        # The worker has the other end of this pipe too: it is closed when both have ended.
        process.communicate(timeout=HANG_SECONDS)
