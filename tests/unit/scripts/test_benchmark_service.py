"""Runs that follow one another in the same processes are the runs that new processes would make."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from benchmark_launch import RunResult, run_ranks  # noqa: E402
from benchmark_service import Service  # noqa: E402
from make_model import write_config  # noqa: E402

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


@pytest.mark.xdist_group("processes")
def test_runs_in_the_same_processes_train_as_new_ones_do(tmp_path: Path, words: list[str], service: Service) -> None:
    output = tmp_path / "output.json"
    command = [sys.executable, str(SCRIPTS / "benchmark_worker.py"), str(output), *words, "--num_stages", "4"]
    new = run_ranks(command, num_ranks=2, environment=ALONE, output=output, timeout_seconds=100)
    first, other, again = (
        service.run([*words, "--num_stages", stages], timeout_seconds=100) for stages in ("4", "2", "4")
    )
    assert len(losses(other)) == len(losses(new))
    assert losses(first) == losses(again) == losses(new)
    assert [run.output["plan"]["num_stages"] for run in (first, other, again)] == [4, 2, 4]
    assert again.output["start"]["imports"] < 0.5 < first.output["start"]["imports"]


@pytest.mark.xdist_group("processes")
def test_processes_are_new_for_every_run_if_that_is_asked_for(words: list[str]) -> None:
    with Service(num_ranks=1, environment=ALONE, is_always_new=True) as service:
        for _ in range(2):
            result = service.run([*words, "--num_stages", "2", "--num_iterations", "1"], timeout_seconds=100)
            assert losses(result)
            assert result.output["start"]["imports"] > 0.5


@pytest.mark.xdist_group("processes")
def test_a_run_that_fails_is_told_with_its_last_lines_and_the_next_one_goes_on(
    words: list[str], service: Service
) -> None:
    failed = service.run([*words, "--num_stages", "3"], timeout_seconds=100)
    assert (failed.problem, failed.output) == ("failed", None)
    assert "not a multiple of the number of ranks" in failed.log_end
    assert len(losses(service.run([*words, "--num_stages", "2"], timeout_seconds=100))) == 3


@pytest.mark.xdist_group("processes")
def test_a_run_that_takes_too_long_is_ended(words: list[str], service: Service) -> None:
    slow = service.run([*words, "--num_stages", "2", "--num_iterations", "100000"], timeout_seconds=4)
    assert slow.problem == "timed out", slow.log_end
    assert slow.seconds < 15


@pytest.mark.xdist_group("processes")
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path, words: list[str]) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from benchmark_service import Service
with Service(num_ranks=2, environment={ALONE!r}) as service:
    service.run({[*words, "--num_stages", "2"]!r}, timeout_seconds=100)
    print(*(process.pid for process in service._ranks), flush=True)
    service.run({[*words, "--num_stages", "2", "--num_iterations", "1000000"]!r}, timeout_seconds=100)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    ranks = [int(number) for number in parent.stdout.readline().split()]
    assert len(ranks) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()

    deadline = time.monotonic() + 30
    while any(is_running(rank) for rank in ranks):
        assert time.monotonic() < deadline, "the ranks outlive their parent"
        time.sleep(0.2)


def is_running(process: int) -> bool:
    """Whether there is such a process that has not ended; one that nobody waits for has ended all the same."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
