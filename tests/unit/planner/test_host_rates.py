"""What the host does while all ranks work at once is measured, put into the profile, and planned by."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.local_transport import LocalTransport, run_rank_threads
from harness.plan_requests import find_published_shape
from harness.run_setups import make_run_setup
from transformers import AutoConfig

from mobius.config.cli import parse_args
from mobius.distributed.transport import SingleRankTransport
from mobius.engine.adamw_cpu import load_adamw_cpu
from mobius.hardware.devices import num_optimizer_threads
from mobius.planner import host_rates, measured_plan
from mobius.planner.event_simulation import SharedBandwidth, share_rates
from mobius.planner.gpu_specs import ACTION_LAUNCH, GPU_SPECS, LAUNCH, estimate_profile
from mobius.planner.host_rates import (
    UPDATES_WITHIN_STEP,
    HostRates,
    measure_cpu_optimizer,
    measure_during_copies,
    measure_host_rates,
    updates_meanwhile,
    with_fewest_threads,
    with_host_rates,
)
from mobius.planner.measure import Launches
from mobius.planner.measured_plan import Measurements, plan_by_measurement
from mobius.planner.profile import LayerSeconds, Profile, Source
from mobius.planner.solver import PlanResult
from mobius.planner.timer import MIN_REPEATS, CollectiveTimer
from mobius.process.ranks import Ranks
from mobius.training.run_setup import RunSetup

SLOW = HostRates(
    copies_each_way=10e9,
    cpu_adamw_together=1e9,
    cpu_adamw_beside_copies=0.8e9,
    copies_beside_cpu_adamw=4e9,
    cpu_adamw_bytes=26,
    host_bandwidth=4 * 26e9,
    optimizer_threads=6,
)


def estimate(num_ranks: int = 4) -> Profile:
    shape = find_published_shape("7b")
    return estimate_profile(GPU_SPECS["H200"], shape, microbatch_tokens=4096, seq_length=512, num_ranks=num_ranks)


@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.bfloat16, 26), (torch.float32, 28)])
def test_all_ranks_measure_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_bytes: int) -> None:
    monkeypatch.setattr(host_rates, "PART_SECONDS", 0.01)
    monkeypatch.setattr(host_rates, "COPY_BYTES", 2**16)
    monkeypatch.setattr(host_rates, "CPU_PARAMETERS", 2**12)

    def work(transport: LocalTransport) -> HostRates:
        return measure_host_rates(dtype, device=torch.device("cpu"), transport=transport, kernel=None)

    first, second = run_rank_threads(2, work)
    assert first == second
    assert first.cpu_adamw_bytes == num_bytes
    assert min(first.cpu_adamw_together, first.cpu_adamw_beside_copies) > 0
    assert first.copies_each_way == first.copies_beside_cpu_adamw > 0  # on a CPU they are not measured during updates


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({14: 4.9, 11: 4.3, 7: 3.4, 6: 3.4}, 14),
        ({14: 4.9, 11: 4.7, 7: 4.6, 6: 4.6}, 11),  # 7 reach 94 %
        ({14: 2.0, 11: 2.0, 7: 2.0, 6: 1.9}, 6),
        ({14: 2.0, 11: 2.0, 7: 1.9, 6: 1.5}, 7),
    ],
)
def test_as_many_threads_update_as_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rates: dict[int, float], expected: int
) -> None:
    kernel = load_adamw_cpu(tmp_path, num_threads=14)
    assert kernel is not None
    monkeypatch.setattr(host_rates, "CPU_PARAMETERS", 2**12)

    def seconds(_: CollectiveTimer, update: Any) -> float:
        return 1 / rates[update.args[0]._one_pass[0].num_threads]

    monkeypatch.setattr(CollectiveTimer, "seconds", seconds)
    where: dict[str, Any] = {"device": torch.device("cpu"), "transport": SingleRankTransport()}
    chosen = with_fewest_threads(torch.bfloat16, kernel=kernel, **where)
    assert chosen is not None
    assert (chosen.num_threads, kernel.num_threads) == (expected, 14)
    few = kernel.with_threads(4)
    assert with_fewest_threads(torch.bfloat16, kernel=few, **where) is few  # there is nothing to spare


def test_a_profile_takes_the_hosts_rates_and_keeps_the_rest() -> None:
    before = estimate()
    after = with_host_rates(before, SLOW)
    assert (after.cpu_adamw_together, after.cpu_adamw_beside_copies) == (1e9, 0.8e9)
    assert (after.copies.host_to_device_duplex, after.copies.device_to_host_duplex, after.copies_beside_cpu_adamw) == (
        10e9,
        10e9,
        4e9,
    )
    assert after.copies.host_to_device == before.copies.host_to_device
    assert after.copies.host_to_device_all_gpus == before.copies.host_to_device_all_gpus
    assert after.host_bandwidth == 4 * 26e9
    assert after.layer_kinds == before.layer_kinds
    assert after.optimizer_threads == 6
    measured = "the host measured with 6 optimizer threads of each rank"
    assert (after.source, after.basis) == (Source.ESTIMATED, f"{before.basis}, {measured}")
    assert Profile.from_json(after.to_json()) == after


def test_in_the_simulation_all_update_during_copies_as_fast_as_was_measured() -> None:
    rates = SharedBandwidth(with_host_rates(estimate(), SLOW), 4)
    copies = {("load", rank): rates.load(rank, 1) for rank in range(4)}
    copies |= {("offload", rank): rates.offload(rank, 1) for rank in range(4)}
    updates = {("update", rank): rates.update(1) for rank in range(4)}
    together = share_rates({**updates, **copies}, rates.capacities)
    assert [together[name] for name in updates] == pytest.approx([0.8e9] * 4)
    assert [together[name] for name in copies] == pytest.approx([4e9] * 8)


def test_updates_are_not_faster_during_copies_nor_together_than_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: 1 s on one rank, 1 s on all, 0.9 s during copies; within a step they take longer."""
    monkeypatch.setattr(host_rates, "CPU_PARAMETERS", 2**12)
    monkeypatch.setattr(host_rates, "measure_during_copies", lambda *_: (0.9, 40e9))
    timer = CollectiveTimer(torch.device("cuda"), SingleRankTransport())
    monkeypatch.setattr(timer, "seconds", lambda _: 1.0)
    monkeypatch.setattr(timer, "seconds_alone", lambda _: 1.0)
    _, fast = measure_cpu_optimizer(timer, torch.bfloat16, None, CopiesOnTheirWay(), each_way=50e9)
    assert fast.cpu_adamw_beside_copies == fast.cpu_adamw_together == UPDATES_WITHIN_STEP * 2**12
    assert fast.host_bandwidth == 2 * 50e9  # copies move more than updates

    after = with_host_rates(estimate(), replace(fast, cpu_adamw_together=9e9))
    assert after.cpu_adamw == after.cpu_adamw_together == 9e9
    assert after.copies.host_to_device_all_gpus == 50e9


