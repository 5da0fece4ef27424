"""Messages arrive in order on each directed edge, and a rank that is gone is noticed."""

from __future__ import annotations

import threading

import pytest
import torch
from harness import local_transport
from harness.local_transport import LocalHub, LocalTransport, run_rank_threads

from mobius.errors import DataError, TransportError
from mobius.messages.transport import SingleRankTransport, ring_edges


def message(value: float) -> torch.Tensor:
    return torch.full((2,), float(value))


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, set()),
        (2, {(0, 1), (1, 0)}),
        (3, {(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)}),
        (4, {(0, 1), (1, 2), (2, 3), (3, 0), (1, 0), (2, 1), (3, 2), (0, 3)}),
    ],
)
def test_the_ring_has_each_directed_edge_between_neighbours_once_and_always_in_one_order(
    num_ranks: int, expected: set[tuple[int, int]]
) -> None:
    edges = ring_edges(num_ranks)

    assert set(edges) == expected
    assert len(edges) == len(expected)
    assert all(ring_edges(num_ranks) == edges for _ in range(3))


def test_a_hop_to_oneself_is_first_in_first_out_and_hands_over_the_tensor_itself() -> None:
    transport = SingleRankTransport()
    sent = [message(i) for i in range(3)]
    for tensor in sent:
        transport.post_receive(0)
        transport.send(tensor, 0)

    assert [transport.receive(0) is tensor for tensor in sent] == [True] * 3


def test_a_single_rank_sums_with_nobody_and_has_no_peer() -> None:
    transport = SingleRankTransport()
    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    transport.barrier()
    transport.finish_step()
    transport.close()

    assert (transport.rank, transport.num_ranks) == (0, 1)
    assert torch.equal(transport.sum_over_ranks(values), values)
    with pytest.raises(AssertionError, match="no peer"):
        transport.exchange(values, 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_each_directed_edge_keeps_its_order(num_ranks: int) -> None:
    """Every rank sends numbered messages to both neighbours first and receives afterwards, the last edge first."""

    def talk(transport: LocalTransport) -> None:
        edges = ring_edges(num_ranks) or [(0, 0)]
        outgoing = [edge for edge in edges if edge[0] == transport.rank]
        incoming = [edge for edge in edges if edge[1] == transport.rank]
        for number in range(5):
            for source, target in outgoing:
                transport.send(message(100 * source + 10 * target + number), target)
        for source, target in reversed(incoming):
            for number in range(5):
                transport.post_receive(source)
                assert torch.equal(transport.receive(source), message(100 * source + 10 * target + number))
        transport.finish_step()
        transport.barrier()
        transport.close()

    run_rank_threads(num_ranks, talk)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sums_are_equal_on_all_ranks_and_leave_the_terms_alone(num_ranks: int) -> None:
    def add(transport: LocalTransport) -> list[float]:
        sums = []
        for power in (1, 2, 3):
            own = torch.tensor([float(transport.rank + 1) ** power], dtype=torch.float64)
            sums.append(transport.sum_over_ranks(own).item())
            assert own.item() == (transport.rank + 1) ** power
        return sums

    expected = [float(sum((rank + 1) ** power for rank in range(num_ranks))) for power in (1, 2, 3)]
    assert run_rank_threads(num_ranks, add) == [expected] * num_ranks


def test_two_ranks_exchange_tensors_which_they_may_change_at_once() -> None:
    def swap(transport: LocalTransport) -> float:
        own = message(transport.rank)
        received = transport.exchange(own, 1 - transport.rank)
        own.fill_(-1)
        transport.barrier()
        return received[0].item()

    assert run_rank_threads(2, swap) == [1.0, 0.0]


def test_results_come_in_rank_order() -> None:
    assert run_rank_threads(4, lambda transport: (transport.rank, transport.num_ranks)) == [(r, 4) for r in range(4)]


def test_a_rank_that_dies_ends_those_who_wait_for_it_and_its_own_error_is_the_one_told() -> None:
    notices: list[type[BaseException]] = []

    def work(transport: LocalTransport) -> None:
        if transport.rank == 2:
            raise DataError("rank 2 cannot read")
        try:
            transport.sum_over_ranks(torch.zeros(1))
        except BaseException as error:
            notices.append(type(error))
            raise

    with pytest.raises(DataError, match="rank 2 cannot read"):
        run_rank_threads(3, work)
    assert notices == [TransportError, TransportError]


def test_a_message_that_never_comes_is_an_error_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_transport, "TIMEOUT_SECONDS", 0.05)
    hub = LocalHub(2)

    with pytest.raises(TransportError, match="rank 1 got no message"):
        hub.transport(1).receive(0)
    with pytest.raises(TransportError, match="rank 0 got no message"):
        hub.transport(0).exchange(message(0), 1)


def test_a_meeting_that_nobody_joins_is_an_error_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_transport, "TIMEOUT_SECONDS", 0.05)

    with pytest.raises(TransportError, match="rank 0 waited"):
        LocalHub(2).transport(0).barrier()


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()

    run_rank_threads(3, lambda transport: transport.barrier())

    assert threading.active_count() == before
