"""The link between replicas is measured with all ranks at once and with one after the other, alike on all of them."""

from __future__ import annotations

import pytest
import torch
from harness.local_transport import LocalTransport, run_replica_threads

from mobius.planner import measured_plan
from mobius.planner.measured_plan import measure_replica_rates
from mobius.planner.profile import ReplicaRates
from mobius.planner.timer import CollectiveTimer


@pytest.mark.parametrize(("num_replicas", "num_pipeline_ranks"), [(2, 1), (2, 2), (3, 1)])
def test_all_ranks_get_the_same_rates(
    monkeypatch: pytest.MonkeyPatch, num_replicas: int, num_pipeline_ranks: int
) -> None:
    monkeypatch.setattr(measured_plan, "LINK_ELEMENTS", 2**12)

    def work(_: int, transport: LocalTransport) -> ReplicaRates:
        timer = CollectiveTimer(torch.device("cpu"), transport, part_seconds=0.01)
        return measure_replica_rates(timer, is_through_host=True)

    rates = run_replica_threads(num_replicas, num_pipeline_ranks, work)
    assert len(rates) == num_replicas * num_pipeline_ranks
    assert len(set(rates)) == 1
    assert 0 < rates[0].alone <= rates[0].together
    assert rates[0].is_through_host


def test_bytes_are_those_that_a_rank_gives_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_plan, "LINK_ELEMENTS", 3072)
    monkeypatch.setattr(CollectiveTimer, "seconds", lambda *_: 2.0)
    monkeypatch.setattr(CollectiveTimer, "seconds_alone", lambda *_: 0.5)

    def work(_: int, transport: LocalTransport) -> ReplicaRates:
        return measure_replica_rates(CollectiveTimer(torch.device("cpu"), transport), is_through_host=False)

    for rates in run_replica_threads(3, 2, work):
        # 1024 elements of 2 bytes to each of 2 others; by one rank not faster than by all of them.
        assert rates == ReplicaRates(together=4096.0, alone=4096.0, is_through_host=False)
