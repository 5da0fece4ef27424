"""A signal lets a run that can save do so, whichever process gets it; a second one, or a lost rank, ends it at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed.run
from harness.forked import HANG_SECONDS
from harness.launched import Launched, is_alive
from started_ranks import wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests" / "harness" / "saving_run.py")
RANKS = ["--nproc_per_node", "2", "--master_port", "0"]
OURS = ["forked", *RANKS]
"""Our launcher, which has imported torch when it starts."""
LOADED = ["-m", "mobius.launcher", *RANKS]
"""The same as a program of its own."""
TORCHRUN = ["-m", "torch.distributed.run", *RANKS]
ANOTHER_PRESS = 2.3
"""Seconds after which a signal is no longer the same press of Ctrl-C."""
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class StartedRun:
    """A launcher in a process group of its own, as a terminal starts it, and the folder of its run."""

    process: subprocess.Popen[bytes] | Launched
    folder: Path
    output_file: Path
    num_ready: int = 0

    def wait_until_ready(self) -> str:
        """Returns the line of the first rank, once all are in the first step of this start."""
        self.num_ready += 1
        assert wait_until(
            lambda: self.process.poll() is not None or len(self.ready_lines()) >= self.num_ready, HANG_SECONDS
        )
        assert len(self.ready_lines()) >= self.num_ready, self.output_file.read_text()
        return self.ready_lines()[self.num_ready - 1]

    def wait_until_asked(self) -> None:
        """Returns when the first rank has said that it saves and ends."""
        assert wait_until(lambda: "a second signal ends the run at once" in self.output_file.read_text(), HANG_SECONDS)

    def ready_lines(self) -> list[str]:
        text = self.output_file.read_text(errors="replace")
        return [line for line in text.splitlines(keepends=True) if line.startswith("ready") and line.endswith("\n")]

    def rank(self, number: int) -> int:
        return int((self.folder / f"process-{number}").read_text())

    def output(self) -> str:
        """What was printed after the last `ready`, once all processes have ended."""
        self.process.wait(HANG_SECONDS)
        assert wait_until(lambda: not any(is_alive(self.rank(number)) for number in range(2)), HANG_SECONDS)
        printed = self.output_file.read_text(errors="replace").splitlines()
        begin = max((number for number, line in enumerate(printed, 1) if line.startswith("ready")), default=0)
        return "\n".join(line for line in printed[begin:] if not re.match(r"\*|W\d|\[W|Setting OMP", line))

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("checkpoint-*"))


def heed_signals() -> None:
    """The tests may run in the background of a script, where programs ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Starter:
    """Starts runs in a folder, and kills what is left of them in the end."""

    folder: Path
    running: list[subprocess.Popen[bytes] | Launched]

    def __call__(
        self, launcher: Sequence[str], *arguments: str, ignores_hang_up: bool = False, **environment: str
    ) -> StartedRun:
        words = [*launcher[1:], PROGRAM, str(self.folder), *arguments]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        variables |= {"PYTHONPATH": str(ROOT), **environment}
        process: subprocess.Popen[bytes] | Launched
        if launcher[0] == OURS[0]:
            process = Launched(words, self.folder, variables, ignores_hang_up=ignores_hang_up)
            output_file = process.output_file
        else:
            output_file = self.folder / "output.txt"
            with open(output_file, "wb") as output:
                process = subprocess.Popen(
                    [sys.executable, launcher[0], *words],
                    cwd=self.folder,
                    env=variables,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=heed_signals,
                )
        self.running.append(process)
        started = StartedRun(process, self.folder, output_file)
        started.wait_until_ready()
        return started


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    before = set(SHARED_MEMORY.iterdir())
    starter = Starter(tmp_path, [])
    yield starter
    for process in starter.running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def own() -> set[Path]:
        return {path for path in set(SHARED_MEMORY.iterdir()) - before if path.name.startswith(("mobius", "torch"))}

    assert wait_until(lambda: not own(), 60), own()  # those of other tests go


def send(run: StartedRun, to: str, number: signal.Signals) -> None:
    if to == "group":
        os.killpg(run.process.pid, number)
    else:
        os.kill(run.process.pid if to == "launcher" else run.rank(int(to[-1])), number)


def has_pending(process: int, number: signal.Signals) -> bool:
    """Whether a process that is stopped has been sent this signal."""
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(status.partition("ShdPnd:")[2].split()[0], 16) & 1 << (number - 1))


def is_stopped(process: int) -> bool:
    """Whether all threads of a process stand still."""
    states = [
        path.read_text().partition("State:")[2].split()[0] for path in Path(f"/proc/{process}/task").glob("*/status")
    ]
    return set(states) == {"T"}


@pytest.mark.parametrize(
    ("launcher", "to", "number"),
    [
        (OURS, "launcher", signal.SIGTERM),
        (LOADED, "group", signal.SIGINT),
        (OURS, "group", signal.SIGHUP),
        (OURS, "rank 1", signal.SIGINT),
    ],
)
def test_one_signal_saves_and_ends_all_ranks_whoever_gets_it(
    start: Starter, launcher: list[str], to: str, number: signal.Signals
) -> None:
    run = start([*launcher, "--max_restarts", "3"], "0.5")
    send(run, to, number)
    first, last = run.output().splitlines()
    assert re.fullmatch(
        rf"interrupted \({number.name}\): saving after this step, then ending; "
        r"a second signal ends the run at once \(steps \d+ to \d+ would be lost\)",
        first,
    )
    (checkpoint,) = run.checkpoints()
    assert last == f"interrupted ({number.name}) after step {checkpoint[11:]}: saved to {checkpoint}"
    assert run.process.returncode == 130


