"""Measuring a card for the project: a table beside the data sheet, a file to send, and what is left without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import calibrate
import pytest
import torch

from mobius.config.config import ModelConfig
from mobius.models.blocks import ModelParts
from mobius.planner import host_rates, measure, timer
from mobius.planner.gpu_specs import GEMM_SHARE, GPU_SPECS, estimate_profile
from mobius.planner.layer_bench import MicrobatchShape
from mobius.planner.profile import Profile, Source

CPU, CARD = torch.device("cpu"), GPU_SPECS["RTX4090"]
SHAPE = MicrobatchShape(batch=2, seq_length=8, dtype=torch.float32, loss_chunk_tokens=64)


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "PART_SECONDS", 0.01)
    monkeypatch.setattr(host_rates, "PART_SECONDS", 0.01)
    monkeypatch.setattr(host_rates, "COPY_BYTES", 2**16)
    monkeypatch.setattr(host_rates, "CPU_PARAMETERS", 2**12)
    monkeypatch.setattr(measure, "GPU_PARAMETERS", 2**12)
    monkeypatch.setattr(measure, "PRODUCT_SIZE", 64)
    monkeypatch.setattr(calibrate, "set_host_threads", lambda *_: None)  # it is this process's own for good


def calibration(model: str) -> calibrate.Calibration:
    return calibrate.Calibration(CPU, ModelConfig(model_path=model), SHAPE, CARD, compiled=False, kernel=None)


def estimates_made_faster(factor: float) -> Callable[..., Profile]:
    """In the place of `measure_profile`: a card whose layers are `factor` times as fast as estimated."""

    def profile_of(_timer: object, parts: ModelParts, shape: MicrobatchShape, *_: object) -> Profile:
        length = shape.full_seq_length or shape.seq_length
        estimated = estimate_profile(
            CARD,
            parts.shape(),
            microbatch_tokens=shape.tokens,
            seq_length=length,
            num_ranks=1,
            host=calibrate.this_host(),
            compiled=False,
        )
        kinds = tuple(kind.times(1 / factor) for kind in estimated.layer_kinds)
        return replace(estimated, source=Source.MEASURED, layer_kinds=kinds)

    return profile_of


def test_speeds_are_over_the_estimates_of_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "measure_profile", estimates_made_faster(2.0))
    rows, profile = calibration("7b").measure()
    speeds = {row.name: row.speed for row in rows if row.name != "large products"}
    assert profile.microbatch_tokens == SHAPE.tokens
    assert len(speeds) == len(calibrate.QUANTITIES) + len(calibrate.ATTENTION)
    for name, speed in speeds.items():
        assert speed == pytest.approx(2.0 if name.startswith("layer") else 1.0), name
    (products,) = (row for row in rows if row.name == "large products")
    assert products.estimated == pytest.approx(165.2 * GEMM_SHARE)
    assert replace(products, measured=2 * 165.2 * GEMM_SHARE).speed == pytest.approx(2.0)


@pytest.mark.usefixtures("workplace")
def test_a_measured_card_is_written_with_its_profile_and_no_name_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate.platform, "node", lambda: "secret-host")
    rows, profile = calibration("model").measure()
    path = tmp_path / "calibration.json"
    calibrate.write(path, calibrate.describe_machine(CPU), rows, profile)
    text = path.read_text()
    content = json.loads(text)
    assert Profile.from_json(json.dumps(content["profile"])) == profile
    assert profile.source is Source.MEASURED
    assert content["rows"][0]["name"] == "large products"
    assert all(row["measured"] >= 0 for row in content["rows"])
    assert "secret-host" not in text
    assert str(tmp_path) not in text


def test_without_a_gpu_the_host_is_measured_and_the_rest_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "calibration.json"
    assert calibrate.main(["--output", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "layers, attention and copies need one" in printed
    (row,) = json.loads(path.read_text())["rows"]
    assert row["name"] == "AdamW on the CPU"
    assert row["measured"] > 0
    assert calibrate.main(["--output", str(tmp_path / "missing" / "calibration.json")]) == 2
    refused = capsys.readouterr()
    assert "No such file or directory" in refused.err
    assert refused.out == "", "refused before anything is measured"
