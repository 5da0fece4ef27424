"""A plan is played on each GPU before weights are read, and replaced by one that fits; here the GPU is made up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from harness.local_transport import LocalTransport, run_rank_threads
from harness.plan_requests import find_published_shape

from mobius.config.cli import parse_args
from mobius.distributed.rank_context import RankContext
from mobius.distributed.transport import SingleRankTransport, Transport
from mobius.errors import GpuMemoryError, HostMemoryError
from mobius.planner.gpu_specs import gpu_spec_of_device
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import resolve_auto, solve
from mobius.process.ranks import Ranks
from mobius.schedule.packed_rows import PackedRows
from mobius.schedule.plan import Plan
from mobius.training import memory_check
from mobius.training.memory_check import (
    MEMORY_MARGIN_FRACTION,
    WarmupResult,
    allocate_stages_that_fit,
    check_mapped_bytes,
    warmup_plan,
)
from mobius.training.run_setup import RunSetup
from mobius.training.stages import RankStages
from mobius.units import GIB

SHAPE = replace(find_published_shape("1b"), layer_parameters=find_published_shape("1b").layer_parameters[:8])
AUTO = ("--num_stages", "8", "--num_chunks", "8")
"""Numbers; residency and what waits on the host is left to the planner."""


def blueprint_of(*options: str, rank: int = 0, num_ranks: int = 1, gib: float = 6) -> RunSetup:
    """A run's blueprint on ranks whose GPUs have `gib` of memory, as if their layers had been measured."""
    config = parse_args(
        ["--batch_size", "32", "--gpu_memory_limit", str(gib), "--host_memory_limit", "64", *options],
        num_ranks=num_ranks,
    )
    machine = Machine(num_ranks, gpu_spec_of_device("NVIDIA H100 80GB HBM3"), 79 * GIB, 78 * GIB)
    request = resolve_auto(PlanRequest.of(config, SHAPE, machine))
    rank_context = RankContext(
        ranks=Ranks(rank, num_ranks, rank),
        device=torch.device("cuda", 0),
        device_order=tuple(range(num_ranks)),
    )
    found = solve(request, layer=estimated_layer(request))
    return RunSetup(rank_context=rank_context, parts=cast(Any, SimpleNamespace(config=None)), result=found)


@pytest.mark.parametrize(("gib", "is_refused"), [(3.0, False), (80.0, True)])
def test_a_limit_of_host_memory_is_compared_with_what_is_mapped(gib: float, is_refused: bool) -> None:
    mapped = {"weights": int(GIB), "optimizer states": int((gib - 1) * GIB)}
    stages = cast(RankStages, SimpleNamespace(mapped_bytes=lambda: mapped))
    if not is_refused:
        return check_mapped_bytes(blueprint_of(), stages, SingleRankTransport())
    with pytest.raises(HostMemoryError, match=r"\(79.0 GiB of optimizer states, 1.0 GiB of weights\).*limit 64"):
        check_mapped_bytes(blueprint_of(), stages, SingleRankTransport())
    return None