class CopiesOnTheirWay:
    """Of every four copies that were started one has ended when they all have been, and three when the updates have."""

    num_bytes = 100

    def __init__(self) -> None:
        self.num_started, self.num_queries = 0, 0

    def both(self) -> None:
        self.num_started += 2

    def mark(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(is_completed=self.has_ended) for _ in range(2)]

    def has_ended(self) -> bool:
        self.num_queries += 1
        place = (self.num_queries - 1) % self.num_started
        return place % 4 < (1 if self.num_queries <= self.num_started else 3)


def test_copies_count_from_the_start_of_the_updates_to_their_end() -> None:
    timer = CollectiveTimer(torch.device("cpu"), SingleRankTransport(), part_seconds=0.01)
    copies = CopiesOnTheirWay()

    seconds, rate = measure_during_copies(timer, lambda: time.sleep(0.002), copies, num_copies=8)

    assert copies.num_started == 16
    # Of 16 copies 4 had ended before and 12 have at the end: 4 each way of 100 bytes, during some updates of 2 ms.
    num_updates = 4 * 100 / rate / seconds
    assert num_updates == pytest.approx(round(num_updates), rel=1e-6)
    assert num_updates >= MIN_REPEATS


def test_updates_end_with_the_block_and_fail_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rates, "CPU_PARAMETERS", 2**10)
    number = itertools.count()
    monkeypatch.setattr(host_rates, "update_once", lambda *_: next(number))
    with updates_meanwhile(torch.bfloat16, None):
        before = next(number)
        while next(number) < before + 5:
            time.sleep(1e-4)
    after = next(number)
    time.sleep(0.01)
    assert next(number) == after + 1

    def fail(*_: object) -> None:
        if next(number) > after + 3:
            raise MemoryError

    monkeypatch.setattr(host_rates, "update_once", fail)
    with pytest.raises(MemoryError), updates_meanwhile(torch.bfloat16, None):
        pass


