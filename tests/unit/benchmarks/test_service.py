"""Runs that follow one another in the same processes are the runs that new processes would make."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS, Ranks
from launch import RunResult
from make_model import write_config
from service import Service

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
ALONE = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = tmp_path_factory.mktemp("model")
    write_config(model, "tiny", 4)
    shared = "--device cpu --compile off --batch_size 4 --seq_length 16 --num_iterations 3 --num_chunks 2"
    return ["--model_path", str(model), *shared.split()]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(num_ranks=2, environment=ALONE) as service:
        yield service


def losses(result: RunResult) -> list[float]:
    assert result.problem is None, result.log_end
    return [step["loss"] for step in result.output["steps"]]


@pytest.mark.extended
def test_runs_in_the_same_processes_train_as_new_ones_do(tmp_path: Path, words: list[str], service: Service) -> None:
    new = Ranks(
        "worker",
        "main",
        ["output.json", *words, "--num_stages", "4"],
        num_ranks=2,
        folder=tmp_path,
        environment={**os.environ, **ALONE},
    )
    assert new.wait() == 0, new.output()
    new_losses = [step["loss"] for step in json.loads((tmp_path / "output.json").read_text())["steps"]]
    first, other, again = (
        service.run([*words, "--num_stages", stages], timeout_seconds=HANG_SECONDS) for stages in ("4", "2", "4")
    )
    assert len(losses(other)) == len(new_losses)
    assert losses(first) == losses(again) == new_losses
    assert [run.output["plan"]["num_stages"] for run in (first, other, again)] == [4, 2, 4]
    assert again.output["start"]["imports"] < 0.5 < first.output["start"]["imports"]


@pytest.fixture
def play(tmp_path: Path) -> Path:
    """A worker without torch: it hands over its process and its options, or does what they say."""
    path = tmp_path / "play.py"
    path.write_text("""
import itertools, json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[2])
for number in itertools.count():
    order = folder / f"{number}.json"
    while not order.exists():
        time.sleep(0.01)
    (word,) = json.loads(order.read_text())["options"]
    if word == "fail" and os.environ["RANK"] == "1":
        sys.exit("rank 1 fails")
    if word in ("fail", "hang"):
        time.sleep(10_000)
    if os.environ["RANK"] == "0":
        part = folder / f"{number}.part"
        part.write_text(json.dumps({"process": os.getpid(), "word": word}))
        part.replace(folder / f"{number}.out")
""")
    return path


def test_after_a_run_that_failed_the_next_one_goes_on(play: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.GRACE_SECONDS", 0.2)
    with Service(num_ranks=2, environment={}, worker=play) as service:
        first = service.run(["first"], timeout_seconds=HANG_SECONDS)
        failed = service.run(["fail"], timeout_seconds=HANG_SECONDS)
        next_one = service.run(["next"], timeout_seconds=HANG_SECONDS)
    assert (failed.problem, failed.output) == ("failed", None)
    assert failed.log_end == "rank 1 fails\nexit codes of the ranks: [None, 1]"
    assert next_one.output["word"] == "next"
    assert next_one.output["process"] != first.output["process"]


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path, play: Path) -> None:
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
from service import Service
with Service(num_ranks=2, environment={{}}, worker=Path({str(play)!r})) as service:
    service.run(["word"], timeout_seconds=100)
    print(*(process.pid for process in service._ranks), flush=True)
    service.run(["hang"], timeout_seconds=10_000)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    ranks = [int(number) for number in parent.stdout.readline().split()]
    assert len(ranks) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()

    deadline = time.monotonic() + HANG_SECONDS
    while any(is_running(rank) for rank in ranks):
        assert time.monotonic() < deadline, "the ranks outlive their parent"
        time.sleep(0.02)


def is_running(process: int) -> bool:
    """Whether there is such a process that has not ended; one that nobody waits for has ended all the same."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
