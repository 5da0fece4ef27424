"""The loss over routers by itself: its number, what its gradient is multiplied by, and who has none."""

from __future__ import annotations

import pytest
import torch
from harness.tiny_families import tiny_config
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from mobius.errors import CheckpointError
from mobius.models.blocks import ModelParts
from mobius.models.router_loss import RouterLoss, router_sums

CPU = torch.device("cpu")
LAYERS, TOKENS, EXPERTS, CHOSEN = 3, 10, 6, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_layers_make_the_loss_of_transformers(dtype: torch.dtype) -> None:
    logits = torch.randn(LAYERS, TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0)).to(dtype)
    token_mask = torch.tensor([[1.0] * 4 + [0.0], [1.0] * 5])
    total = sum(router_sums(own, token_mask, CHOSEN) for own in logits)
    assert isinstance(total, torch.Tensor)
    loss = RouterLoss(EXPERTS, CHOSEN, 0.1, frozenset(range(LAYERS)))

    value = loss(total, token_mask.sum(), num_microbatches=4, loss_scale=1.0)

    assert torch.equal(value.loss, load_balancing_loss_func(tuple(logits), EXPERTS, CHOSEN, token_mask))
    assert torch.equal(value.weighted, 0.1 / 4 * value.loss)
    assert torch.equal(value.gradient[0], torch.zeros(EXPERTS)), "times chosen are whole numbers"
    expected = 0.1 / 4 * EXPERTS * total[0] / (LAYERS * 9) ** 2
    torch.testing.assert_close(value.gradient[1], expected, rtol=1e-6, atol=0)
    scaled = loss(total, token_mask.sum(), num_microbatches=4, loss_scale=1024.0)
    assert torch.equal(scaled.gradient, 1024 * value.gradient)
    assert torch.equal(scaled.weighted, value.weighted)


@pytest.mark.parametrize("family", ["afmoe", "aria_text"])
def test_a_family_without_this_loss_is_refused_by_name(family: str) -> None:
    config = tiny_config(family)
    config.output_router_logits = True
    with pytest.raises(CheckpointError, match=rf"'{family}' transformers has no such loss. Set it to false there"):
        ModelParts(config, CPU)


def test_without_the_option_layers_know_nothing_of_it() -> None:
    parts = ModelParts(tiny_config("mixtral"), CPU)
    assert parts.router_loss is None
    assert parts.shape().is_sliceable
    with_it = ModelParts(tiny_config("mixtral", output_router_logits=True), CPU)
    assert with_it.router_loss == RouterLoss(6, 3, 0.001, frozenset(range(4)))
    assert not with_it.shape().is_sliceable
    assert "forward" not in vars(parts.layers[0].module)
    assert "forward" in vars(with_it.layers[0].module)
