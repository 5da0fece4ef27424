"""What the host does while all ranks work at once is measured, put into the profile, and planned by."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness.local_transport import LocalTransport, run_rank_threads
from transformers import AutoConfig

from mobius.config.cli import parse_args
from mobius.measuring import host_rates
from mobius.measuring.bench import MIN_REPEATS, Bench
from mobius.measuring.host_rates import (
    UPDATES_WITHIN_STEP,
    Amounts,
    HostRates,
    measure_beside,
    measure_host_rates,
    with_host_rates,
)
from mobius.messages.transport import SingleRankTransport
from mobius.plan.cards import ACTION_LAUNCH, CARDS, LAUNCH, estimate_profile
from mobius.plan.model_files import shape_of_model
from mobius.plan.profile import LayerSeconds, Profile, Source
from mobius.plan.shared_rates import SharedRates
from mobius.plan.tasks import share_rates
from mobius.planning import measured_plan
from mobius.planning.blueprint import Blueprint, draw_blueprint
from mobius.planning.measured_plan import is_host_to_be_measured, plan_by_measurement
from mobius.ranks import Ranks

SLOW = HostRates(
    copies_each_way=10e9, updates=1e9, updates_beside_copies=0.8e9, copies_beside_updates=4e9, update_bytes=26
)


def estimate(num_ranks: int = 4) -> Profile:
    shape = shape_of_model("7b")
    return estimate_profile(CARDS["H200"], shape, microbatch_tokens=4096, seq_length=512, num_ranks=num_ranks)


@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.bfloat16, 26), (torch.float32, 28)])
def test_all_ranks_measure_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_bytes: int) -> None:
    monkeypatch.setattr(host_rates, "PART_SECONDS", 0.01)

    def work(transport: LocalTransport) -> HostRates:
        return measure_host_rates(
            dtype, device=torch.device("cpu"), transport=transport, kernel=None, amounts=Amounts(2**16, 2**12)
        )

    first, second = run_rank_threads(2, work)
    assert first == second
    assert first.update_bytes == num_bytes
    assert min(first.updates, first.updates_beside_copies) > 0
    assert first.copies_each_way == first.copies_beside_updates > 0  # on a CPU they are not measured beside updates


def test_a_profile_takes_the_hosts_rates_and_keeps_the_rest() -> None:
    before = estimate()
    after = with_host_rates(before, SLOW)
    within = UPDATES_WITHIN_STEP
    assert (after.cpu_adamw_together, after.cpu_adamw_beside_copies) == (within * 1e9, within * 0.8e9)
    assert (after.copies.both_down, after.copies.both_up, after.copies_beside_cpu_adamw) == (10e9, 10e9, 4e9)
    assert after.copies.down == before.copies.down
    assert after.copies.down_together == before.copies.down_together
    assert after.host_bandwidth == 4 * within * 26e9  # updates move more than copies
    assert after.layer_kinds == before.layer_kinds
    assert (after.source, after.basis) == (Source.ESTIMATED, f"{before.basis}, the host measured")
    assert Profile.from_json(after.to_json()) == after


def test_in_the_simulation_all_update_beside_copies_as_fast_as_was_measured() -> None:
    rates = SharedRates(with_host_rates(estimate(), SLOW), 4)
    copies = {("load", rank): rates.load(rank, 1) for rank in range(4)}
    copies |= {("offload", rank): rates.offload(rank, 1) for rank in range(4)}
    updates = {("update", rank): rates.update(1) for rank in range(4)}
    together = share_rates({**updates, **copies}, rates.capacities)
    assert [together[name] for name in updates] == pytest.approx([UPDATES_WITHIN_STEP * 0.8e9] * 4)
    assert [together[name] for name in copies] == pytest.approx([4e9] * 8)


def test_updates_are_not_faster_beside_copies_nor_together_than_alone() -> None:
    fast = HostRates(
        copies_each_way=50e9,
        updates=9e9,
        updates_beside_copies=9.5e9,
        copies_beside_updates=40e9,
        update_bytes=26,
    )
    after = with_host_rates(estimate(), fast)
    assert after.cpu_adamw == after.cpu_adamw_together == after.cpu_adamw_beside_copies == UPDATES_WITHIN_STEP * 9e9
    assert after.copies.down_together == 50e9


class CopiesOnTheirWay:
    """Of every four copies that were started one has ended when they all have been, and three when the updates have."""

    num_bytes = 100

    def __init__(self) -> None:
        self.num_started, self.num_queries = 0, 0

    def both(self) -> None:
        self.num_started += 2

    def mark(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(query=self.has_ended) for _ in range(2)]

    def has_ended(self) -> bool:
        self.num_queries += 1
        place = (self.num_queries - 1) % self.num_started
        return place % 4 < (1 if self.num_queries <= self.num_started else 3)


def test_copies_count_from_the_start_of_the_updates_to_their_end() -> None:
    bench = Bench(torch.device("cpu"), SingleRankTransport(), part_seconds=0.01)
    copies = CopiesOnTheirWay()

    seconds, rate = measure_beside(bench, lambda: time.sleep(0.002), copies, num_copies=8)

    assert copies.num_started == 16
    # Of 16 copies 4 had ended before and 12 have at the end: 4 each way of 100 bytes, beside some updates of 2 ms.
    num_updates = 4 * 100 / rate / seconds
    assert num_updates == pytest.approx(round(num_updates), rel=1e-6)
    assert num_updates >= MIN_REPEATS


def blueprint_of(*arguments: str) -> Blueprint:
    words = ["--model_path", "model", "--device", "cpu", "--fp32", "--batch_size", "4", "--seq_length", "16"]
    config = parse_args([*words, "--num_stages", "4", *arguments], num_ranks=1)
    return draw_blueprint(config, Ranks(0, 1, 0), AutoConfig.from_pretrained("model"))


@pytest.mark.usefixtures("workplace")
def test_the_host_is_looked_at_where_gpus_stream_and_nothing_else_is_given() -> None:
    cuda = torch.device("cuda", 0)
    assert is_host_to_be_measured(replace(blueprint_of(), device=cuda))
    assert not is_host_to_be_measured(blueprint_of())
    assert not is_host_to_be_measured(replace(blueprint_of("--no_offload"), device=cuda))
    given = blueprint_of()
    planned = replace(given.config, planning=replace(given.config.planning, plan="plan.json"))
    assert not is_host_to_be_measured(replace(given, device=cuda, config=planned))


@pytest.mark.usefixtures("workplace")
def test_a_run_is_planned_again_by_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_gpu = replace(blueprint_of(), device=torch.device("cuda", 0), profile=estimate(1))
    unknown = replace(on_gpu, profile=None)
    seen: list[Profile] = []

    def redraw(blueprint: Blueprint, profile: Profile) -> Blueprint:
        seen.append(profile)
        return replace(blueprint, profile=profile)

    monkeypatch.setattr(measured_plan, "redraw", redraw)
    monkeypatch.setattr(measured_plan, "measure_host_rates", lambda *_, **__: SLOW)
    launch = LayerSeconds(2 * LAUNCH.forward, 3e-3, 2 * LAUNCH.recomputed_backward)
    monkeypatch.setattr(measured_plan, "measure_launches", lambda *_: launch)
    with caplog.at_level(logging.INFO):
        planned = plan_by_measurement(on_gpu, SingleRankTransport())
    with_rates = with_host_rates(estimate(1), SLOW)
    assert seen == [planned.profile] == [replace(with_rates, launch=launch, action_launch=2 * ACTION_LAUNCH)]
    told = "1.00 billion updates per second and rank, or 0.80 beside copies of 4 GB/s each way, which alone do 10"
    assert told in caplog.text
    assert "; a layer is enqueued in 0.60 ms forward, 3.00 backward, 1.86 with recompute" in caplog.text
    assert plan_by_measurement(unknown, SingleRankTransport()) is unknown
    assert len(seen) == 1
