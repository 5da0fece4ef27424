"""Losses of a file of another trainer are those of the tool itself, which harness/other_trainers.py recorded."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from harness.other_trainers import NUM_STEPS, make
from harness.runs import steps_of, with_kernel
from harness.small_run import empty_picture

from mobius.config.cli import parse_args
from mobius.process.ranks import Ranks
from mobius.training.run import run_training

RECORDED = json.loads(Path(__file__).with_name("other_trainers.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder)
    return folder


@pytest.mark.parametrize("tool", ["llamafactory", pytest.param("trl", marks=pytest.mark.extended)])
def test_twenty_steps_have_the_losses_of_the_tool(
    tool: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, here := tmp_path / "here")
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(with_kernel(tmp_path / "cache")))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr("mobius.training.reporting.draw_training", empty_picture)
    words = ["--config", f"{tool}.yaml", "--save_params", "none"]
    run_training(parse_args(words, num_ranks=1), Ranks(0, 1, 0))

    losses = [step["loss"] for step in steps_of(Path(f"{tool}_out"))]
    assert len(losses) == len(RECORDED[tool]["losses"]) == NUM_STEPS
    assert losses == pytest.approx(RECORDED[tool]["losses"], rel=0, abs=1e-5)
    assert losses[0] - losses[-1] > 1, "the model learns, so that the updates are compared too"
