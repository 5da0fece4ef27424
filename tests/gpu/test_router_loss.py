"""On a GPU: the loss over routers and every gradient compared with transformers on the CPU, and nothing that waits."""

from __future__ import annotations

import pytest
import torch
from harness.pipelines import Pipeline, make_batch, model_of, plain_step
from harness.tiny_families import tiny_config

from mobius.engine.pipelined_router_loss import router_messages
from mobius.models.compiled import KeywordArguments
from mobius.models.router_loss import TOKEN_MASK, RouterLoss, router_sums

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
COEFFICIENT = 0.5


@pytest.mark.parametrize("compiled", [False, True])
def test_loss_and_gradients_are_near_those_of_the_plain_model(compiled: bool) -> None:
    config = tiny_config("mixtral", output_router_logits=True, router_aux_loss_coef=COEFFICIENT)
    model, batch = model_of(config), make_batch(2)
    model.router_aux_loss_coef = COEFFICIENT / 2
    loss, expected = plain_step(model, batch, 2)

    pipeline = Pipeline(model, 1, 2, 2, 1, device=GPU, compiled=compiled)

    own = float(pipeline.run(batch))
    off = torch.stack([(pipeline.gradients[name].cpu() - value).norm() for name, value in expected.items()]).norm()
    share = float(off / torch.stack([value.norm() for value in expected.values()]).norm())
    report = f"loss {own:.7f}, plain {float(loss):.7f}, gradients {share:.1e} apart"
    print(report)  # shown by `-rP`
    assert own == pytest.approx(float(loss), rel=1e-5), report
    assert share < 1e-4, report


def test_no_part_of_it_waits_for_the_gpu() -> None:
    loss = RouterLoss(8, 2, COEFFICIENT, frozenset({0}))
    routers, hidden = router_messages(loss), torch.randn(2, 5, 32, device=GPU, dtype=torch.bfloat16)
    logits, own = torch.randn(10, 8, device=GPU, dtype=torch.bfloat16), torch.zeros((), device=GPU)
    for mode in ("default", "error"):  # the first round loads kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            routers.begin_step(2, lambda: [torch.ones(2, 5, device=GPU)])
            context = routers.context(0, None)
            context.add(router_sums(logits, context.arguments(0, KeywordArguments())[TOKEN_MASK], 2))
            routers.unpack(routers.pack(hidden, context.router_sums), (2, 5))
            routers.add_loss(own, context, 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
