"""The files around the code: requirements that agree, scripts that are scripts, a container that starts training."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mobius.config.launch import Resources, launch_command

ROOT = Path(__file__).parents[3]
SCRIPTS = ["scripts/check", "scripts/test", "scripts/run_docs", "scripts/docker_entry", ".ci/run"]


def requirements(file_name: str) -> dict[str, Requirement]:
    lines = [line.split("#")[0].strip() for line in (ROOT / file_name).read_text().splitlines()]
    parsed = [Requirement(line) for line in lines if line and not line.startswith("-r")]
    return {requirement.name: requirement for requirement in parsed}


def test_the_package_depends_on_what_a_run_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {Requirement(text).name: Requirement(text) for text in project["dependencies"]}

    tested = requirements("requirements.txt")
    assert {name: r.specifier for name, r in tested.items() if name != "torch"} == {
        name: r.specifier for name, r in declared.items() if name != "torch"
    }
    (pin,) = tested["torch"].specifier
    assert pin.operator == "=="
    assert declared["torch"].specifier.contains(pin.version)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_executable_and_valid_shell(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    assert (ROOT / script).read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def docker_entry(folder: Path, *arguments: str) -> list[str]:
    """The arguments that `docker run IMAGE ARGUMENTS` hands to train.sh."""
    (folder / "scripts").mkdir()
    (folder / "train.sh").write_text('printf "%s\\n" "$@"\n')
    entry = folder / "scripts" / "docker_entry"
    entry.write_text((ROOT / "scripts" / "docker_entry").read_text())
    finished = subprocess.run(["bash", entry, *arguments], capture_output=True, text=True, check=True)
    return finished.stdout.splitlines()


def test_a_container_given_options_starts_a_process_per_gpu_from_the_defaults(tmp_path: Path) -> None:
    arguments = docker_entry(tmp_path, "--use_offload", "--use_prefetch", "--master_port", "29517")

    command, notice = launch_command(arguments, ROOT, Resources(num_gpus=2, num_cores=16))

    assert command[command.index("--nproc_per_node") + 1] == "2"
    assert command[command.index("main.py") + 1 :][:2] == ["--use_offload", "--use_prefetch"]
    assert not any("fine_tune.yaml" in word or "CUDA_VISIBLE_DEVICES" in word for word in command)
    assert notice is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["configs/quickstart.yaml", "--num_iterations", "3"],
        ["--num_iterations", "3", "--config", "configs/quickstart.yaml"],
        ["--config=configs/quickstart.yaml"],
    ],
)
def test_a_container_takes_a_file_like_train_sh_does(tmp_path: Path, arguments: list[str]) -> None:
    assert docker_entry(tmp_path, *arguments) == arguments


def test_the_image_has_everything_that_it_copies() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in ignore if line.startswith("!")]

    folders = {"mobius", "configs", "assets", "scripts", "benchmarks"}
    assert {"main.py", "train.sh", "requirements.txt", *folders} <= set(kept)
    assert [name for name in kept if not (ROOT / name).exists()] == []