def test_the_slowest_rank_tells_what_launches_take() -> None:
    def measure_rank(transport: LocalTransport) -> float:
        timer = CollectiveTimer(torch.device("cpu"), transport, part_seconds=0.01)
        return timer.slowest_launch(lambda: time.sleep(0.02 if transport.rank else 0.0))

    first, second = run_rank_threads(2, measure_rank)
    assert first == second
    assert first >= 0.02


def blueprint_of(*arguments: str) -> RunSetup:
    words = ["--model_path", "model", "--device", "cpu", "--fp32", "--batch_size", "4", "--seq_length", "16"]
    config = parse_args([*words, "--num_stages", "4", *arguments], num_ranks=1)
    return make_run_setup(config, Ranks(0, 1, 0), AutoConfig.from_pretrained("model"))


def on_gpu(run_setup: RunSetup) -> RunSetup:
    return replace(run_setup, rank_context=replace(run_setup.rank_context, device=torch.device("cuda", 0)))


def wanted(run_setup: RunSetup) -> Measurements:
    return Measurements.of(run_setup.result, run_setup.device)


def with_profile(run_setup: RunSetup, profile: Profile | None) -> RunSetup:
    return replace(run_setup, result=replace(run_setup.result, profile=profile))


@pytest.mark.usefixtures("workplace")
def test_the_host_is_looked_at_where_gpus_stream_and_nothing_else_is_given() -> None:
    assert wanted(on_gpu(blueprint_of())).host
    assert not wanted(blueprint_of()).host
    assert not wanted(on_gpu(blueprint_of("--no_offload"))).host
    given = on_gpu(blueprint_of())
    planned = replace(given.config, planning=replace(given.config.planning, plan="plan.json"))
    request = replace(given.result.request, config=planned)
    assert not wanted(replace(given, result=replace(given.result, request=request))).host


@pytest.mark.usefixtures("workplace")
def test_a_run_is_planned_again_by_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = with_profile(on_gpu(blueprint_of()), estimate(1))
    unknown = with_profile(known, None)
    seen: list[Profile] = []

    def replan(result: PlanResult, parts: object, device: object, profile: Profile) -> PlanResult:
        seen.append(profile)
        return replace(result, profile=profile)

    monkeypatch.setattr(measured_plan, "replan", replan)
    monkeypatch.setattr(measured_plan, "measure_host_rates", lambda *_, **__: SLOW)
    launches = Launches(LayerSeconds(2 * LAUNCH.forward, 3e-3, 2 * LAUNCH.recomputed_backward), 2.5)
    monkeypatch.setattr(measured_plan, "measure_launches", lambda *_: launches)
    with caplog.at_level(logging.DEBUG):
        result = plan_by_measurement(known.result, known.parts, known.rank_context, SingleRankTransport())
    planned = replace(known, result=result)
    assert planned.optimizer_threads == SLOW.optimizer_threads
    assert unknown.optimizer_threads == num_optimizer_threads(1)
    with_rates = with_host_rates(estimate(1), SLOW)
    assert (
        seen
        == [planned.result.profile]
        == [
            replace(
                with_rates,
                launch_overhead=launches.layer,
                action_launch=2 * ACTION_LAUNCH,
                launch_beside_updates=2.5,
            )
        ]
    )
    assert f"{SLOW}, to enqueue a layer {launches}" in caplog.text
    same = plan_by_measurement(unknown.result, unknown.parts, unknown.rank_context, SingleRankTransport())
    assert same is unknown.result
    assert len(seen) == 1
