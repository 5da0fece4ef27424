"""Commands of README and docs: those that need no GPU run as they are printed, the others take what is typed."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from harness.documents import (
    ROOT,
    Command,
    all_commands,
    check_problems,
    environment,
    make_scratch,
    outcome_problems,
    run_problems,
)
from harness.forked import Ranks
from harness.runs import with_kernel
from launch import free_port

COMMANDS = all_commands()
RUN = [command for command in COMMANDS if not command.needs]
LONG = re.compile(
    r"bash train\.sh |python scripts/convert_checkpoint\.py |python scripts/show_.*--output "
    r"|.*--card \w+ \w+ |.*--batch_size \d+ \d+ "
    r"|.*--model_path (8b|14b|70b|qwen3-30b-a3b) |.*--(nnodes|matmul_dtype|disk_rate) |.*--card (RTX5090|H100) "
)
"""Commands that take seconds, what those leave, and what is like another page's; scripts/run_docs runs them all."""
CHECKED = [command for command in COMMANDS if command.needs or LONG.match(command.text)]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkout") / "mobius"
    make_scratch(place)
    return place


def test_documents_have_commands_of_both_kinds_and_show_output() -> None:
    assert len(RUN) > 6
    assert len(CHECKED) > 20
    assert sum(bool(command.shown) for command in RUN) > 2


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=command.text, marks=[pytest.mark.extended] if LONG.match(command.text) else [])
        for command in RUN
    ],
)
def test_a_command_runs_as_printed(command: Command, scratch: Path, tmp_path: Path) -> None:
    program = re.match(r"(?:\.venv/bin/)?python (main.py|-m mobius) ", command.text)
    if program is None:
        assert run_problems(command, scratch, tmp_path) == []
    else:  # forked, because each of them would import torch; scripts/run_docs starts them as they are typed
        options = shlex.split(command.text[program.end() :])
        run = Ranks("main", "main", options, num_ranks=1, folder=scratch, environment=environment(tmp_path))
        code = run.wait()
        # A plan names the command as it was started, which a forked process was not.
        output = run.output().replace("  run          mobius train ", "  run          python -m mobius train ")
        assert outcome_problems(command, code, output) == []


def test_the_first_run_of_readme_ends_well_also_with_fewer_steps(scratch: Path, tmp_path: Path) -> None:
    (command,) = (each for each in RUN if each.text.startswith("bash train.sh ") and each.place.startswith("README"))
    fewer = f"--num_iterations 3 --max_samples 300 --master_port {free_port()}"
    sooner = replace(command, text=f"{command.text} {fewer}", shown=())
    assert run_problems(sooner, scratch, with_kernel(tmp_path)) == []


@pytest.mark.parametrize("command", CHECKED, ids=lambda command: command.text)
def test_a_command_that_cannot_run_here_takes_its_options(command: Command) -> None:
    assert check_problems(command) == []


@pytest.mark.parametrize(
    "text",
    [
        "torchrun --nproc_per_node 4 main.py --use_offlod",
        "python scripts/show_schedule.py --num_rank_s 4",
        "bash train.sh configs/none.yaml",
        "docker run --rm mobius --batch_size 3 --num_chunks 2",
        "sbatch --time 1:00:00 scripts/slurm_requeue.sh configs/long_run.yaml --num_epoch_s 3",
        "sbatch scripts/slurm_none.sh configs/long_run.yaml",
        "pytest -m gpu tests/gpu/test_none.py",
        "python benchmarks/benchmark.py 7b -- --num_stage_s 4",
    ],
)
def test_the_check_would_find_a_wrong_command(text: str) -> None:
    assert check_problems(Command(text, "", "GPUs"))


def test_the_run_would_find_a_wrong_output(tmp_path: Path) -> None:
    assert run_problems(Command("echo 12 GiB", "", shown=("13 GiB",)), ROOT, tmp_path)
    assert run_problems(Command("false", ""), ROOT, tmp_path)
    assert not run_problems(Command("echo 12 GiB", "", shown=("...", "12 GiB")), ROOT, tmp_path)
    assert not run_problems(Command("echo 12 GiB in 3 s", "", shown=("12 GiB in ...",)), ROOT, tmp_path)
    assert run_problems(Command("echo 12 GiB in 3 s", "", shown=("13 GiB in ...",)), ROOT, tmp_path)
