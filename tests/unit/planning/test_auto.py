"""auto becomes numbers: by prediction where the GPU is known, else the defaults; and ranks that disagree stop."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.local_transport import LocalTransport, run_rank_threads

from mobius.config.cli import parse_args
from mobius.config.config import Config
from mobius.errors import GpuMemoryError, PlanError
from mobius.plan.cards import card_of_device
from mobius.plan.model_files import shape_of_model
from mobius.plan.partition import partition_of
from mobius.plan.plan import Plan
from mobius.planning.auto import Gpu, check_agreement, measures_at_start, resolve_auto
from mobius.units import GIB

RTX4090 = Gpu("NVIDIA GeForce RTX 4090", 24 * GIB)
SHAPE = replace(shape_of_model("1b"), layer_parameters=shape_of_model("1b").layer_parameters[:8])


def config_of(*arguments: str) -> Config:
    return parse_args(["--batch_size", "16", *arguments], num_ranks=2)


AUTO = ("--num_stages", "auto", "--num_chunks", "auto")


def test_without_auto_nothing_changes() -> None:
    config = config_of("--num_stages", "4")
    assert resolve_auto(config, SHAPE, num_ranks=2, gpu=RTX4090).config is config


def test_a_known_gpu_is_planned_for_by_prediction(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        resolved = resolve_auto(config_of(*AUTO), SHAPE, num_ranks=2, gpu=RTX4090)
    pipeline = resolved.config.pipeline
    assert pipeline.num_stages is not None
    assert pipeline.num_stages % 2 == 0
    assert 16 % pipeline.num_microbatches == 0
    assert resolved.spans is not None
    assert sum(len(span.layers) for span in resolved.spans) == 8
    assert f"--num_stages {pipeline.num_stages} --num_chunks {pipeline.num_chunks}" in caplog.text
    assert "estimated: 2 x RTX4090" in caplog.text


def test_a_given_number_is_kept() -> None:
    stages = resolve_auto(config_of("--num_stages", "4", "--num_chunks", "auto"), SHAPE, num_ranks=2, gpu=RTX4090)
    assert stages.config.pipeline.num_stages == 4
    assert stages.spans is not None
    assert [len(span.layers) for span in stages.spans] == [2, 2, 2, 2]
    chunks = resolve_auto(config_of("--num_stages", "auto", "--num_chunks", "8"), SHAPE, num_ranks=2, gpu=RTX4090)
    assert chunks.config.pipeline.num_chunks == 8


def test_what_fits_nowhere_is_refused() -> None:
    config = config_of(*AUTO, "--gpu_memory_limit", "0.25")
    with pytest.raises(GpuMemoryError, match="To fit"):
        resolve_auto(config, SHAPE, num_ranks=2, gpu=RTX4090)


@pytest.mark.parametrize(
    ("arguments", "num_ranks", "gpu", "stages", "chunks"),
    [
        ((), 2, None, 8, 4),
        ((), 3, None, 6, 4),
        (("--batch_size", "6"), 2, None, 8, 3),
        ((), 2, Gpu("Some Future GPU", 24 * GIB), 8, 4),
        (("--fp32",), 2, RTX4090, 8, 4),
    ],
)
def test_without_an_estimate_the_defaults_or_the_nearest_possible_numbers_are_used(
    arguments: tuple[str, ...], num_ranks: int, gpu: Gpu | None, stages: int, chunks: int
) -> None:
    config = parse_args(["--batch_size", "16", *AUTO, *arguments], num_ranks=num_ranks)
    resolved = resolve_auto(config, SHAPE, num_ranks=num_ranks, gpu=gpu)
    assert (resolved.config.pipeline.num_stages, resolved.config.pipeline.num_chunks) == (stages, chunks)


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-PCIE-40GB", "A100-40"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("NVIDIA L20", "L20"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX 6000 Ada Generation", "6000-Ada"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA A10", "A10"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA L40", None),
        ("NVIDIA A100X", None),
        ("", None),
    ],
)
def test_the_drivers_name_finds_the_card(device: str, card: str | None) -> None:
    found = card_of_device(device)
    assert (found.name if found else None) == card


def plan_of(*sizes: int) -> Plan:
    return Plan(2, 4, (2, 2), partition_of(sizes), frozenset())


def test_ranks_with_the_same_plan_go_on_and_others_stop() -> None:
    run_rank_threads(2, lambda transport: check_agreement(plan_of(2, 2, 2, 2), transport))

    def differ(transport: LocalTransport) -> str:
        with pytest.raises(PlanError) as caught:
            check_agreement(plan_of(2, 2, 2, 2) if transport.rank else plan_of(1, 3, 2, 2), transport)
        return str(caught.value)

    for message in run_rank_threads(2, differ):
        assert "--num_stages 4 --num_chunks 4" in message


def test_a_run_with_auto_trains_and_saves_the_numbers(workplace: Path, run: Any) -> None:
    run("--num_stages", "auto", "--num_chunks", "auto")
    saved = yaml.safe_load((workplace / "out" / "training_args.yaml").read_text())
    assert (saved["num_stages"], saved["num_chunks"]) == (4, 4)


def test_a_run_measures_at_its_start_for_auto_and_where_it_streams() -> None:
    assert measures_at_start(config_of("--num_stages", "auto", "--no_offload"))
    assert measures_at_start(config_of("--num_stages", "4", "--use_offload"))
    assert not measures_at_start(config_of("--num_stages", "4", "--no_offload"))
    assert not measures_at_start(config_of("--num_stages", "4", "--use_offload", "--plan", "plan.json"))
