"""auto becomes numbers: by prediction where the GPU is known, else the defaults; and ranks that disagree stop."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.local_transport import LocalTransport, run_rank_threads
from harness.plan_requests import find_published_shape

from mobius.config.cli import parse_args
from mobius.config.config import Config
from mobius.errors import GpuMemoryError, PlanError
from mobius.planner.gpu_specs import gpu_spec_of_device
from mobius.planner.measured_plan import check_same_plan
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import Effort, resolve_auto
from mobius.schedule.partition import partition_of
from mobius.schedule.plan import Plan
from mobius.units import GIB

RTX4090, UNKNOWN = (
    Machine(2, gpu_spec_of_device(name), 24 * GIB) for name in ("NVIDIA GeForce RTX 4090", "Some Future GPU")
)
SHAPE = replace(find_published_shape("1b"), layer_parameters=find_published_shape("1b").layer_parameters[:8])


def config_of(*arguments: str) -> Config:
    return parse_args(["--batch_size", "16", *arguments], num_ranks=2)


AUTO = ("--num_stages", "auto", "--num_chunks", "auto")


def request_for(*arguments: str, machine: Machine = RTX4090) -> PlanRequest:
    return PlanRequest.of(config_of(*arguments), SHAPE, machine)


def test_without_auto_nothing_changes() -> None:
    numbers = ("--num_stages", "4", "--num_rounds", "1", "--num_slices", "1")
    request = request_for(*numbers, "--compute_order", "breadth_first")
    assert resolve_auto(request) is request


@pytest.mark.parametrize("machine", [RTX4090, UNKNOWN])
def test_a_draft_leaves_the_line_about_its_choice_to_the_plan(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        resolve_auto(request_for(*AUTO, machine=machine), effort=Effort.NOTHING)
    assert "chosen" not in caplog.text


def test_a_known_gpu_is_planned_for_by_prediction(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        settled = resolve_auto(request_for(*AUTO))
    assert settled.candidate.num_stages is not None
    assert settled.candidate.num_stages % 2 == 0
    assert 16 % settled.num_chunks == 0
    assert sum(len(cut.layers) for cut in settled.plan.cuts) == 8
    pipeline = settled.resolved_config.pipeline
    assert (pipeline.num_stages, pipeline.num_chunks) == (settled.candidate.num_stages, settled.num_chunks)
    assert settled.config.pipeline.num_stages is None
    assert f"--num_stages {settled.candidate.num_stages} --num_chunks {settled.num_chunks}" in caplog.text
    assert "estimated: 2 x RTX4090" in caplog.text


def test_a_given_number_is_kept() -> None:
    assert resolve_auto(request_for("--num_stages", "4", "--num_chunks", "auto")).candidate.num_stages == 4
    assert resolve_auto(request_for("--num_stages", "auto", "--num_chunks", "8")).num_chunks == 8


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(GpuMemoryError, match="is available"):
        resolve_auto(request_for(*AUTO, "--gpu_memory_limit", "0.25"))


@pytest.mark.parametrize(
    ("arguments", "machine", "stages", "chunks"),
    [
        ((), Machine(2), 8, 4),
        ((), Machine(3), 6, 4),
        (("--batch_size", "6"), Machine(2), 8, 3),
        ((), UNKNOWN, 8, 4),
        (("--fp32",), RTX4090, 8, 4),
    ],
)
def test_without_an_estimate_the_defaults_or_the_nearest_possible_numbers_are_used(
    arguments: tuple[str, ...], machine: Machine, stages: int, chunks: int
) -> None:
    settled = resolve_auto(request_for(*AUTO, *arguments, machine=machine))
    assert (settled.candidate.num_stages, settled.num_chunks) == (stages, chunks)


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
    found = gpu_spec_of_device(device)
    assert (found.name if found else None) == card


def plan_of(*sizes: int) -> Plan:
    return Plan(2, len(sizes), 4, (2, 2), cuts=partition_of(sizes))


def test_ranks_with_the_same_plan_go_on_and_others_stop() -> None:
    run_rank_threads(2, lambda transport: check_same_plan(plan_of(2, 2, 2, 2), transport))

    def differ(transport: LocalTransport) -> str:
        with pytest.raises(PlanError) as caught:
            check_same_plan(plan_of(2, 2, 2, 2) if transport.rank else plan_of(1, 3, 2, 2), transport)
        return str(caught.value)

    for message in run_rank_threads(2, differ):
        assert "--num_stages 4 --num_chunks 4" in message


def test_a_run_with_auto_trains_and_saves_the_numbers(workplace: Path, run: Any) -> None:
    run("--num_stages", "auto", "--num_chunks", "auto")
    saved = yaml.safe_load((workplace / "out" / "training_args.yaml").read_text())
    assert (saved["num_stages"], saved["num_chunks"]) == (4, 4)


@pytest.mark.parametrize(
    ("arguments", "layers", "host"),
    [
        (("--num_stages", "auto", "--no_offload"), True, False),
        (("--num_stages", "4", "--use_offload"), False, True),
        (("--num_stages", "4", "--no_offload"), False, False),
        (("--num_stages", "4", "--use_offload", "--plan", "plan.json"), False, False),
    ],
)
def test_a_run_measures_layers_for_auto_and_the_host_where_it_streams(
    arguments: tuple[str, ...], layers: bool, host: bool
) -> None:
    request = request_for(*arguments)
    assert (request.measures_layers, request.measures_host) == (layers, host)
