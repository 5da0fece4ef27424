"""A run whose rank dies says which one and how, in one line."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.forked import HANG_SECONDS

from mobius.launcher import RanksEndedError, SignalForwarder, describe_failure, patient_agent

ROOT = Path(__file__).resolve().parents[3]


def run(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{body}\n")
    # Port 0 lets the system choose, so that tests may run side by side.
    command = [sys.executable, "-m", "mobius.launcher", "--nproc_per_node", "2", "--master_port", "0", str(program)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("sys.exit(7 if rank == 1 else time.sleep(10_000))", 7, "rank 1 ended first, with exit code 7"),
        pytest.param(  # tests/distributed/test_dead_ranks.py kills ranks of main.py
            "os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(10_000)",
            137,
            "rank 0 ended first, by SIGKILL",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_the_first_rank_to_end_is_named_and_the_others_stop(tmp_path: Path, body: str, code: int, line: str) -> None:
    result = run(tmp_path, body)
    assert result.returncode == code
    lines = [text for text in result.stderr.splitlines() if "OMP_NUM_THREADS" not in text and "*****" not in text]
    assert len(lines) == 1
    assert lines[0].startswith(line)


@pytest.mark.parametrize(("kind", "is_named"), [("DataError", False), ("TransportError", True), ("KeyError", True)])
def test_a_rank_is_not_named_after_its_message_about_what_the_user_can_mend(
    tmp_path: Path, kind: str, is_named: bool
) -> None:
    result = run(
        tmp_path,
        f"if rank == 1:\n    time.sleep(10_000)\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from mobius.process.ranks import report_to_launcher\n"
        f"sys.stderr.write('error: no rows\\n'); report_to_launcher('no rows', {kind!r}); os._exit(1)",
    )
    assert result.returncode == 1
    told = result.stderr.partition("error: no rows\n")[2]
    assert told == ("rank 0 ended first, with exit code 1; all ranks were stopped\n" if is_named else "")


def test_ctrl_c_before_the_ranks_start_is_one_line() -> None:
    command = [sys.executable, "-m", "mobius.launcher", "--nproc_per_node", "2", "--master_port", "0", "main.py"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # The tests may run in the background of a script, where programs ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + HANG_SECONDS
    while b"libtorch" not in Path(f"/proc/{process.pid}/maps").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)  # in the middle of the import
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert output == "interrupted before the ranks started: nothing is left\n"
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("code", "starts"),
    [
        (-signal.SIGKILL, 3),  # each start's ranks are told of it
        (2, 1),  # it would be the same again, which launchers of other nodes do not know
    ],
)
def test_the_ranks_of_other_nodes_are_told_of_one_that_ended_whenever_they_start(code: int, starts: int) -> None:
    class Agent:
        def _monitor_workers(self, worker_group: Any) -> Any:
            failure = SimpleNamespace(exitcode=code, timestamp=1, error_file_data={})
            return SimpleNamespace(is_failed=lambda: True, failures={3: failure})

    words: list[tuple[int, str]] = []
    agent = patient_agent(Agent, SignalForwarder(), lambda restarts, text: words.append((restarts, text)))()
    group = SimpleNamespace(spec=SimpleNamespace(max_restarts=2))
    for number in range(1, starts):
        agent._monitor_workers(group)
        assert len(words) == number
    with pytest.raises(RanksEndedError):
        agent._monitor_workers(group)
    assert words == [(restarts, describe_failure(3, code)) for restarts in range(3)]
