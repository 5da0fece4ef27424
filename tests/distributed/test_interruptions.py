"""Ctrl-C ends a run at once with one line, or once it has saved; nothing of a run outlives who started it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS, Ranks
from harness.launched import Launched, family, is_alive, ranks_of
from harness.runs import environment, make_checkpoint, make_dataset
from launch import free_port
from started_ranks import wait_until

ROOT = Path(__file__).parents[2]
OPTIONS = """--model_path model --dataset data.jsonl --fp32 --num_stages 4 --num_chunks 2 --batch_size 4 --seq_length 16
    --num_iterations 100000 --save_dir out"""
ENDLESS = OPTIONS.split()
ANOTHER_PRESS = 2.3
"""Seconds after which a signal is no longer the same press of Ctrl-C."""


def children(process: int) -> list[int]:
    """Processes that a process has started, without its helper that removes semaphores."""
    return [each for each in family(process) if "multiprocessing.resource_tracker" not in command_line(each)]


def command_line(process: int) -> str:
    """The words of a process; none if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text()
    return ""


@contextmanager
def launched_to_step(number: int, folder: Path) -> Iterator[Launched]:
    """A run of two ranks, started as train.sh does it, that has made `number` steps; all are forked."""
    make_checkpoint(folder / "model")
    make_dataset(folder / "data.jsonl")
    words = ["--nproc_per_node", "2", "--master_port", str(free_port()), str(ROOT / "main.py"), "--device", "cpu"]
    run = Launched([*words, *ENDLESS], folder, environment(folder / "cache"), forks_ranks=True)
    try:
        assert wait_until(lambda: f"step {number:>6}/100000" in run.output(), HANG_SECONDS), run.output()
        ranks = ranks_of(run.pid)
        assert len(ranks) == 2
        yield run
        assert wait_until(lambda: not any(is_alive(rank) for rank in ranks.values()), HANG_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def forked_to_step(number: int, folder: Path, *options: str) -> Ranks:
    """Two ranks without a launcher, which are forked and have made `number` steps."""
    make_checkpoint(folder / "model")
    make_dataset(folder / "data.jsonl")
    arguments, variables = ["--device", "cpu", *ENDLESS, *options], environment(folder / "cache")
    ranks = Ranks("main", "main", arguments, num_ranks=2, folder=folder, environment=variables)
    assert wait_until(lambda: f"step {number:>6}/100000" in ranks.output(), HANG_SECONDS), ranks.output()
    return ranks


def lines_of(ranks: Ranks, start: str) -> list[str]:
    """Lines from the first that begins so on, without those of steps, once all ranks have ended with 130."""
    for process in ranks.processes:
        process.join(HANG_SECONDS)
    assert [process.exitcode for process in ranks.processes] == [130, 130], ranks.output()
    return lines_from(start, ranks.output())


def lines_from(start: str, output: str) -> list[str]:
    """Lines of an output from the first that begins so on, without those of steps."""
    lines = [line for line in output.splitlines() if line and not line.startswith("step ")]
    return lines[next(number for number, line in enumerate(lines) if line.startswith(start)) :]


def test_ctrl_c_on_a_run_that_saves_nothing_leaves_one_line_on_the_screen(tmp_path: Path) -> None:
    ranks = forked_to_step(3, tmp_path, "--save_strategy", "no")
    for process in ranks.processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
    (line,) = lines_of(ranks, "interrupted")

    assert line.startswith("interrupted (SIGINT) after step ")
    assert "of 100000: training is lost, because this run saves only the final model" in line
    assert f"{tmp_path / 'out' / 'metrics.jsonl'}" in line
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count("\n") >= 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_after_the_step_and_tells_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    if number is signal.SIGINT:
        with launched_to_step(3, tmp_path) as run:
            os.killpg(run.pid, number)
            assert run.wait(HANG_SECONDS) == 130
        asked, saved, line = lines_from("interrupted", run.output())
    else:  # as a scheduler's that reaches one process
        ranks = forked_to_step(3, tmp_path)
        assert ranks.processes[1].pid is not None
        os.kill(ranks.processes[1].pid, number)
        asked, saved, line = lines_of(ranks, "interrupted")

    assert asked == (
        f"interrupted ({number.name}): saving after this step, then ending; a second signal ends the run at once "
        "(training since step 0 would be lost)"
    )
    assert saved.startswith("checkpoint saved: ")
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    begin = f"interrupted ({number.name}) after a step: the state is saved in {checkpoint}. To go on: "
    assert line.startswith(begin)
    words = shlex.split(line.removeprefix(begin))
    assert words[-2:] == ["--resume_from_checkpoint", "true"]
    steps = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(step)["step"] for step in steps] == list(range(1, int(checkpoint.name[11:]) + 1))
    assert not list(tmp_path.rglob("*.partial"))


def test_ctrl_c_again_leaves_at_once_without_a_checkpoint(tmp_path: Path) -> None:
    ranks = forked_to_step(3, tmp_path)
    first, other = (process.pid for process in ranks.processes)
    assert first is not None
    assert other is not None
    os.kill(other, signal.SIGSTOP)  # the step that the first one waits for never ends
    os.kill(first, signal.SIGINT)
    assert wait_until(lambda: "a second signal ends the run at once" in ranks.output(), HANG_SECONDS), (
        "the press was not heard"
    )
    time.sleep(ANOTHER_PRESS)
    os.kill(first, signal.SIGINT)
    ranks.processes[0].join(HANG_SECONDS)
    os.kill(other, signal.SIGKILL)
    assert ranks.processes[0].exitcode == 130
    asked, line = [line for line in ranks.output().splitlines() if line.startswith("interrupted")]

    assert asked.startswith(
        "interrupted (SIGINT): saving after this step, then ending; a second signal ends the run at once"
    )
    assert re.match(
        r"interrupted \(SIGINT\) after step \d+ of 100000: training is lost: no checkpoint is complete; ", line
    )
    assert f"{tmp_path / 'out' / 'metrics.jsonl'}" in line
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_ctrl_c_while_workers_tokenize_leaves_one_line_and_nothing_else(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    lines = make_dataset(tmp_path / "data.jsonl", num_records=300).read_text()
    (tmp_path / "data.jsonl").write_text(lines * 200)
    before = {path.name for path in tmp_path.iterdir()} | {"cache"}
    arguments = ["--device", "cpu", *ENDLESS, "--preprocessing_num_workers", "2"]
    ranks = Ranks("main", "main", arguments, num_ranks=1, folder=tmp_path, environment=environment(tmp_path / "cache"))
    (process,) = ranks.processes
    assert process.pid is not None
    # The press comes while the workers are being made, or are at work.
    assert wait_until(lambda: (tmp_path / "cache" / "mobius").exists() and children(process.pid), HANG_SECONDS)
    workers = children(process.pid)
    for each in (process.pid, *workers):
        os.kill(each, signal.SIGINT)
    assert ranks.wait() == 130
    printed = [line for line in ranks.output().splitlines() if line]
    lines_seen = [line for line in printed if not line.startswith(("model ", "tokenizing"))]

    expected = "interrupted (SIGINT) before the first step: nothing was trained, and nothing is left"
    assert lines_seen == [expected], ranks.output()
    ranks.output_file.unlink()
    assert {path.name for path in tmp_path.iterdir()} == before
    assert wait_until(lambda: not any(is_alive(worker) for worker in workers), HANG_SECONDS)
