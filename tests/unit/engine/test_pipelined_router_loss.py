"""Messages that carry numbers of routers behind hidden states."""

from __future__ import annotations

import pytest
import torch

from mobius.engine.pipelined_router_loss import PipelinedRouterLoss, sent_shape
from mobius.models.router_loss import RouterLoss

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "num_experts"), [(32, 6), (7, 6), (8, 256)])
def test_what_is_packed_comes_out_with_its_bits(dtype: torch.dtype, width: int, num_experts: int) -> None:
    loss = RouterLoss(num_experts, 2, 0.1, frozenset({0}))
    routers = PipelinedRouterLoss(loss, CPU)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, width, generator=generator).to(dtype)
    router_sums = torch.randn(2, num_experts, generator=generator) * 1e30

    message = routers.pack(hidden, routers.context(torch.ones(3, 5), router_sums))

    assert message.shape == sent_shape((3, 5, width), dtype, loss)
    assert (message.dtype, message.is_contiguous()) == (dtype, True)
    found, own = routers.unpack(message, (3, 5))
    assert torch.equal(found, hidden)
    assert found.is_contiguous()
    assert torch.equal(own, router_sums)


def test_the_numbers_take_as_few_rows_as_hold_them() -> None:
    for shape, num_experts, expected in (((1, 5, 2048), 128, 6), ((2, 5, 32), 8, 11), ((2, 5, 32), 9, 12)):
        loss = RouterLoss(num_experts, 2, 0.1, frozenset({0}))
        assert sent_shape(shape, torch.bfloat16, loss) == (expected, shape[-1])


def test_tokens_count_up_to_the_padding_of_their_row() -> None:
    routers = PipelinedRouterLoss(RouterLoss(4, 2, 0.1, frozenset({0})), CPU)
    assert routers.token_mask((2, 3), torch.tensor([2, 0])).tolist() == [[1, 1, 0], [0, 0, 0]]
    assert routers.token_mask((1, 2)).tolist() == [[1, 1]]
