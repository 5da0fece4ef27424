"""A rank that stands still says where, calls the others, and all end; one that goes on is left alone."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[3]
PYTHONPATH = f"{ROOT}:{ROOT / 'tests'}"

PROGRAM = """
import ctypes, os, sys, threading, time
from harness.folder_store import FolderStore
from mobius.process.activity import Activity
from mobius.process.ranks import Ranks
from mobius.schedule.action import Action, ActionKind
from mobius.distributed.watchdog import Watchdog

rank, num_ranks, seconds, patience = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
activity = Activity()
watchdog = Watchdog(
    activity,
    Ranks(rank, num_ranks, rank),
    minutes=seconds / 60,
    open_store=FolderStore if num_ranks > 1 else None,
    report_timeout_seconds=patience,
)

def hang():
    threading.Event().wait()

def go_on(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        activity.progress()
        time.sleep(0.01)

activity.start_step(12)
activity.start_action(Action(ActionKind.FORWARD_MIDDLE, 4 + rank, 1))
"""
READY_TO_HANG = "watchdog.start(); print('ready', flush=True); hang()"
HANG = "watchdog.start()\nwith activity.waiting('neighbours', rank=0, stage=3): hang()"


def start(
    folder: Path, then: str, *, rank: int = 0, num_ranks: int = 1, seconds: float = 1, patience: float = 3
) -> subprocess.Popen[str]:
    (folder / f"program-{rank}.py").write_text(PROGRAM + then)
    return subprocess.Popen(
        [sys.executable, f"program-{rank}.py", str(rank), str(num_ranks), str(seconds), str(patience)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs(*processes: subprocess.Popen[str]) -> list[str]:
    return [process.communicate(timeout=HANG_SECONDS)[0] for process in processes]


def test_a_rank_that_hangs_says_where_and_ends_with_its_own_code(tmp_path: Path) -> None:
    process = start(tmp_path, HANG)
    (output,) = outputs(process)

    lines = [line.removeprefix("watchdog: ").strip() for line in output.splitlines()]
    lines = lines[next(number for number, line in enumerate(lines) if "no progress" in line) :]
    assert re.fullmatch(rf"rank 0 \(process {process.pid} on .+\): no progress for 1\.\d s \(.*\)", lines[0]), output
    assert re.fullmatch(r"in step 12, at F4\.1 \(stage 4, microbatch 1\) for \d+\.\d s", lines[1]), output
    assert re.fullmatch(r"waits for neighbours \(output of stage 3\), from rank 0 for \d+\.\d s", lines[2]), output
    assert "thread MainThread:" in lines
    assert any(re.fullmatch(r".*program-0\.py:\d+ in hang", line) for line in lines), output
    assert lines[-1] == "the run stands still: all ranks end"
    assert process.returncode == 75


@pytest.mark.parametrize("then", ["go_on(2.5)", "activity.start_task('optimizer', 'stage 1'); go_on(2.5)"])
def test_a_rank_that_goes_on_is_left_alone_however_long_an_action_takes(tmp_path: Path, then: str) -> None:
    process = start(tmp_path, f"watchdog.start()\n{then}\nprint('done')", seconds=1.5)
    assert outputs(process) == ["done\n"]
    assert process.returncode == 0


def test_nothing_is_watched_with_zero_minutes_before_the_start_or_after_the_end(tmp_path: Path) -> None:
    processes = [
        start(tmp_path, "watchdog.start(); time.sleep(1)", rank=0, seconds=0),
        start(tmp_path, "time.sleep(0.9)", rank=0, seconds=0.3),
        start(tmp_path, "watchdog.start(); watchdog.stop(); time.sleep(0.9)", rank=2, num_ranks=3, seconds=0.3),
    ]
    assert outputs(*processes) == ["", "", ""]
    assert [process.returncode for process in processes] == [0, 0, 0]


def test_a_watch_that_was_stopped_begins_anew(tmp_path: Path) -> None:
    process = start(tmp_path, f"watchdog.start(); watchdog.stop(); time.sleep(0.9)\n{HANG}", seconds=0.5)
    assert re.search(r"no progress for 0\.[56] s", outputs(process)[0])
    assert process.returncode == 75


def test_a_process_that_was_stopped_for_long_goes_on(tmp_path: Path) -> None:
    then = """
told, write = threading.Event(), watchdog._write
def write_and_tell(*lines):
    write(*lines)
    told.set()
watchdog._write = write_and_tell
watchdog.start()
print('ready', flush=True)
told.wait()
time.sleep(0.8)  # with the time it was stopped for, it would be over
print('done')
"""
    process = start(tmp_path, then, seconds=2)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.6)
    process.send_signal(signal.SIGCONT)
    (output,) = outputs(process)
    assert "it continues" in output
    assert output.endswith("done\n")
    assert process.returncode == 0


def test_a_rank_that_hangs_is_told_with_the_ranks_that_wait_for_it(tmp_path: Path) -> None:
    """Only rank 2 notices: the others have more patience, and are called."""
    processes = [start(tmp_path, READY_TO_HANG, rank=rank, num_ranks=3, seconds=60, patience=30) for rank in (0, 1)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    begin = time.monotonic()
    processes.append(start(tmp_path, HANG, rank=2, num_ranks=3, patience=30))
    texts = outputs(*processes)

    assert time.monotonic() - begin < 30
    assert [process.returncode for process in processes] == [75, 75, 75]
    assert "no progress for" in texts[2]
    for rank in (0, 1):
        assert f"rank {rank} (process {processes[rank].pid}" in texts[rank]
        assert "rank 2 has called all ranks" in texts[rank]
        assert f"in step 12, at F{4 + rank}.1 (stage {4 + rank}, microbatch 1)" in texts[rank]
        assert " in hang" in texts[rank]
    assert not any("does not answer" in text for text in texts)


def test_a_rank_waits_for_one_that_goes_on_and_ends_with_it_when_that_stands_still(tmp_path: Path) -> None:
    goes_on = "watchdog.start()\nwhile not os.path.exists('waits'): go_on(0.1)\ngo_on(2.5)\nhang()"
    other = start(tmp_path, f"print('ready', flush=True)\n{goes_on}", rank=1, num_ranks=2, patience=30)
    assert other.stdout is not None
    assert other.stdout.readline() == "ready\n"
    waits = start(tmp_path, f"open('waits', 'w').close()\n{HANG}", rank=0, num_ranks=2, patience=30)
    processes = [waits, other]
    texts = outputs(*processes)

    assert [process.returncode for process in processes] == [75, 75]
    (waited,) = re.findall(r"waits for neighbours.* for (.*) s", texts[0])
    assert float(waited) > 3  # 2.5 s for the other one, and 1 s until that stands still, too
    assert "does not answer" not in "".join(texts)


def test_what_compiles_gets_ten_times_as_long_and_what_follows_does_not(tmp_path: Path) -> None:
    warm_up = "watchdog.start()\nwith activity.warming_up(): time.sleep(2.5)\nprint('warm', flush=True)\n"
    too_long = "watchdog.start()\nwith activity.warming_up(): hang()\n"
    processes = [
        start(tmp_path, warm_up + "go_on(1); print('done')", rank=0, seconds=1.5),
        start(tmp_path, warm_up + "hang()", rank=1, seconds=1.5, patience=0.5),
        start(tmp_path, too_long, rank=2, seconds=0.3, patience=0.5),
    ]
    texts = outputs(*processes)

    assert [process.returncode for process in processes] == [0, 75, 75]
    assert texts[0] == "warm\ndone\n"
    assert re.search(r"rank 1 .*: no progress for 1\.\d s", texts[1])
    assert re.search(r"rank 2 .*: no progress for 3\.\d s", texts[2])


def test_a_call_in_c_that_holds_the_interpreter_is_told_by_the_second_net(tmp_path: Path) -> None:
    then = "watchdog.start(); print('ready', flush=True); ctypes.PyDLL(None).sleep(1000)"
    stuck = start(tmp_path, then, rank=1, num_ranks=2)
    assert stuck.stdout is not None
    stuck.stdout.readline()
    waiting = start(tmp_path, HANG, rank=0, num_ranks=2, patience=1.5)
    try:
        (text,) = outputs(waiting)
        assert waiting.returncode == 75
        assert "rank 1 does not answer" in text
    finally:
        stuck.kill()
    (text,) = outputs(stuck)
    assert "watchdog_of_rank_1" in text, text  # whose stacks these are
    assert re.search(r'program-1\.py", line \d+ in <module>', text), text


def test_what_other_nodes_report_is_written_on_this_one_too(tmp_path: Path) -> None:
    nodes = "watchdog._ranks = Ranks(rank, 2, 0, num_replicas=2, num_nodes=2)\n"
    texts = outputs(*(start(tmp_path, nodes + HANG, rank=rank, num_ranks=2, patience=30) for rank in (0, 1)))
    for rank, text in enumerate(texts):
        assert text.count(f"watchdog: rank {1 - rank} (process") == 1, text
        assert text.count(" in hang") == 1, "stacks are written on the own node alone"


def test_nobody_who_reads_what_is_told_does_not_keep_the_process(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM + HANG)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, bytes(4096))
        except BlockingIOError:
            break
    os.set_blocking(writer, True)
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    process = subprocess.Popen(
        [sys.executable, "program.py", "0", "1", "1", "1"], cwd=tmp_path, env=environment, stderr=writer
    )
    assert process.wait(60) == 75
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("is_moving", [True, False])
def test_a_device_that_works_through_what_it_was_given_is_progress(tmp_path: Path, is_moving: bool) -> None:
    """The host enqueues and waits; only the device knows how far it is."""
    position = "str(int(5 * time.monotonic()))" if is_moving else "'F4.0'"
    then = f"activity.device_position = lambda: {position}\nwatchdog.start()\ntime.sleep(2.5)\nprint('done')"
    process = start(tmp_path, then)
    (output,) = outputs(process)
    assert process.returncode == (0 if is_moving else 75)
    assert output == "done\n" if is_moving else "its device: F4.0" in output