class MadeUpGpu:
    """Plays steps whose memory is the prediction times a factor, and keeps what was tried."""

    def __init__(self, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self._factor, self.tried, self.closed = factor, list[Plan](), 0
        monkeypatch.setattr(memory_check, "_allocate_and_run", self._play)

    def close(self) -> None:
        self.closed += 1

    def _play(
        self, run_setup: RunSetup, allocate: Callable[[RunSetup], RankStages]
    ) -> tuple[RankStages | None, WarmupResult]:
        self.tried.append(run_setup.plan)
        request, rank = run_setup.result.request, run_setup.ranks.pipeline_rank
        taken = int(self._factor * run_setup.result.gpu_estimates[rank].total)
        usable = (request.gpu_bytes or 0) + request.reserve_bytes
        if taken > usable:
            return None, WarmupResult(int(0.9 * usable), torch.OutOfMemoryError("CUDA out of memory."))
        return allocate(run_setup), WarmupResult(taken)

    def allocate(self, run_setup: RunSetup) -> RankStages:
        return cast(RankStages, self)


@pytest.mark.parametrize("factor", [1.08, 1.4])
def test_a_plan_that_runs_out_is_replaced_by_one_that_fits(
    factor: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, gpu = blueprint_of(*AUTO), MadeUpGpu(factor, monkeypatch)
    with caplog.at_level(logging.INFO):
        found, stages = allocate_stages_that_fit(asked, SingleRankTransport(), gpu.allocate)
    assert cast(Any, stages) is gpu
    assert factor * found.result.gpu_estimates[0].total < 6 * GIB
    assert found.plan.num_chunks == asked.plan.num_chunks
    lines = [line for line in caplog.text.splitlines() if "rehearsal: a step took" in line]
    assert len(lines) == len(gpu.tried) - 1 > 0


def test_a_plan_that_fits_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, gpu = blueprint_of(*AUTO), MadeUpGpu(1.0, monkeypatch)
    found, _ = allocate_stages_that_fit(asked, SingleRankTransport(), gpu.allocate)
    assert found is asked
    assert gpu.closed == 0


def test_numbers_that_leave_no_other_plan_and_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = ("--num_stages", "4", "--num_chunks", "8", "--num_rounds", "1", "--resident_stages", "2")
    more = ("--recompute", "full", "--activation_offloading", "off")
    asked = blueprint_of(*numbers, *more, gib=10)
    share = asked.result.gpu_estimates[0].total / (10 * GIB)
    with pytest.raises(GpuMemoryError, match="--resident_stages 1"):
        allocate_stages_that_fit(asked, SingleRankTransport(), MadeUpGpu(1.05 / share, monkeypatch).allocate)


def test_numbers_that_leave_no_other_plan_run_without_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = ("--num_stages", "4", "--num_chunks", "8", "--num_rounds", "1", "--resident_stages", "2")
    asked = blueprint_of(*numbers, "--recompute", "full", "--activation_offloading", "off", gib=10)
    share = asked.result.gpu_estimates[0].total / (10 * GIB)
    gpu = MadeUpGpu((1 - MEMORY_MARGIN_FRACTION / 2) / share, monkeypatch)
    found, _ = allocate_stages_that_fit(asked, SingleRankTransport(), gpu.allocate)
    assert found is asked
    assert gpu.closed == 1  # it was let go to look for another plan, and taken again


def test_a_given_plan_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = blueprint_of(*AUTO)
    given = replace(drawn, result=replace(drawn.result, is_given=True))
    gpu = MadeUpGpu(1.2, monkeypatch)
    with pytest.raises(GpuMemoryError, match="ran out of GPU memory"):
        allocate_stages_that_fit(given, SingleRankTransport(), gpu.allocate)
    assert len(gpu.tried) == 1


def test_all_ranks_take_the_plan_that_fits_the_one_that_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(run_setup: RunSetup, allocate: Callable[[RunSetup], RankStages]) -> tuple[RankStages | None, WarmupResult]:
        need = run_setup.result.gpu_estimates[run_setup.ranks.pipeline_rank].total
        if run_setup.ranks.rank == 1 and 1.15 * need > 6 * GIB:
            return None, WarmupResult(need, torch.OutOfMemoryError("CUDA out of memory."))
        return allocate(run_setup), WarmupResult(need)

    monkeypatch.setattr(memory_check, "_allocate_and_run", play)
    plans: dict[int, Plan] = {}

    class Stages:
        def close(self) -> None:
            pass

    def run(transport: LocalTransport) -> None:
        asked = blueprint_of("--num_stages", "4", "--num_chunks", "8", rank=transport.rank, num_ranks=2)
        own = cast(Transport, transport)
        plans[transport.rank] = allocate_stages_that_fit(asked, own, lambda _: cast(RankStages, Stages()))[0].plan

    run_rank_threads(2, run)
    assert plans[0] == plans[1]


def test_a_rehearsal_plays_as_few_rounds_as_reach_the_peak() -> None:
    plan = blueprint_of("--num_stages", "4", "--num_chunks", "16", "--num_rounds", "8").plan
    short = warmup_plan(plan)
    assert (plan.num_microbatches, short.num_microbatches, short.num_rounds) == (16, 4, 2)
    assert short.microbatches_per_round == plan.microbatches_per_round
    whole = replace(plan, num_rounds=1)
    assert warmup_plan(whole) == whole


@pytest.mark.parametrize(("max_documents", "seq_length"), [(1, 16), (5, 16), (16, 16), (40, 16)])
def test_the_fullest_row_has_as_many_documents_as_may_be(max_documents: int, seq_length: int) -> None:
    row: Sequence[int] = PackedRows(4.0, max_documents).fullest_row(seq_length)
    assert sum(row) == seq_length
    assert len(row) == min(max_documents, seq_length)
    assert min(row) > 0
