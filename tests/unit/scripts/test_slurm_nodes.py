"""The script for several nodes under Slurm starts train.sh once on each, with its number and one endpoint for all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from mobius.config.launch import Resources, launch_command

ROOT = Path(__file__).parents[3]
SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "show hostnames gpu[07-09]" ]] && printf 'gpu07\\ngpu08\\ngpu09\\n'
"""
SRUN = """#!/usr/bin/env bash
[[ "$1" == --kill-on-bad-exit=1 ]] || exit 9
shift
worst=0
for ((node = 0; node < SLURM_NNODES; node++)); do
    SLURM_NODEID=$node "$@" || { worst=$?; break; }
done
exit $worst
"""
TRAIN = """
[[ "$SLURM_NODEID" != "${TEST_FAILS:-}" ]] || exit 75
"$TEST_PYTHON" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >>words
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "the project"
    for name, text in (("bin/scontrol", SCONTROL), ("bin/srun", SRUN)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (folder / "scripts").mkdir()
    (folder / "scripts" / "environment.sh").write_text("mobius_environment() { echo ready >>environment; }\n")
    (folder / "train.sh").write_text(TRAIN)
    shutil.copy(ROOT / "scripts" / "slurm_nodes.sh", tmp_path / "slurm_script")  # Slurm runs a copy
    return folder


def submit(project: Path, *words: str, **others: str) -> subprocess.CompletedProcess[str]:
    variables: Mapping[str, str] = {
        **os.environ,
        "PATH": f"{project / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "TEST_PYTHON": shutil.which("python") or "python3",
        "SLURM_JOB_ID": "1234567",
        "SLURM_SUBMIT_DIR": str(project),
        "SLURM_JOB_NODELIST": "gpu[07-09]",
        "SLURM_NNODES": "3",
        **others,
    }
    given = ["bash", str(project.parent / "slurm_script"), *words]
    return subprocess.run(given, env=variables, cwd="/", capture_output=True, text=True, check=False, timeout=60)


def started(project: Path) -> list[list[str]]:
    path = project / "words"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_each_node_is_started_with_its_number_and_the_first_ones_endpoint(project: Path) -> None:
    result = submit(project, "run.yaml", "--save_dir", "a name with spaces; $HOME")
    assert result.returncode == 0, result.stderr
    given = ["run.yaml", "--save_dir", "a name with spaces; $HOME", "--nnodes", "3"]
    ends = [["--node_rank", str(node), "--rdzv_endpoint", "gpu07:24567"] for node in range(3)]
    assert started(project) == [[*given, *end] for end in ends]
    assert (project / "environment").read_text() == "ready\n"  # once, not on each node


def test_train_sh_takes_these_words(project: Path) -> None:
    (project / "run.yaml").write_text("batch_size: 12\nnum_chunks: 1\n")
    submit(project, "run.yaml", "--device", "cpu")
    command, _ = launch_command(started(project)[1], project, Resources(num_gpus=0, num_cores=2))
    place = command.index("--nnodes")
    assert command[place : place + 6] == ["--nnodes", "3", "--node_rank", "1", "--rdzv_endpoint", "gpu07:24567"]


def test_a_node_that_fails_ends_the_job_with_its_code(project: Path) -> None:
    assert submit(project, "run.yaml", TEST_FAILS="1").returncode == 75
    assert len(started(project)) == 1
