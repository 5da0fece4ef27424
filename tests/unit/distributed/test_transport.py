"""Messages arrive in order on each edge, whatever is on the others, and a rank that is gone is noticed."""

from __future__ import annotations

import pytest
import torch
from harness.local_transport import LocalTransport, run_rank_threads

from mobius.distributed.transport import Edge, MessageFormat, SingleRankTransport, WarmupTransport, ring_edges
from mobius.schedule.action import Direction

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def message(value: float) -> torch.Tensor:
    return torch.full((2,), float(value))


@pytest.mark.parametrize(
    ("num_ranks", "forward", "backward"),
    [
        (1, [], []),
        (2, [(0, 1), (1, 0)], [(1, 0), (0, 1)]),
        (3, [(0, 1), (1, 2), (2, 0)], [(1, 0), (2, 1), (0, 2)]),
        (4, [(0, 1), (1, 2), (2, 3), (3, 0)], [(1, 0), (2, 1), (3, 2), (0, 3)]),
    ],
)
def test_activations_go_up_the_ring_and_gradients_down_over_edges_that_all_ranks_list_in_one_order(
    num_ranks: int, forward: list[tuple[int, int]], backward: list[tuple[int, int]]
) -> None:
    expected = [(*pair, FORWARD) for pair in forward] + [(*pair, BACKWARD) for pair in backward]
    assert ring_edges(num_ranks) == expected


@pytest.mark.parametrize("num_ranks", [3, 4, 5])
def test_from_three_ranks_on_each_pair_has_messages_of_one_direction(num_ranks: int) -> None:
    pairs = [edge[:2] for edge in ring_edges(num_ranks)]
    assert len(set(pairs)) == len(pairs) == 2 * num_ranks


def test_a_hop_to_oneself_is_first_in_first_out_and_hands_over_the_tensor_itself() -> None:
    transport = SingleRankTransport()
    sent = [message(i) for i in range(3)]
    for tensor in sent:
        transport.post_receive(0, FORWARD)
        transport.send(tensor, 0, FORWARD)

    assert [transport.receive(0, FORWARD) is tensor for tensor in sent] == [True] * 3


def test_a_hop_to_oneself_keeps_activations_apart_from_gradients() -> None:
    transport = SingleRankTransport()
    activation, gradient = message(1), message(2)
    transport.send(activation, 0, FORWARD)
    transport.send(gradient, 0, BACKWARD)

    assert transport.receive(0, BACKWARD) is gradient
    assert transport.receive(0, FORWARD) is activation


def test_a_rehearsal_posts_activations_apart_from_gradients() -> None:
    transport = WarmupTransport(
        rank=0, device=torch.device("cpu"), message_format=MessageFormat((2,), torch.float32), max_pending_sends=1
    )
    transport.post_receive(1, FORWARD)
    with pytest.raises(IndexError):
        transport.receive(1, BACKWARD)
    assert not transport.receive(1, FORWARD).any()


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
def test_each_edge_keeps_its_order(num_ranks: int) -> None:
    """Every rank sends numbered messages over all its edges in turn and receives afterwards, the last edge first."""

    def numbered(edge: Edge, number: int) -> torch.Tensor:
        return message(1000 * (edge.direction is BACKWARD) + 100 * edge.source + 10 * edge.target + number)

    def talk(transport: LocalTransport) -> None:
        edges = ring_edges(num_ranks) or [Edge(0, 0, direction) for direction in Direction]
        for number in range(5):
            for edge in edges:
                if edge.source == transport.rank:
                    transport.send(numbered(edge, number), edge.target, edge.direction)
        for edge in reversed([edge for edge in edges if edge.target == transport.rank]):
            for number in range(5):
                transport.post_receive(edge.source, edge.direction)
                assert torch.equal(transport.receive(edge.source, edge.direction), numbered(edge, number))
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
