"""A layer cut at its attention computes what it does whole, forward and backward, in every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.block_case import (
    CUT_FAMILIES,
    CUT_FAMILIES_PACKED,
    BlockCase,
    assert_near,
    config_of,
    layer_cases,
    parts_of,
)
from harness.grids import named
from harness.pipelines import CPU
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig

from mobius.errors import CheckpointError
from mobius.models.attention_split import Heads, SplitBlocks, split_layer
from mobius.models.block_autograd import Block
from mobius.models.blocks import ModelParts
from mobius.models.linear import GradientFactorLinear, LinearGradientFactors

SHAPE = 2, 11
ROWS = [[4, 1, 3], [7]]
"""Documents of each row, with padding behind them."""


def in_halves(case: BlockCase, halves: SplitBlocks) -> list[Tensor]:
    """Output, gradient of the input and sums of the parameters' gradients, as `BlockCase.kept` gives them."""
    weights, hidden, arguments, sums = case.weights, case.hidden, case.arguments, case.sums()
    heads = halves.run_pre_attention(weights, hidden, arguments)
    leaves = [each.detach().requires_grad_() for each in heads]
    own = {name: each.detach().requires_grad_() for name, each in halves.attention_parameters(weights).items()}
    of_leaves = halves.attention(*leaves, arguments, own)
    attended = of_leaves.detach()
    (output,) = halves.run_post_attention(weights, hidden, attended, arguments)
    of_hidden, of_attended = halves.post_attention_backward(weights, sums, hidden, attended, case.gradient, arguments)
    of_heads = torch.autograd.grad(of_leaves, [*leaves, *own.values()], of_attended)
    for total, gradient in zip(halves.attention_parameters(sums).values(), of_heads[3:], strict=True):
        total += gradient
    of_hidden = of_hidden + halves.pre_attention_backward(weights, sums, hidden, Heads(*of_heads[:3]), arguments)
    return [output, of_hidden, *sums.values()]


@pytest.mark.parametrize("family", CUT_FAMILIES)
def test_halves_give_the_bits_of_the_output_and_the_gradients_of_the_whole_layer(family: str) -> None:
    for case, halves in layer_cases(parts_of(family), shape=SHAPE):
        expected, actual = case.by_autograd(), in_halves(case, halves)

        assert torch.equal(actual[0], expected[0])
        # The gradients of queries, keys, values and residuals are added in another order.
        assert_near(actual, expected, share=1e-6)


@pytest.mark.parametrize("family", CUT_FAMILIES_PACKED)
def test_halves_keep_documents_apart_as_the_whole_layer_does(family: str) -> None:
    for case, halves in layer_cases(parts_of(family, torch.float32), shape=SHAPE, rows=ROWS):
        expected, actual = case.by_autograd(), in_halves(case, halves)

        assert torch.equal(actual[0], expected[0])
        assert_near(actual, expected, share=1e-6)


