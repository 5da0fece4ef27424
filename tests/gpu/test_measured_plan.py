"""On one GPU: stages left to auto are planned by what was measured there, once, and the run tells how near it was."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from harness.runs import make_checkpoint, make_dataset

from mobius.config.cli import parse_args
from mobius.planner.measured_plan import Bench
from mobius.process.ranks import Ranks
from mobius.training.run import run_training

pytestmark = pytest.mark.gpu

OPTIONS = """--model_path model --dataset data.jsonl --device cuda --dtype bf16 --num_stages auto --num_chunks auto
    --batch_size 8 --seq_length 64 --num_iterations 4 --overwrite_output_dir"""


def test_a_run_with_auto_measures_once_and_says_how_near_its_prediction_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.use_deterministic_algorithms(False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Every run measures the host again, whose rates may change a plan of so small a model.
    monkeypatch.setattr(Bench, "with_host", lambda _, profile: profile)
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl")

    def run(folder: str) -> str:
        caplog.clear()
        with caplog.at_level(logging.DEBUG):
            run_training(parse_args([*OPTIONS.split(), "--save_dir", folder], num_ranks=1), Ranks(0, 1, 0))
        return caplog.text

    first, second = run("first"), run("second")

    assert " s: measured" in first
    assert " s: measured" not in second
    for text in (first, second):
        assert "predicted: " in text
        assert "off by" in text
    report = Path("test_result.txt").read_text()
    assert "prediction off by" in report
    assert "measured (1 x " in report
    plans = [json.loads(Path(folder, "plan.json").read_text()) for folder in ("first", "second")]
    assert plans[0] == plans[1]
    assert len(list((tmp_path / "cache").rglob("profile-*.json"))) == 1
