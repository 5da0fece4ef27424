"""Messages arrive in order on each edge, whatever is on the others, and a rank that is gone is noticed."""

from __future__ import annotations

import pytest
import torch

from mobius.distributed.transport import MessageFormat, SingleRankTransport, WarmupTransport, ring_edges
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
