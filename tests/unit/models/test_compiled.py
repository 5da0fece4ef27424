"""Compiled layers compute what eager ones do, share one graph, and step aside when they cannot be compiled."""

import pytest
import torch
from harness.pipelines import make_model
from torch._dynamo.utils import counters

from mobius.models.blocks import LayerInputs, ModelParts

CPU = torch.device("cpu")


def test_one_graph_per_grad_mode_serves_all_layers_and_gives_eager_gradients() -> None:
    torch._dynamo.reset()
    counters.clear()
    model = make_model("llama")
    values = dict(model.named_parameters())
    eager, compiled = ModelParts(model.config, CPU), ModelParts(model.config, CPU, compiled=True)
    arguments = LayerInputs(eager, device=CPU, dtype=torch.float32)(12)
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
    arguments = LayerInputs(eager, device=CPU, dtype=torch.float32)(12)
    hidden = torch.randn(1, 12, model.config.hidden_size)
    outputs = []
    for parts in (eager, compiled):
        layer = parts.layers[0]
        weights = {name: values[layer.prefix + name] for name in layer.shapes}
        with torch.no_grad():
            outputs.append(layer(weights, hidden, **arguments[0]))
    assert torch.equal(*outputs)
    assert "layers run without compilation" in caplog.text
    assert "no compiler here" in caplog.text
