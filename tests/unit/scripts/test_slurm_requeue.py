"""The script for Slurm takes a run through its turns: which job is queued again, which is done, which goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HANG_SECONDS = 120.0
ENVIRONMENT = 'mobius_environment() { MOBIUS_PYTHON_BIN="$TEST_PYTHON"; }\n'
TRAIN = """
echo "train.sh $*" >>calls
save() { mkdir -p "save_ckpt/checkpoint-$1" && echo "{}" >"save_ckpt/checkpoint-$1/checkpoint.json"; }
model() { mkdir -p save_ckpt && echo "{}" >save_ckpt/new && mv save_ckpt/new save_ckpt/config.json; }
waits() { echo ready >ready; while :; do sleep 0.05; done; }
"""
SCONTROL = '#!/usr/bin/env bash\necho "scontrol $*" >>"$TEST_PROJECT/calls"\nexit "${TEST_SCONTROL:-0}"\n'


@dataclass
class Job:
    """A project whose train.sh is `body`, a Slurm of one command, and a job in them."""

    project: Path

    def write(self, body: str, yaml: str = "") -> None:
        (self.project / "train.sh").write_text(TRAIN + body)
        (self.project / "run.yaml").write_text(yaml or "num_iterations: 20\n")

    def start(self, *options: str, **environment: str) -> subprocess.Popen[str]:
        variables = {
            **os.environ,
            "PATH": f"{self.project / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TEST_PYTHON": sys.executable,
            "TEST_PROJECT": str(self.project),
            "SLURM_JOB_ID": "77",
            "SLURM_SUBMIT_DIR": str(self.project),
            **environment,
        }
        return subprocess.Popen(
            ["bash", self.project / "spool" / "slurm_script", "run.yaml", *options],
            cwd=self.project / "spool",
            env=variables,
            stderr=subprocess.PIPE,
            text=True,
        )

    def turn(self, *options: str, **environment: str) -> tuple[int, str]:
        """Exit code and words of a turn that nobody disturbs."""
        process = self.start(*options, **environment)
        printed = process.communicate(timeout=HANG_SECONDS)[1]
        return process.returncode, printed

    def signalled_turn(self, *numbers: signal.Signals, **environment: str) -> tuple[int, str]:
        """Exit code and words of a turn whose run is under way when the signals come, to the script alone."""
        process = self.start(**environment)
        end = time.monotonic() + HANG_SECONDS
        while not (self.project / "ready").exists() and time.monotonic() < end:
            time.sleep(0.01)
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.3)
        printed = process.communicate(timeout=HANG_SECONDS)[1]
        return process.returncode, printed

    @property
    def calls(self) -> list[str]:
        path = self.project / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def checkpoint(self, step: int, text: str = "{}", ending: str = "") -> None:
        folder = self.project / "save_ckpt" / f"checkpoint-{step}{ending}"
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_text(text)

    def finished_model(self) -> None:
        (self.project / "save_ckpt").mkdir(exist_ok=True)
        (self.project / "save_ckpt" / "config.json").write_text("{}")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    for folder in ("scripts", "bin", "spool"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts" / "environment.sh").write_text(ENVIRONMENT)
    (tmp_path / "spool" / "slurm_script").write_text((ROOT / "scripts" / "slurm_requeue.sh").read_text())
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    return Job(tmp_path)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        (["--overwrite_output_dir"], ""),
        (["--resume_from_checkpoint", "elsewhere/checkpoint-3", "--save_dir", "save_ckpt"], ""),
        (["--resume_from_checkpoint", "save_ckpt/checkpoint-7"], " --save_dir save_ckpt"),
    ],
)
def test_only_the_first_turn_starts_as_it_is_told(job: Job, options: list[str], more: str) -> None:
    job.write("model")
    job.checkpoint(7)

    job.turn(*options)
    job.turn(*options, SLURM_RESTART_COUNT="1")

    words = " ".join(["train.sh run.yaml", *options])
    assert job.calls == [words, f"{words}{more} --resume_from_checkpoint true"]


def test_a_run_whose_time_is_over_is_queued_again_until_it_has_a_result(job: Job) -> None:
    job.write('if [[ "$*" == *resume* ]]; then save 20; model; else save 7; fi', "max_run_time: 60\n")
    job.finished_model()  # of an earlier run

    turns = [job.turn()[0], job.turn(SLURM_RESTART_COUNT="1")[0]]

    assert turns == [0, 0]
    assert job.calls == ["train.sh run.yaml", "scontrol requeue 77", "train.sh run.yaml --resume_from_checkpoint true"]


RAN, QUEUED = "train.sh run.yaml", "scontrol requeue 77"


@pytest.mark.parametrize(
    ("body", "options", "code", "calls", "told"),
    [
        ("save 20; model", "--lr 1e-4", 0, [f"{RAN} --lr 1e-4"], "the run is done"),
        ("save 7; exit 75", "", 0, [RAN, QUEUED], "job 77 is queued again"),  # it stood still
        ("save 7; exit 1", "", 1, [RAN], ""),
        ("save 7; exit 130", "", 130, [RAN], ""),  # somebody ended the run by hand
    ],
)
def test_a_turn_ends_as_its_run_does(job: Job, body: str, options: str, code: int, calls: list[str], told: str) -> None:
    job.write(body)
    found, printed = job.turn(*options.split())
    assert (found, job.calls) == (code, calls)
    assert told in printed


@pytest.mark.parametrize("ending", ["", ".partial", ".replaced"])
def test_a_turn_goes_on_where_there_is_a_checkpoint(job: Job, ending: str) -> None:
    """Also where a kill came before it had its name: the run settles that."""
    job.write("model")
    job.checkpoint(7, ending=ending)
    job.turn("--num_stages", "4")
    assert job.calls == [f"{RAN} --num_stages 4 --resume_from_checkpoint true"]


@pytest.mark.parametrize(
    ("saves", "number", "code", "calls", "told"),
    [
        ("save 8;", signal.SIGUSR1, 0, [RAN, QUEUED], "job 77 is queued again"),  # before the limit
        ("save 8;", signal.SIGTERM, 130, [RAN], ""),  # cancelled
        ("", signal.SIGUSR1, 130, [RAN], "no new checkpoint"),  # a turn that is too short
    ],
)
def test_a_job_that_is_signalled_saves_and_is_queued_again_unless_it_is_cancelled(
    job: Job, saves: str, number: signal.Signals, code: int, calls: list[str], told: str
) -> None:
    job.write(f"trap '{saves} exit 130' TERM; waits")
    if not saves:
        job.checkpoint(7)
        calls = [f"{RAN} --resume_from_checkpoint true"]
    found, printed = job.signalled_turn(number)
    assert (found, job.calls) == (code, calls)
    assert told in printed
    assert ("--time" in printed) is (not saves)
    assert (job.project / "save_ckpt" / "checkpoint-8").exists() is bool(saves)


@pytest.mark.parametrize("yaml", ["save_strategy: 'no'\n", "save_only_model: true\n", "num_iteration: x\n"])
def test_a_run_that_no_turn_could_go_on_from_is_refused(job: Job, yaml: str) -> None:
    job.write("model", yaml)
    code, printed = job.turn()
    assert (code, job.calls) == (2, [])
    assert "Traceback" not in printed
    assert yaml.split(":")[0] in printed
