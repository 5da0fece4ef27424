"""The files around the code: requirements that agree, scripts that are scripts, a container that starts training."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mobius.config.launch import Resources, launch_command

ROOT = Path(__file__).parents[3]
SCRIPTS = [
    "scripts/check",
    "scripts/test",
    "scripts/run_docs",
    "scripts/docker_entry",
    "scripts/docker_health",
    "scripts/try_image",
    ".ci/run",
]


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


def test_the_script_that_tries_the_image_goes_by_the_dockerfile() -> None:
    """Buildah leaves ENTRYPOINT out, so the script names it; mounts, user and base are those of the Dockerfile, too."""
    image, script = ((ROOT / name).read_text() for name in ("Dockerfile", "scripts/try_image"))
    (entry,) = json.loads(re.findall(r"^ENTRYPOINT (.*)$", image, re.MULTILINE)[0])
    assert f"- {entry} " in script
    assert re.findall(r"^ARG BASE=(.*)$", image, re.MULTILINE) == re.findall(r"BASE:-([^}]+)", script)
    assert f"--user {re.findall(r'^USER (.*)$', image, re.MULTILINE)[0]} " in script
    (folder,) = re.findall(r"^WORKDIR (.*)$", image, re.MULTILINE)
    assert {f":{folder}/output", ":/cache"} == set(re.findall(r"\$folder/\w+(:/[\w/]+)", script))
    assert "HF_HOME=/cache/" in image
    assert "scripts/try_image" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_a_container_given_a_command_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert docker_entry(tmp_path, "plan", "--card", "L4") == ["-m", "mobius", "plan", "--card", "L4"]


def test_the_image_runs_as_an_ordinary_user_who_may_write_and_has_a_health_check() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    (user,) = (line.split()[1] for line in lines if line.startswith("USER "))
    assert all(int(number) >= 1000 for number in user.split(":"))
    assert any("chmod 1777 /cache /mobius" in line for line in lines[: lines.index(f"USER {user}")])
    for instruction in ("HEALTHCHECK ", "ENTRYPOINT "):
        (line,) = (line for line in lines if line.startswith(instruction))
        (script,) = json.loads(line[line.index("[") :])
        assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize(
    ("has_gpu", "driver", "is_healthy"),
    [(False, "exit 9", True), (True, "echo GPU 0", True), (True, "exit 15", False), (True, None, False)],
)
def test_a_container_is_healthy_while_the_driver_of_its_gpus_answers(
    tmp_path: Path, has_gpu: bool, driver: str | None, is_healthy: bool
) -> None:
    (tmp_path / "nvidiactl").touch()
    if has_gpu:
        (tmp_path / "nvidia0").touch()
    if driver is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{driver}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}:{os.defpath}"
    finished = subprocess.run([ROOT / "scripts/docker_health", tmp_path], env={"PATH": path}, capture_output=True)
    assert (finished.returncode == 0) == is_healthy


def built_wheel(folder: Path, compiler: str | None) -> zipfile.ZipFile:
    """The wheel of a copy of the project, made in `folder` where `cc` is this shell script, or where there is none."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "mobius", folder / "mobius", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "bin").mkdir()
    if compiler is not None:
        (folder / "bin" / "cc").write_text(compiler)
        (folder / "bin" / "cc").chmod(0o755)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel"], cwd=folder, env={"PATH": str(folder / "bin")}, check=True
    )
    (wheel,) = (folder / "dist").iterdir()
    return zipfile.ZipFile(wheel)


@pytest.mark.parametrize("compiler", [None, "#!/bin/sh\nexit 1\n"])
def test_a_wheel_without_a_compiler_has_all_but_the_library_and_suits_every_platform(
    tmp_path: Path, compiler: str | None
) -> None:
    with built_wheel(tmp_path, compiler) as wheel:
        files = set(wheel.namelist())
        assert Path(wheel.filename or "").name.endswith("-py3-none-any.whl")
        (commands,) = (wheel.read(name).decode() for name in files if name.endswith("entry_points.txt"))
    assert "mobius = mobius.__main__:main" in commands.splitlines()
    listed = subprocess.run(["git", "ls-files", "mobius"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [name for name in listed.stdout.split() if name not in files] == []
    assert not any(name.endswith(".so") for name in files)


def test_a_wheel_with_the_library_suits_every_python_of_its_platform(tmp_path: Path) -> None:
    """The compiler is one that writes a name into what it is told to write."""
    with built_wheel(tmp_path, '#!/bin/sh\nfor word; do :; done\necho library > "$word"\n') as wheel:
        assert wheel.read("mobius/engine/libadamw.so") == b"library\n"
        name = f"-py3-none-linux_{platform.machine()}.whl"
        assert Path(wheel.filename or "").name.endswith(name)
