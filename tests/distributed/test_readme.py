"""Every command of README runs as it is printed, but for those that need what a test machine does not have."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS, ROOT

from mobius.memory.spans import MeasuredSpan, TraceLane
from mobius.output.trace import Trace, TraceFacts, write_trace

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"(\w+=\S+ )*(python|bash|torchrun|docker) ")
NEEDS = {
    "torchrun --nproc_per_node 4": "GPUs and a gated model",
    "CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun": "GPUs and a gated model",
    "bash train.sh configs/fine_tune.yaml": "GPUs and a gated model",
    "docker ": "docker",
    "python benchmarks/benchmark.py 7b": "GPUs",
    "python scripts/benchmark.py 7b": "GPUs",
    "python scripts/show_topology.py": "GPUs",
    "bash scripts/test": "nothing: it runs this test",
}


def commands() -> list[str]:
    """What README tells to type: in its blocks, behind a dollar, and between backticks."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"^    \$ (.*)$", README, re.MULTILINE) + re.findall(r"(?<!`)`([^`\n]+)`(?!`)", README)
    return [line.partition("  #")[0].strip() for line in lines if COMMAND.match(line)]


def is_run(command: str) -> bool:
    return not command.startswith(tuple(NEEDS))


def shown_output(command: str) -> list[str]:
    """The lines that README prints below a command, without their indentation."""
    block = re.search(rf"^    \$ {re.escape(command)}\n((?:    .*\n)+)", README, re.MULTILINE)
    return [] if block is None else [line.removeprefix("    ") for line in block[1].splitlines()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project as a user has it, with this environment, and a trace as a run leaves it."""
    place = tmp_path_factory.mktemp("checkout") / "mobius"
    left_out = shutil.ignore_patterns(".git", ".venv", "output", "__pycache__", ".*_cache", "tests")
    shutil.copytree(ROOT, place, ignore=left_out)
    (place / ".venv").symlink_to(ROOT / ".venv")
    steps = tuple(MeasuredSpan(TraceLane.STEP, f"step {step}", step, step / 10, step / 10 + 0.1) for step in (3, 4, 5))
    (place / "save_ckpt").mkdir()
    write_trace(place / "save_ckpt" / "trace.json", Trace(TraceFacts(1, 1, 1, 1, "cpu"), (steps,)))
    return place


def test_each_command_is_run_or_needs_what_is_not_here() -> None:
    assert len(commands()) > 10
    assert [need for need in NEEDS if not any(command.startswith(need) for command in commands())] == []
    assert any(shown_output(command) for command in commands())


@pytest.mark.parametrize("command", [command for command in commands() if is_run(command)])
def test_a_command_runs_as_printed(command: str, checkout: Path, tmp_path: Path) -> None:
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join(folders),
        "XDG_CACHE_HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }

    result = subprocess.run(
        command, shell=True, cwd=checkout, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    shown = [line for line in shown_output(command) if line.strip() != "..."]
    assert [line for line in shown if line not in result.stdout.splitlines()] == []
