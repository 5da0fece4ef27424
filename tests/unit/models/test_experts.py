"""Fused experts by themselves: which are run, and that they give what transformers' own implementations give."""

from __future__ import annotations

import pytest
import torch
from harness.pipelines import model_of
from harness.tiny_families import tiny_config
from torch import Tensor, nn

from mobius.models.experts.forward import use_experts
from mobius.models.experts.fused import fused_experts, why_not_run

TOKENS, CHOSEN = 24, 3


def experts_of(family: str) -> nn.Module:
    """Fused experts of the last layer of a tiny model."""
    return list(fused_experts(model_of(tiny_config(family))).values())[-1]


def random_inputs(experts: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of tokens, their experts, one of which nobody takes, and shares."""
    torch.manual_seed(0)
    chosen = torch.stack([torch.randperm(experts.num_experts - 1)[:CHOSEN] for _ in range(TOKENS)])
    return torch.randn(TOKENS, 32, requires_grad=True), chosen, torch.rand(TOKENS, CHOSEN, requires_grad=True)


def results_of(experts: nn.Module, hidden: Tensor, chosen: Tensor, shares: Tensor) -> list[Tensor]:
    """Output, and gradients of hidden states, shares and parameters."""
    output = experts(hidden, chosen, shares)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output, *torch.autograd.grad(output, [hidden, shares, *experts.parameters()], gradient)]


@pytest.mark.parametrize("family", ["qwen3_moe", "aria_text"])
def test_outputs_and_gradients_are_those_of_transformers(family: str) -> None:
    experts = experts_of(family)
    inputs = random_inputs(experts)
    expected = {}
    for implementation in ("grouped_mm", "eager"):
        experts.config._experts_implementation = implementation
        expected[implementation] = results_of(experts, *inputs)

    use_experts(experts)
    actual = results_of(experts, *inputs)

    assert all(map(torch.equal, actual, expected["grouped_mm"]))
    for own, eager in zip(actual, expected["eager"], strict=True):
        torch.testing.assert_close(own, eager, rtol=1e-6, atol=1e-6 * float(eager.detach().abs().max()))


def test_transposed_matrices_are_known() -> None:
    assert experts_of("aria_text").is_transposed
    assert not experts_of("qwen3_moe").is_transposed


def test_experts_with_biases_are_refused() -> None:
    config = tiny_config("gpt_oss")
    config._attn_implementation = "eager"
    reason = why_not_run(model_of(config))
    assert reason == "has experts with biases, which are not run here (model.layers.0.mlp.experts)"


def test_experts_that_are_linears_are_refused() -> None:
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    reason = why_not_run(model)
    assert reason == "has experts that are not held in one tensor per matrix (such as mlp.experts.0.bias)"


def test_a_dense_model_has_no_experts() -> None:
    model = model_of(tiny_config("llama"))
    assert why_not_run(model) is None
    assert fused_experts(model) == {}
