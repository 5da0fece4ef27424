"""A wheel in an environment of its own, without the project's tree and without a compiler, trains to the same bits."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS, ROOT
from harness.rounding import assert_near_after_adam, reordered
from harness.runs import assert_equal_tensors, make_checkpoint, make_dataset, rounding, run_main, steps_of, tensors_of

OPTIONS = """
    --model_path model --dataset data.jsonl --device cpu --fp32 --num_stages 2 --num_chunks 2 --batch_size 4
    --seq_length 16 --num_iterations 3 --learning_rate 1e-3
"""

pytestmark = pytest.mark.extended


def options(save_dir: str) -> list[str]:
    return [*OPTIONS.split(), "--save_dir", save_dir, "--save_params", "none", "--save_results", f"{save_dir}.txt"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and with this one's packages instead of downloads."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "mobius", folder / "mobius", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", folder, "--no-deps", "--no-build-isolation", "-w", folder / "dist"], check=True)
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [*pip, "--python", str(venv / "bin" / "python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*install, *(folder / "dist").iterdir()], check=True)
    shutil.rmtree(folder / "mobius")
    return venv


def library_of(environment: Path) -> Path:
    (library,) = environment.glob("lib/python*/site-packages/mobius/engine/libadamw.so")
    return library


def train(environment: Path, folder: Path, save_dir: str) -> str:
    """Train by the command `mobius` where no compiler is found; returns what it prints."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    if not (tools / "env").exists():
        (tools / "env").symlink_to(shutil.which("env") or "")
    finished = subprocess.run(
        [environment / "bin" / "mobius", "train", "--nproc_per_node", "1", *options(save_dir)],
        cwd=folder,
        env={**rounding(), "PATH": f"{environment / 'bin'}:{tools}", "HOME": str(folder / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.fixture(scope="module")
def runs(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with two runs, `tree` by the project with the kernel compiled here and `wheel`, and its output."""
    folder = tmp_path_factory.mktemp("runs")
    make_checkpoint(folder / "model")
    make_dataset(folder / "data.jsonl")
    finished = run_main(1, folder, *options("tree"))
    assert finished.returncode == 0, finished.stdout
    assert "AdamW uses" not in finished.stdout
    return folder, train(environment, folder, "wheel")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="has no instruction sets in wheels")
def test_the_wheels_kernel_trains_to_the_bits_of_the_one_compiled_in_the_tree(runs: tuple[Path, str]) -> None:
    folder, output = runs
    assert "CPU AdamW uses the installed kernel for " in output
    assert not list((folder / "home").rglob("*.so")), "something was compiled"
    assert steps_of(folder / "wheel") == steps_of(folder / "tree")
    assert_equal_tensors(folder / "tree", folder / "wheel")


def test_without_the_library_and_a_compiler_torch_trains_to_the_last_bits(
    environment: Path, runs: tuple[Path, str]
) -> None:
    folder, _ = runs
    library = library_of(environment)
    aside = library.rename(library.with_suffix(".aside"))
    try:
        output = train(environment, folder, "torch")
    finally:
        aside.rename(library)
    assert "CPU AdamW uses torch" in output
    found, expected, before = (tensors_of(folder / name) for name in ("torch", "tree", "model"))
    rates = [step["learning_rate"] for step in steps_of(folder / "tree")]
    assert_near_after_adam(found, expected, before, rates=rates, share=reordered(4 * 16))


def test_the_wheel_finds_its_files_and_plans_anywhere(environment: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "assets" / "tiny-llama" / "config.json", tmp_path)
    words = ["plan", "--model_path", ".", "--card", "RTX4090"]
    finished = subprocess.run(
        [environment / "bin" / "mobius", *words],
        cwd=tmp_path,
        env={"PATH": os.defpath, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