@pytest.mark.parametrize("to", ["launcher", "group", "rank 1"])
def test_a_second_signal_ends_all_ranks_at_once(start: Starter, to: str) -> None:
    run = start([*OURS, "--max_restarts", "3"], "60")
    send(run, to, signal.SIGINT)
    run.wait_until_asked()
    time.sleep(ANOTHER_PRESS)
    begin = time.monotonic()
    send(run, to, signal.SIGINT)
    lines = run.output().splitlines()
    assert time.monotonic() - begin < 20
    assert len(lines) == 2, lines
    cause = "SIGINT" if to != "rank 1" else "another rank has ended"
    assert re.fullmatch(rf"interrupted \({cause}\) after step \d+: steps 1 to \d+ are lost", lines[1])
    assert run.checkpoints() == []
    assert run.process.returncode == 130


def test_a_third_signal_kills_ranks_that_do_not_end(start: Starter) -> None:
    run = start(OURS, "60")
    for rank in range(2):
        os.kill(run.rank(rank), signal.SIGSTOP)
    # A thread that has not stopped yet would take the next signal first, and nothing would be pending.
    assert wait_until(lambda: all(is_stopped(run.rank(rank)) for rank in range(2)), HANG_SECONDS)
    for number in (signal.SIGINT, signal.SIGTERM):
        send(run, "launcher", number)
        assert wait_until(
            lambda number=number: all(has_pending(run.rank(rank), number) for rank in range(2)), HANG_SECONDS
        )
        time.sleep(ANOTHER_PRESS)
    send(run, "launcher", signal.SIGINT)
    run.output()
    assert run.process.returncode == 130


def test_our_launcher_waits_however_soon_torchrun_would_kill(start: Starter) -> None:
    run = start(OURS, "3", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    send(run, "launcher", signal.SIGTERM)
    assert "torchrun" not in run.output()
    assert len(run.checkpoints()) == 1
    assert run.process.returncode == 130


def test_plain_torchrun_saves_too_and_gives_its_own_exit_code(start: Starter) -> None:
    run = start(TORCHRUN, "0.5")
    send(run, "group", signal.SIGINT)
    output = run.output()
    (checkpoint,) = run.checkpoints()
    assert f"interrupted (SIGINT) after step {checkpoint[11:]}: saved to {checkpoint}\n" in output
    assert output.count("interrupted (") == 2
    assert "kills" not in output
    assert run.process.returncode == 1


def test_a_save_that_torchrun_will_not_wait_for_is_told_at_once(start: Starter) -> None:
    has_setting = hasattr(torch.distributed.run.get_args_parser().parse_args(["x"]), "shutdown_timeout")
    launcher = [*TORCHRUN, "--shutdown-timeout", "1"] if has_setting else TORCHRUN
    run = start(launcher, "60")
    begin = time.monotonic()
    send(run, "launcher", signal.SIGTERM)
    output = run.output()
    limit = 1 if has_setting else 30
    assert time.monotonic() - begin < limit + 20
    assert f"torchrun kills all ranks {limit} s after a signal, a save takes about 60 s; train.sh waits\n" in output
    assert run.checkpoints() == []


def test_a_rank_that_dies_is_no_request_to_save(start: Starter) -> None:
    run = start(OURS, "60")
    send(run, "rank 1", signal.SIGKILL)
    first, last = run.output().splitlines()
    assert first.startswith("interrupted (another rank has ended) after step ")
    assert last.startswith("rank 1 ended first, by SIGKILL; all ranks were stopped (usually")
    assert run.process.returncode == 137


def test_ranks_start_again_from_the_newest_checkpoint_but_not_after_a_signal(start: Starter) -> None:
    run = start([*OURS, "--max_restarts", "2"], "0.5")
    assert wait_until(lambda: "checkpoint-40" in run.checkpoints(), HANG_SECONDS)
    send(run, "rank 1", signal.SIGKILL)
    assert run.wait_until_ready() == "ready, goes on from step 40\n"
    assert "they start again (1 of 2 times)" in run.output_file.read_text()
    send(run, "rank 1", signal.SIGTERM)
    assert "saved to checkpoint-" in run.output().splitlines()[-1]
    assert run.process.returncode == 130


def test_restarts_come_to_an_end(start: Starter) -> None:
    run = start([*OURS, "--max_restarts", "1"], "0.5")
    send(run, "rank 0", signal.SIGKILL)
    run.wait_until_ready()
    send(run, "rank 0", signal.SIGKILL)
    assert "again" not in run.output()
    assert run.process.returncode == 137


def test_a_save_that_fails_after_a_signal_gives_its_own_code_and_no_restart(start: Starter) -> None:
    run = start([*OURS, "--max_restarts", "2"], "0.1")
    (run.folder / "full-disk").touch()
    send(run, "launcher", signal.SIGTERM)
    output = run.output()
    assert re.search(r"rank \d ended first, with exit code 1; all ranks were stopped$", output)
    assert "again" not in output
    assert run.process.returncode == 1


def test_ranks_end_with_their_launcher_while_they_save(start: Starter) -> None:
    run = start(OURS, "60")
    send(run, "launcher", signal.SIGINT)
    send(run, "launcher", signal.SIGKILL)
    run.output()
    assert run.process.returncode == -signal.SIGKILL


def test_a_run_under_nohup_goes_on_when_the_terminal_closes(start: Starter) -> None:
    run = start(OURS, "0.1", ignores_hang_up=True)
    send(run, "group", signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(1.5)
    send(run, "group", signal.SIGINT)
    assert "saved to checkpoint-" in run.output()
