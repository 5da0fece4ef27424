"""A stage keeps one input per layer; gradients reach the parameter they belong to."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.pipelines import CPU, make_model
from harness.schedules import even_cuts
from torch import Tensor, nn

from mobius.engine.stage import StageModule
from mobius.engine.stage_layers import MicrobatchContext
from mobius.models.block_autograd import Block
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.schedule.partition import StageCut

NO_CONTEXT = MicrobatchContext(({},) * 3)


class Gated(nn.Module):
    """A layer whose middle parameters take no part: y = x * scale + shift."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(32, device="meta"))
        self.unused = nn.Parameter(torch.empty(5, 3, device="meta"))
        self.unused_too = nn.Parameter(torch.empty(32, device="meta"))
        self.shift = nn.Parameter(torch.empty(32, device="meta"))

    def forward(self, hidden: Tensor, **_: object) -> Tensor:
        return hidden * self.scale + self.shift


def gated_stage(num_layers: int, layer: Gated | None = None, *, keep_graphs: bool = False) -> StageModule:
    parts = copy.copy(ModelParts(make_model("llama").config, CPU))
    module = layer or Gated()
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    parts.layers = tuple(Block(f"model.layers.{index}.", module, shapes) for index in range(num_layers))
    cut = StageCut(1, 0, num_layers, False, False)
    return StageModule(parts, cut, loss_chunk_tokens=8, keep_graphs=keep_graphs)


def test_a_parameter_without_a_gradient_keeps_the_others_in_their_places() -> None:
    stage = gated_stage(num_layers=2)
    generator = torch.Generator().manual_seed(4)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in stage.shapes.items()}
    gradients = {name: torch.zeros(shape) for name, shape in stage.shapes.items()}
    inputs, incoming = (torch.randn(2, 6, 32, generator=generator) for _ in range(2))

    output, offloaded = stage.forward(weights, inputs, NO_CONTEXT)
    outgoing = stage.backward(weights, gradients, offloaded, incoming, NO_CONTEXT)

    scale = [weights[f"model.layers.{i}.scale"] for i in range(2)]
    middle = inputs * scale[0] + weights["model.layers.0.shift"]
    torch.testing.assert_close(output, middle * scale[1] + weights["model.layers.1.shift"])
    expected = {name: torch.zeros(shape) for name, shape in stage.shapes.items()}
    expected["model.layers.1.scale"] = (incoming * middle).sum((0, 1))
    expected["model.layers.1.shift"] = incoming.sum((0, 1))
    expected["model.layers.0.scale"] = (incoming * scale[1] * inputs).sum((0, 1))
    expected["model.layers.0.shift"] = (incoming * scale[1]).sum((0, 1))
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, msg=name)
    torch.testing.assert_close(outgoing, incoming * scale[1] * scale[0])


@pytest.mark.parametrize("keep_graphs", [False, True])
def test_a_frozen_parameter_has_no_sum_and_the_others_get_what_they_get_without_it(keep_graphs: bool) -> None:
    parts = ModelParts(make_model("llama").config, CPU)
    stage = StageModule(parts, StageCut(0, 0, 2, True, False), loss_chunk_tokens=8, keep_graphs=keep_graphs)
    context = MicrobatchContext(LayerArgumentsBuilder(parts, device=CPU, dtype=torch.float32)(6))
    generator = torch.Generator().manual_seed(4)
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in stage.shapes.items()}
    tokens = torch.randint(0, 96, (2, 6), generator=generator)
    incoming = torch.randn(2, 6, 32, generator=generator)
    frozen = {"model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"}
    results = []
    for skipped in (set[str](), frozen):
        sums = {name: torch.zeros(shape) for name, shape in stage.shapes.items() if name not in skipped}
        _, saved_for_backward = stage.forward(weights, tokens, context)
        gradient = stage.backward(weights, sums, saved_for_backward, incoming, context)
        stage.embedding_backward(weights, sums, tokens, gradient, context)
        results.append(sums)
    everything, trained = results
    assert everything.keys() - trained.keys() == frozen
    assert all(torch.equal(everything[name], value) for name, value in trained.items())


def test_forward_makes_no_graph_and_backward_empties_its_inputs() -> None:
    stage = gated_stage(num_layers=3)
    weights = {name: torch.ones(shape) for name, shape in stage.shapes.items()}
    gradients = {name: torch.zeros(shape) for name, shape in stage.shapes.items()}

    output, offloaded = stage.forward(weights, torch.ones(1, 4, 32), NO_CONTEXT)
    assert not output.requires_grad
    assert len(offloaded) == 3, "one input per layer"

    gradient = stage.backward(weights, gradients, offloaded, torch.ones(1, 4, 32), NO_CONTEXT)
    assert offloaded == []
    assert not gradient.requires_grad
    assert not any(weight.requires_grad or weight.grad is not None for weight in weights.values())


class Rounding(Gated):
    """A layer whose results depend on whether it saves activations, as those of compiled graphs do."""

    def forward(self, hidden: Tensor, **_: object) -> Tensor:
        return hidden * (2.0 if torch.is_grad_enabled() else 3.0)


@pytest.mark.parametrize(("keep_graphs", "factor"), [(False, 3.0), (True, 2.0)])
def test_a_pass_runs_each_layer_as_the_forward_of_a_step(keep_graphs: bool, factor: float) -> None:
    stage = gated_stage(num_layers=2, layer=Rounding(), keep_graphs=keep_graphs)
    weights = {name: torch.ones(shape) for name, shape in stage.shapes.items()}
    inputs = torch.ones(1, 4, 32)
    output = stage.run(weights, inputs, NO_CONTEXT)
    assert torch.equal(output, inputs * factor**2)
    assert torch.equal(output, stage.forward(weights, inputs, NO_CONTEXT)[0])


def test_gradients_add_up_over_microbatches() -> None:
    stage = gated_stage(num_layers=1)
    weights = {name: torch.ones(shape) for name, shape in stage.shapes.items()}
    gradients = {name: torch.zeros(shape) for name, shape in stage.shapes.items()}
    for _ in range(3):
        _, offloaded = stage.forward(weights, torch.ones(1, 4, 32), NO_CONTEXT)
        stage.backward(weights, gradients, offloaded, torch.ones(1, 4, 32), NO_CONTEXT)

    assert torch.equal(gradients["model.layers.0.shift"], torch.full((32,), 12.0))


def test_stages_hold_every_parameter_once_and_a_tied_matrix_at_both_ends() -> None:
    for family, num_shared in (("llama", 0), ("llama-tied", 1)):
        model = make_model(family)
        parts = ModelParts(model.config, CPU)
        stages = [StageModule(parts, span, loss_chunk_tokens=8) for span in even_cuts(len(parts.layers), 5)]

        names = [name for stage in stages for name in stage.shapes]

        assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
        assert next(iter(stages[0].shapes)) == "model.embed_tokens.weight"
        assert list(stages[-1].shapes)[-2:] == ["model.norm.weight", "lm_head.weight"]
        assert len(names) == len(list(model.named_parameters())) + num_shared
