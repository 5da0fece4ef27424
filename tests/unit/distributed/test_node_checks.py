"""Nodes that differ are told apart before anything is planned, and the smallest one is planned for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from harness.local_transport import LocalTransport, run_replica_threads, together
from harness.plan_requests import find_published_shape, request_of

from mobius.config.cli import parse_args
from mobius.distributed import node_checks
from mobius.distributed.rendezvous import Rendezvous
from mobius.errors import ConfigError, PlanError
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.request import Machine
from mobius.process.ranks import Ranks, boot_id
from mobius.schedule.partition import partition_of
from mobius.schedule.plan import Plan


def check(trained: str, judged: str, seat: Rendezvous) -> None:
    node_checks.check_same_data(lambda: trained, lambda: judged, seat)


def test_other_data_on_a_node_is_told_on_all_of_them_with_both() -> None:
    told = together(lambda rank, seat: check("abc" if rank < 2 else "xyz", "j", seat))
    assert all(isinstance(error, ConfigError) for error in told)
    assert len(set(map(str, told))) == 1
    assert "the training data differs: abc on rank 0 (" in str(told[0])
    assert "xyz on rank 2 (" in str(told[0])
    told = together(lambda rank, seat: check("abc", "j" if rank != 1 else "k", seat))
    assert "the evaluation data differs: j on rank 0 (" in str(told[0])
    assert together(lambda rank, seat: check("abc", "j", seat)) == [None] * 3


def test_options_may_differ_in_what_is_a_nodes_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(words: Callable[[int], str]) -> list[object]:
        seats: dict[int, Rendezvous] = {}

        def work(rank: int, seat: Rendezvous) -> object:
            seats[rank] = seat
            config = parse_args(words(rank).split())
            return node_checks.join_replicas(config, Ranks(rank, 3, 0, num_replicas=3, num_nodes=3)) is seat

        monkeypatch.setattr(node_checks, "join_run", lambda ranks: seats[ranks.rank])
        return together(work)

    endpoint = "--nnodes 3 --rdzv_endpoint node0:29502"
    assert meet(lambda rank: f"{endpoint} --node_rank {rank} --cuda_visible_devices {rank}") == [True] * 3
    told = meet(lambda rank: f"--learning_rate {1 + (rank == 1)}e-5")
    assert "`--learning_rate` differs: 1e-05 on rank 0 (" in str(told[0])
    assert str(told[2]) == str(told[0])


@pytest.mark.parametrize(("offsets", "told"), [((0, 0, -90), "90 s"), ((0, 50, -50), "100 s")])
def test_clocks_that_are_apart_are_told_once(
    offsets: tuple[int, ...], told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mobius")
    ahead = threading.local()
    monkeypatch.setattr(
        node_checks, "time", SimpleNamespace(time=lambda: time.time() + ahead.by, monotonic=time.monotonic)
    )

    def work(rank: int, seat: Rendezvous) -> None:
        ahead.by = offsets[rank]
        node_checks.warn_clock_skew(seat)

    together(work)
    (line,) = caplog.messages
    assert f" is {told} ahead of the clock of " in line

    caplog.clear()
    offsets = (0, 50, 10)
    together(work)
    assert not caplog.messages


def test_the_smallest_gpu_is_planned_for_and_a_shared_host_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: int, seat: Rendezvous) -> tuple[int | None, int | None, int]:
        ranks = Ranks(rank, 4, rank % 2, num_replicas=2, num_nodes=2)
        return node_checks.smallest_machine(seat, ranks, (24, 24, 80, 80)[rank] * 2**30, (20, 19, 70, 75)[rank] * 2**30)

    caplog.set_level(logging.WARNING, "mobius")
    assert together(work, 4) == [(24 * 2**30, 19 * 2**30, 2)] * 4
    assert "GPUs differ: rank 0 has 24 GiB, rank 2 80 GiB" in caplog.text.replace(".00", "").replace(".0 ", " ")
    assert boot_id()


def test_the_smallest_host_is_planned_for_by_all() -> None:
    found = together(lambda rank, seat: node_checks.smallest_of_all(seat, (64, 128, 120)[rank] * 2**30), 3)
    assert found == [64 * 2**30] * 3
    request = request_of(
        find_published_shape("7b"), Machine(2, GPU_SPECS["H200"], host_bytes=2**40), host_memory_limit=100
    )
    assert request.host_bytes == 100 * 2**30
    met = replace(request, machine=replace(request.machine, agreed_host_bytes=found[0]))
    assert met.host_bytes == found[0], "whatever this node's own limit is"


def test_replicas_that_would_keep_other_stages_on_their_gpus_are_refused_on_all_ranks() -> None:
    """Places of a pipeline may: the first one keeps stage 0, and the second one stages 1 and 3."""

    def agree(last: frozenset[int]) -> list[str]:
        def work(rank: int, transport: LocalTransport) -> str:
            # A rank supposes of the others what it likes.
            resident = {0: frozenset({0, 1}), 1: frozenset({0, 1, 3}), 2: frozenset({0}), 3: last}[rank]
            plan = Plan(2, 4, 2, (2, 2), resident, cuts=partition_of((1, 1, 1, 1)))
            try:
                node_checks.check_same_residents(plan, transport)
            except PlanError as error:
                return str(error)
            return ""

        return run_replica_threads(2, 2, work)

    assert agree(frozenset({1, 3})) == [""] * 4
    told = agree(frozenset({1, 2}))
    assert len(set(told)) == 1
    assert told[0].startswith("stage(s) 3 would stay on the GPUs of some replicas only")
