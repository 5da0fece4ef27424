"""A signal ends a process whatever it is doing, and a worker ends with its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS

from mobius.process.signal_handling import RunStatus

ROOT = Path(__file__).resolve().parents[3]

STUCK = """
import ctypes, sys, time
from pathlib import Path
from mobius.process.signal_handling import SignalHandler, RunStatus
run_status = RunStatus()
signal_handler = SignalHandler(run_status)
signal_handler.watch(is_first=True)
run_status.set_status("after step 3 of 4", clean_up=Path("left").unlink)
Path("left").touch()
print("ready", flush=True)
{then}
"""
SAVING = """
import time
from mobius.process.signal_handling import SignalHandler, SavedAndStopped, RunStatus
run_status = RunStatus()
signal_handler = SignalHandler(run_status)
signal_handler.watch(is_first=True)
run_status.set_status("after step 3 of 4: it is lost")
run_status.save_on_signal("step 3 would be lost")
print("ready", flush=True)
{then}
"""
UNTIL_ASKED = "while not run_status.stop_signal: time.sleep(0.01)\n"
REQUEST = (
    "interrupted (SIGINT): saving after this step, then ending; a second signal ends the run at once "
    "(step 3 would be lost)\n"
)
# Twice the same lock: a wait in C that no signal ends and that never comes back to Python.
DEADLOCK = "libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(256)\nwhile True: libc.pthread_mutex_lock(lock)"
BUSY = "while True: pass"
# One call that keeps the interpreter's lock for hours, but for the handlers of signals.
ARITHMETIC = "nine = 9\nnine ** (nine ** nine)"

WORKER = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from mobius.process.signal_handling import die_with_parent, sigint_blocked

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), die_with_parent)
    with sigint_blocked():
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
@pytest.mark.parametrize(
    "then", [DEADLOCK, BUSY, ARITHMETIC], ids=["waiting in C", "computing in Python", "computing in C"]
)
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
    then = "signal_handler.await_pending_signal()\nprint('lost a neighbour', flush=True)"
    module = "mobius.process.signal_handling"
    patient = f"import {module} as module\nmodule._ERROR_SECONDS = {HANG_SECONDS}\n"  # until it comes
    with start(tmp_path, STUCK.format(then=patient + then)) as process:
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


def interrupted(folder: Path, then: str, *pauses: float) -> tuple[str, int]:
    """Output and exit code of a program that is sent SIGINT when ready and, behind its answer, after each pause."""
    with start(folder, SAVING.format(then=then)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        request = process.stdout.readline()  # only now the first one has been heard
        for pause in pauses:
            time.sleep(pause)
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=HANG_SECONDS)
    return request + output, process.returncode


def test_a_run_that_can_save_goes_on_after_a_press_however_often_it_arrives(tmp_path: Path) -> None:
    then = f"{UNTIL_ASKED}time.sleep(2.5)\nprint(run_status.stop_signal, run_status.can_save)"
    assert interrupted(tmp_path, then, 0.1, 0.1) == (f"{REQUEST}SIGINT True\n", 0)


def test_a_second_press_ends_a_run_that_saves(tmp_path: Path) -> None:
    output, code = interrupted(tmp_path, BUSY, 2.3)
    assert (output, code) == (f"{REQUEST}interrupted (SIGINT) after step 3 of 4: it is lost\n", 130)


def test_a_run_that_has_saved_says_so_and_leaves_whatever_comes(tmp_path: Path) -> None:
    """The launcher ends the other ranks as soon as the first has ended: here it does so in the middle of the line."""
    then = f"""{UNTIL_ASKED}
import mobius.process.signal_handling as module, os, signal
say = module._say
def slowly(text):
    run_status._stop_time -= 10
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    say(text)
module._say = slowly
signal_handler.exit_after_save("after step 3 of 4: saved")"""
    assert interrupted(tmp_path, then) == (f"{REQUEST}interrupted (SIGINT) after step 3 of 4: saved\n", 130)


def test_a_run_that_no_longer_saves_ends_at_once(tmp_path: Path) -> None:
    then = f"run_status.stop_saving_on_signal()\nprint('exports', flush=True)\n{BUSY}"
    with start(tmp_path, SAVING.format(then=then)) as process:
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == ["ready\n", "exports\n"]
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=HANG_SECONDS)
    assert (output, process.returncode) == ("interrupted (SIGINT) after step 3 of 4: it is lost\n", 130)


def test_a_rank_that_goes_on_alone_has_lost_nobody(tmp_path: Path) -> None:
    """As the first one does, which generates answers when the others are done."""
    then = f"""
import os
os.environ |= {{"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}}
run_status.is_detached = True
print("alone", flush=True)
{BUSY}"""
    with start(tmp_path, STUCK.format(then=then)) as process:
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == ["ready\n", "alone\n"]
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=HANG_SECONDS)
    assert (output, process.returncode) == ("interrupted (SIGTERM) after step 3 of 4\n", 130)


def test_a_request_that_another_rank_got_is_said_once_and_is_the_same_press() -> None:
    run_status, said = RunStatus(), []
    run_status.announce = said.append
    saved = ["step 1"]
    run_status.set_status(lambda: f"{saved[-1]} is saved")
    run_status.save_on_signal(lambda: f"nothing since {saved[-1]} would be lost")
    saved.append("step 2")
    assert not run_status.is_duplicate_signal()
    run_status.request_stop("SIGTERM")
    run_status.request_stop("SIGINT")
    assert run_status.stop_signal == "SIGTERM"
    assert run_status.is_duplicate_signal()
    assert len(said) == 1
    assert said[0].startswith("interrupted (SIGTERM): saving after this step")
    assert "nothing since step 2 would be lost" in said[0], "as it is when the signal comes"
    assert run_status.clean_up() == "step 2 is saved"


def test_a_part_of_a_run_adds_what_an_interruption_removes() -> None:
    removed, run_status = list[str](), RunStatus()
    run_status.set_status("after step 3", clean_up=lambda: removed.append("outer"))
    with run_status.cleaning(lambda: removed.append("inner")):
        assert run_status.clean_up() == "after step 3"
    assert removed == ["inner", "outer"]
    run_status.clean_up()
    assert removed == ["inner", "outer", "outer"]
    with pytest.raises(ValueError, match="no room"), run_status.cleaning(lambda: removed.append("again")):
        raise ValueError("no room")
    assert removed[3:] == ["again"]


@pytest.mark.parametrize(
    ("limit", "seconds", "end"),
    [
        (None, 500.0, "(it would be lost)"),
        (30.0, 20.0, "(it would be lost)"),
        (30.0, 75.0, ". torchrun kills all ranks 30 s after a signal, a save takes about 75 s; train.sh waits"),
        (30.0, None, ". torchrun kills all ranks 30 s after a signal, a save may take longer; train.sh waits"),
    ],
)
def test_a_launcher_that_kills_too_early_is_told(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, seconds: float | None, end: str
) -> None:
    monkeypatch.setattr("mobius.process.signal_handling.seconds_until_killed", lambda: limit)
    run_status, said = RunStatus(), []
    run_status.announce = said.append
    run_status.save_on_signal("it would be lost", seconds=seconds)
    run_status.request_stop("SIGTERM")
    assert said[0].endswith(end)
