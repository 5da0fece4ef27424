"""Whole runs in this process, also resumed ones: one rank on the CPU, a tiny checkpoint and its dataset."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from harness.runs import (
    assert_equal_tensors,
    evaluations_of,
    make_checkpoint,
    make_dataset,
    steps_of,
    with_kernel,
)
from harness.shared_parts import SharedParts

from mobius.config.cli import parse_args
from mobius.process.ranks import Ranks
from mobius.training.run import run_training

Run = Callable[..., None]

SMALL = """--model_path model --dataset data.jsonl --device cpu --dtype fp32 --num_stages 2 --num_chunks 2
    --batch_size 4 --seq_length 16 --num_iterations 3 --save_dir out"""


@pytest.fixture(scope="session")
def saved_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model` (4 layers) and `data.jsonl`, made once; tests link to it and do not change it."""
    folder = tmp_path_factory.mktemp("inputs")
    make_checkpoint(folder / "model")
    make_dataset(folder / "data.jsonl")
    return folder


@pytest.fixture
def workplace(tmp_path: Path, saved_inputs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a run, with a cache outside of it."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("model", "data.jsonl"):
        (folder / name).symlink_to(saved_inputs / name)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(with_kernel(tmp_path / "cache")))
    # The run sets the number of threads for its process, which is that of the other tests too.
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr("mobius.training.run_setup.ModelParts", SharedParts)
    # A picture takes half a second; that runs of processes leave one is tests/distributed/test_records.py's claim.
    monkeypatch.setattr("mobius.training.reporting.draw_training", empty_picture)
    return folder


def empty_picture(history: Iterable[Mapping[str, object]], path: Path, *, title: str) -> None:
    """In the place of `draw_training`: a file where the picture would be."""
    path.touch()


@pytest.fixture
def run(workplace: Path) -> Run:
    """Train in `workplace`; arguments are appended to those of a small run, and the last word on an option wins."""

    def start(*arguments: str) -> None:
        usual = SMALL.replace("--num_iterations 3", "") if "--no_do_train" in arguments else SMALL
        run_training(parse_args([*usual.split(), *arguments], num_ranks=1), Ranks(0, 1, 0))

    return start


def assert_same_bits_of_runs(run: Run, one: Sequence[str], other: Sequence[str]) -> None:
    """Train by each list of options, in folders of these names: steps, evaluations and all tensors are the same."""
    for name, options in (("one", one), ("other", other)):
        run(*options, "--save_dir", name, "--save_results", f"{name}.txt")
    assert steps_of(Path("one")) == steps_of(Path("other"))
    assert evaluations_of(Path("one")) == evaluations_of(Path("other"))
    assert_equal_tensors(Path("one"), Path("other"))


EIGHT = [
    "--num_iterations",
    "8",
    "--save_steps",
    "4",
    "--save_total_limit",
    "0",
    "--learning_rate",
    "1e-3",
    "--warmup_steps",
    "1",
    "--save_params",
    "none",
]
"""Options of eight steps with checkpoints 4 and 8."""


@pytest.fixture
def eight(run: Run, workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The folder `out` of the run of EIGHT, which is trained once for all tests."""
    trained = tmp_path_factory.getbasetemp() / "eight steps"
    if not trained.exists():
        run(*EIGHT)
        shutil.copytree("out", trained)
    else:
        shutil.copytree(trained, "out")
