"""Messages arrive in order on each directed edge, and a rank that is gone is noticed."""

from __future__ import annotations

import pytest
import torch
from harness.local_transport import LocalTransport, run_rank_threads

from mobius.distributed.transport import SingleRankTransport, ring_edges


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
