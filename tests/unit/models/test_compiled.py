"""Compiled layers compute what eager ones do, share one graph, and step aside when they cannot be compiled."""

from functools import partial
from typing import Any

import pytest
import torch
from harness.block_case import BlockCase, assert_near, layer_case
from harness.pipelines import make_model
from torch import nn
from torch._dynamo.utils import counters

from mobius.models.block_autograd import Block
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.models.compiled import CompiledModule

CPU = torch.device("cpu")


COMPILERS = ["none", pytest.param("inductor", marks=pytest.mark.extended)]
"""With none graphs run as they were traced. The compiler takes twenty seconds for the graphs of a layer; in a usual run
it compiles those of a smaller module, below, and of the loss, in test_loss.py."""


@pytest.mark.parametrize("compiler", COMPILERS)
def test_one_graph_per_grad_mode_serves_all_layers_and_gives_eager_gradients(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler == "none":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    model = make_model("llama")
    values = dict(model.named_parameters())
    eager, compiled = ModelParts(model.config, CPU), ModelParts(model.config, CPU, compiled=True)
    arguments = LayerArgumentsBuilder(eager, device=CPU, dtype=torch.float32)(12)
    hidden = torch.randn(2, 12, model.config.hidden_size)
    for index in range(4):
        results = []
        for parts in (eager, compiled):
            layer = parts.layers[index]
            weights = {name: values[layer.prefix + name].detach().requires_grad_() for name in layer.shapes}
            with torch.no_grad():
                forward = layer(weights, hidden, **arguments[index])
            output = layer(weights, hidden, **arguments[index])
            gradients = torch.autograd.grad(output, list(weights.values()), torch.ones_like(output))
            results.append([forward, output, *gradients])
        for expected, actual in zip(*results, strict=True):
            assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max()))
    assert counters["stats"]["unique_graphs"] == 2  # with and without gradients, not one per layer


@pytest.mark.parametrize("compiler", COMPILERS)
def test_graphs_of_forward_and_backward_serve_all_layers_and_give_autograds_gradients(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_graph, graphs = torch._inductor.compile, list[torch.fx.GraphModule]()

    def count(graph: torch.fx.GraphModule, inputs: Any) -> object:
        graphs.append(graph)
        return graph if compiler == "none" else compile_graph(graph, inputs)

    monkeypatch.setattr(torch._inductor, "compile", count)
    model = make_model("llama")
    parts = ModelParts(model.config, CPU, compiled=True)
    for case in (layer_case(parts, index) for index in range(3)):
        assert_near(case.kept(), case.by_autograd(), share=1e-4)
        assert_near([case.forward()], case.by_autograd()[:1], share=1e-4)
    assert len(graphs) == 2 + 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(inputs) * self.weight


def test_what_the_compiler_makes_of_graphs_gives_autograds_gradients() -> None:
    module = Scaled()
    block = Block("layer.", module, {"weight": (8,)}, graphs=CompiledModule(module, name="layers"))
    case = BlockCase(block, {"layer.weight": torch.rand(8)}, torch.randn(2, 8), {}, torch.randn(2, 8))
    assert_near(case.kept(), case.by_autograd(), share=1e-5)
    assert not block.graphs._is_broken


def test_a_layer_that_cannot_be_compiled_runs_eagerly_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()

    def broken(graph: object, inputs: object, **options: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    model = make_model("llama")
    values = dict(model.named_parameters())
    eager, compiled = ModelParts(model.config, CPU), ModelParts(model.config, CPU, compiled=True)
    arguments = LayerArgumentsBuilder(eager, device=CPU, dtype=torch.float32)(12)
    hidden = torch.randn(1, 12, model.config.hidden_size)
    outputs = []
    for parts in (eager, compiled):
        layer = parts.layers[0]
        weights = {name: values[layer.prefix + name] for name in layer.shapes}
        with torch.no_grad():
            outputs.append(layer(weights, hidden, **arguments[0]))
    assert torch.equal(*outputs)
    assert "layers run uncompiled" in caplog.text
    assert "no compiler here" in caplog.text