@pytest.mark.parametrize("compiler", ["none", pytest.param("inductor", marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    "family", named({each: each for each in ("llama", "qwen3", "cohere2")}, on_demand=["llama", "qwen3"])
)
def test_compiled_halves_give_the_gradients_of_the_whole_layer(
    family: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama's are traced in test_tiles.py."""
    if compiler == "none":  # graphs run as they were traced
        monkeypatch.setattr(torch._inductor, "compile", lambda graph, _: graph)
    config = config_of(family)
    config.num_hidden_layers = 1
    for case, halves in layer_cases(ModelParts(config, CPU, compiled=True), shape=SHAPE):
        assert_near(in_halves(case, halves), case.by_autograd(), share=1e-5)


def test_a_linear_that_only_attention_reads_is_computed_once() -> None:
    ((case, halves),) = layer_cases(parts_of("phi3"), shape=SHAPE)
    heads = halves.run_pre_attention(case.weights, case.hidden, case.arguments)
    attended = halves.attention(*heads, case.arguments)
    broken = case.weights | {
        name: torch.full_like(value, torch.nan) for name, value in case.weights.items() if "qkv" in name
    }

    (output,) = halves.run_post_attention(broken, case.hidden, attended, case.arguments)

    assert torch.equal(output, case.forward())


def test_project_stops_at_attention() -> None:
    ((case, halves),) = layer_cases(parts_of("llama"), shape=SHAPE)
    behind = ("o_proj", "mlp", "post_attention")
    broken = {
        name: torch.full_like(value, torch.nan) if any(part in name for part in behind) else value
        for name, value in case.weights.items()
    }

    heads = halves.run_pre_attention(broken, case.hidden, case.arguments)

    assert [each.shape for each in heads] == [(2, 4, 11, 8), (2, 2, 11, 8), (2, 2, 11, 8)]
    assert all(
        torch.equal(*pair)
        for pair in zip(heads, halves.run_pre_attention(case.weights, case.hidden, case.arguments), strict=True)
    )


def test_cutting_leaves_the_layer_and_its_configuration_as_they_were() -> None:
    parts = ModelParts(config_of("llama"), CPU)
    ((case, _),) = layer_cases(parts, shape=SHAPE)
    before = case.forward()

    parts.split_at_attention(0)

    assert torch.equal(case.forward(), before)
    assert parts.model.config._attn_implementation == "sdpa"


def test_layers_of_one_kind_share_the_code_of_their_halves() -> None:
    parts = parts_of("qwen3")

    assert parts.split_at_attention(0).post_attention.module is parts.split_at_attention(1).post_attention.module
    assert parts.split_at_attention(0).post_attention.prefix == "model.layers.0."
    assert parts.split_at_attention(1).post_attention.prefix == "model.layers.1."
    assert (
        parts.split_at_attention(0).post_attention.module is not parts.split_at_attention(11).post_attention.module
    ), "its attention looks farther back"


class Layer(nn.Module):
    """A layer that calls attention as often as it is told."""

    def __init__(self, calls: int, **settings: Tensor) -> None:
        super().__init__()
        self.config, self._calls, self._settings = LlamaConfig(), calls, settings
        self.config._attn_implementation = "sdpa"
        with torch.device("meta"):
            self.linear = GradientFactorLinear(8, 8)

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        attend: Callable[..., Any] = AttentionInterface().get_interface(self.config._attn_implementation, None)
        for _ in range(self._calls):
            heads = self.linear(hidden).unsqueeze(1)
            hidden = hidden + attend(self, heads, heads, heads, None, **self._settings)[0].flatten(2)
        return hidden


def split(layer: Layer) -> SplitBlocks:
    block = replace(Block.of("", layer), gradient_factors=(LinearGradientFactors("linear"),))
    return split_layer(block, torch.empty(1, 5, 8, device="meta"), {}, family="strange", compiled=False)


@pytest.mark.parametrize(
    ("layer", "fault"),
    [
        (Layer(0), "do not call attention through transformers' interface"),
        (Layer(2), "call attention 2 times"),
        (Layer(1, sinks=torch.ones(3)), r"pass attention tensors that they compute \(sinks\)"),
    ],
)
def test_a_layer_that_cannot_be_cut_names_its_family_and_why(layer: Layer, fault: str) -> None:
    with pytest.raises(CheckpointError, match=f"layers of the family 'strange' {fault}, so they cannot be split"):
        split(layer)


def test_a_layer_that_calls_attention_once_is_cut() -> None:
    cut = split(Layer(1))

    assert cut.pre_attention.gradient_factors == (LinearGradientFactors("linear"),)
    assert cut.post_attention.gradient_factors == ()


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_attention_of_a_familys_own_is_kept(family: str) -> None:
    for case, halves in layer_cases(ModelParts(config_of(family), CPU), shape=SHAPE):
        expected, actual = case.by_autograd(), in_halves(case, halves)

        assert torch.equal(actual[0], expected[0])
        assert_near(actual, expected, share=1e-6)


def test_attention_that_nobody_has_is_refused() -> None:
    layer = Layer(1)
    layer.config._attn_implementation = "eager"
    with pytest.raises(CheckpointError, match="layers of the family 'strange' call attention of the kind 'eager'"):
        split(layer)
