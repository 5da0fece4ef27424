"""Whole runs beside plain training, as GPUs check them: a right run passes, and one with wrong gradients does not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import exact_runs
import pytest
import torch
from exact_runs import MODELS, WAYS, Jobs, Result, Trainings, Way, jobs_of, make_models
from torch import Tensor

from mobius.engine.gradient_sums import GradientSums
from mobius.hardware.streams import DeviceBuffer

SMALL = ["--batch_size", "4", "--seq_length", "64", "--max_samples", "8"]


@pytest.fixture
def trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainings:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # the run sets it for the other tests too
    make_models(["dense"], tmp_path)
    return Trainings(tmp_path, "cpu", SMALL)


def named(name: str) -> Way:
    return next(way for way in WAYS if way.name == name)


@pytest.mark.parametrize("name", ["adapter, full", pytest.param("int8, streamed", marks=pytest.mark.extended)])
def test_a_right_run_passes(trainings: Trainings, name: str) -> None:
    result = trainings.compare("dense", named(name))
    assert result.passes, result
    assert 0 < result.update < (exact_runs.EIGHT_BIT_UPDATE if "int8" in name else 1e-4)


def test_a_run_with_a_wrong_gradient_does_not(trainings: Trainings, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = GradientSums.finish

    def wrong(sums: GradientSums, target: DeviceBuffer | None) -> Tensor:
        for name, view in sums.views().items():
            if "layers.1.mlp.down_proj" in name:
                view.mul_(-1)
        return finish(sums, target)

    monkeypatch.setattr(GradientSums, "finish", wrong)
    result = trainings.compare("dense", named("streamed"))
    assert not result.passes
    assert "update" in str(result.problem)


def test_a_run_that_fails_is_a_row(trainings: Trainings) -> None:
    result = trainings.compare("dense", Way("no such level", "--num_stages 4 --recompute some"))
    assert not result.passes
    assert "--recompute" in str(result.problem)
    assert "FAILED" in result.cells()


def test_each_model_runs_in_each_way_that_it_can() -> None:
    assert len({way.name for way in WAYS}) == len(WAYS)
    jobs = jobs_of(list(MODELS), [])
    assert Counter(model for model, _ in jobs)["wide"] == len(WAYS)
    assert {WAYS[number].name for _, number in jobs_of(["capped"], ["slices", "tiles"])} == set()


def test_a_process_goes_on_with_its_model() -> None:
    jobs = Jobs([("dense", 0), ("wide", 0), ("dense", 1), ("wide", 1)])
    first = jobs._take(None)
    assert first is not None
    assert jobs._take(first[0]) == (first[0], 1)
    other = jobs._take(first[0])
    assert other is not None
    assert other[0] != first[0]


def test_rows_say_what_passed() -> None:
    row = Result("dense", "streamed", 1.0, loss=1e-7, norm=1e-6, update=1e-5, allowed=exact_runs.FP32_UPDATE)
    assert row.passes
    assert not Result("dense", "streamed", 1.0, update=1.4, allowed=exact_runs.FP32_UPDATE).passes
