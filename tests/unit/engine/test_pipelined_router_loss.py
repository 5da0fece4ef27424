"""Messages that carry numbers of routers behind hidden states."""

from __future__ import annotations

import pytest
import torch

from mobius.engine.pipelined_router_loss import router_messages
from mobius.engine.step_inputs import StepBatch, StepInputs
from mobius.hardware.streams import new_stream
from mobius.models.compiled import KeywordArguments
from mobius.models.router_loss import TOKEN_MASK, RouterLoss
from mobius.schedule.spec import ScheduleSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "num_experts"), [(32, 6), (7, 6), (8, 256)])
def test_what_is_packed_comes_out_with_its_bits(dtype: torch.dtype, width: int, num_experts: int) -> None:
    loss = RouterLoss(num_experts, 2, 0.1, frozenset({0}))
    routers = router_messages(loss)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, width, generator=generator).to(dtype)
    router_sums = torch.randn(2, num_experts, generator=generator) * 1e30

    message = routers.pack(hidden, router_sums)

    assert message.shape == routers.sent_shape((3, 5, width), dtype)
    assert (message.dtype, message.is_contiguous()) == (dtype, True)
    found, own = routers.unpack(message, (3, 5))
    assert torch.equal(found, hidden)
    assert found.is_contiguous()
    assert torch.equal(own, router_sums)


def test_the_numbers_take_as_few_rows_as_hold_them() -> None:
    for shape, num_experts, expected in (((1, 5, 2048), 128, 6), ((2, 5, 32), 8, 11), ((2, 5, 32), 9, 12)):
        loss = RouterLoss(num_experts, 2, 0.1, frozenset({0}))
        assert router_messages(loss).sent_shape(shape, torch.bfloat16) == (expected, shape[-1])


def test_tokens_count_up_to_the_padding_of_their_row() -> None:
    routers, own = router_messages(RouterLoss(4, 2, 0.1, frozenset({0}))), KeywordArguments()

    def masks(**lengths: torch.Tensor) -> list[list[list[float]]]:
        ids = torch.zeros(2, 3, dtype=torch.int64)
        batch, spec = StepBatch(ids, ids, 1, 1, 2, **lengths), ScheduleSpec(1, 1, 2, (1,))
        inputs = StepInputs(batch, spec, lambda *_: [own], routers, device=CPU, to_device=new_stream(CPU))
        return [inputs.context(microbatch).routers.arguments(0, own)[TOKEN_MASK].tolist() for microbatch in range(2)]

    assert masks(lengths=torch.tensor([2, 0])) == [[[1, 1, 0]], [[0, 0, 0]]]
    assert masks() == [[[1, 1, 1]], [[1, 1, 1]]]


def test_a_model_without_router_loss_sends_hidden_states_as_they_are() -> None:
    """Nothing is copied, nothing added: the null form has no branch in the executor."""
    routers, hidden, loss = router_messages(None), torch.randn(2, 5, 8), torch.ones(())
    context = routers.context(0, None)
    own = KeywordArguments(a=1)
    assert (context.router_sums, context.arguments(0, own), context.gradients(0)) == (None, own, ())
    assert routers.pack(hidden, None) is hidden
    assert routers.unpack(hidden, (2, 5)) == (hidden, None)
    assert routers.add_loss(loss, context, 2.0) is loss
    assert (routers.sent_shape(hidden.shape, hidden.dtype), routers.total) == ((2, 5, 8), None)
