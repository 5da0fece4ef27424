"""Forward and backward as graphs give autograd's gradients, and step aside where they cannot."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness.block_case import GRAPHS_OF_FAMILIES, BlockCase, assert_equal, assert_near, layer_case, parts_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from mobius.models.block_autograd import (
    Block,
    backward,
    recomputed_backward,
    run_many_without_graph,
    run_with_graph,
)
from mobius.models.compiled import CompiledModule, KeywordArguments


def with_graphs(case: BlockCase) -> BlockCase:
    return replace(case, block=replace(case.block, graphs=CompiledModule(case.block.module, name="layers")))


@pytest.mark.parametrize("family", GRAPHS_OF_FAMILIES)
def test_graphs_of_a_layer_give_its_output_and_autograds_gradients(
    uncompiled: list[torch.fx.GraphModule], family: str
) -> None:
    case = with_graphs(layer_case(parts_of(family)))
    expected = case.by_autograd()

    output = case.forward()
    assert len(uncompiled) == 1
    assert torch.equal(output, expected[0])
    assert not output.requires_grad

    recomputed = case.recomputed()
    assert len(uncompiled) == 1 + 2
    # Seven linears forward, less the last one unless a norm needs its output, and their inputs' gradients; weights'
    # gradients are factors.
    assert [num_products(graph) for graph in uncompiled[1:]] == [7 - ("gemma3" not in family), 7]

    kept = case.kept()
    assert len(uncompiled) == 1 + 2 + 2
    assert_equal(recomputed, kept[1:])
    # Larger operations are cut into small ones first, which round otherwise.
    assert_near(kept, expected, share=1e-5)


def num_products(graph: torch.fx.GraphModule) -> int:
    aten = torch.ops.aten
    return sum(node.target in (aten.mm.default, aten.addmm.default, aten.bmm.default) for node in graph.graph.nodes)


def test_what_is_kept_is_held_by_nothing_but_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    held: set[int] = set()
    freed: list[bool] = []

    def consume(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Sequence[Tensor | None]]:
        def call(*given: Any) -> Sequence[Tensor | None]:
            results: Sequence[Tensor | None] = graph(*given)
            if held:  # then this is the backward
                (tensors,) = given
                # Inputs of linears leave it as gradients of their placeholders.
                goes_on = {address(result) for result in results if result is not None}
                own = [tensor for tensor in tensors if address(tensor) not in held | goes_on]
                references = [weakref.ref(tensor) for tensor in own]
                own.clear()
                tensors.clear()
                freed.extend(reference() is None for reference in references)
            return results

        return call

    monkeypatch.setattr(torch._inductor, "compile", consume)
    case = with_graphs(layer_case(parts_of("llama")))
    graph = run_with_graph(case.block, case.weights, case.hidden, case.arguments)
    shared = [*case.weights.values(), case.hidden, case.gradient, *tree_leaves(dict(case.arguments))]
    held.update(address(value) for value in shared if isinstance(value, Tensor))

    backward(case.block, graph, case.sums(), case.gradient)

    # The states, two norms' factors, queries, keys, values, what attention keeps, states, gate and up.
    assert len(freed) >= 9
    assert all(freed)


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Shifted(nn.Module):
    """Has a buffer."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.rand(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs + self.offset).square() * self.weight


def shifted() -> BlockCase:
    """Such a module with something to run it on."""
    block = Block("layer.", Shifted(), {"weight": (4,)})
    return BlockCase(block, {"layer.weight": torch.rand(4)}, torch.rand(2, 3, 4), {}, torch.rand(2, 3, 4))


def test_every_shape_has_a_graph_and_what_is_seen_again_has_none(uncompiled: list[torch.fx.GraphModule]) -> None:
    case = with_graphs(shifted())
    for batch in (2, 1, 2, 1):
        part = replace(case, hidden=case.hidden[:batch], gradient=case.gradient[:batch])
        assert_near(part.recomputed(), part.by_autograd()[1:], share=1e-5)
        assert_near(part.kept(), part.by_autograd(), share=1e-5)
        assert torch.equal(part.forward(), part.by_autograd()[0])
    assert len(uncompiled) == 2 * 4, "recomputing, nothing is saved but the inputs"


def test_a_gradient_that_is_not_contiguous_gives_the_same(uncompiled: list[torch.fx.GraphModule]) -> None:
    case = with_graphs(shifted())
    turned = replace(case, gradient=case.gradient.transpose(0, 1).contiguous().transpose(0, 1))
    for each in (case, turned):
        assert_near(each.recomputed(), case.by_autograd()[1:], share=1e-5)
    assert len(uncompiled) == 1
    assert_near(turned.kept(), case.by_autograd(), share=1e-5)


def test_arguments_are_told_apart_by_what_they_are(uncompiled: list[torch.fx.GraphModule]) -> None:
    case = with_graphs(layer_case(parts_of("llama")))
    outputs = []
    for factor in (1.0, 0.5, 0.25, 1.0):
        arguments = KeywordArguments(tree_map_only(Tensor, partial(torch.mul, factor), dict(case.arguments)))
        part = replace(case, arguments=arguments)
        outputs.append(part.forward())
        assert torch.equal(outputs[-1], part.by_autograd()[0])
    assert torch.equal(outputs[0], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])
    assert len(uncompiled) == 1, "they are of one kind"


def test_nothing_holds_arguments_behind_their_calls(uncompiled: list[torch.fx.GraphModule]) -> None:
    case = with_graphs(layer_case(parts_of("llama")))
    arguments = KeywordArguments(tree_map_only(Tensor, torch.clone, dict(case.arguments)))
    rotary = weakref.ref(arguments["position_embeddings"][0])
    assert replace(case, arguments=arguments).forward() is not None
    del arguments
    assert rotary() is None


class Doubling(nn.Module):
    """Has no weights, as some families' norms."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * 2


def test_a_module_may_be_without_weights(uncompiled: list[torch.fx.GraphModule]) -> None:
    case = with_graphs(BlockCase(Block("norm.", Doubling(), {}), {}, torch.rand(2, 4), {}, torch.rand(2, 4)))

    assert_equal(case.kept(), case.by_autograd())
    assert_equal([case.forward(), *case.recomputed()], case.by_autograd())

    assert len(uncompiled) == 2 + 1 + 1, "nothing is saved"


class Mixing(nn.Module):
    """Takes two tensors and gives two of other shapes, the second of which backward needs nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return (one * other * self.weight).sum(-1), other.transpose(0, 1) + 1


@pytest.mark.parametrize("way", ["kept", "recomputed"])
def test_a_module_may_have_several_inputs_and_outputs(uncompiled: list[torch.fx.GraphModule], way: str) -> None:
    block = Block("layer.", Mixing(), {"weight": (4,)})
    block = replace(block, graphs=CompiledModule(block.module, name="layers"))
    weights, sums = {"layer.weight": torch.rand(4)}, {"layer.weight": torch.ones(4)}
    one, other, of_sum, of_turned = torch.rand(2, 3, 4), torch.rand(2, 3, 4), torch.rand(2, 3), torch.rand(3, 2, 4)

    outputs = run_many_without_graph(block, weights, (one, other), {})
    if way == "kept":
        graph = run_with_graph(block, weights, (one, other), {})
        assert_equal(graph.outputs, outputs)
        results = backward(block, graph, sums, of_sum, of_turned)
    else:
        results = recomputed_backward(block, weights, (one, other), {}, sums, of_sum, of_turned)

    products, of_product = one * other, of_sum.unsqueeze(-1) * weights["layer.weight"]
    assert_near(outputs, [(products * weights["layer.weight"]).sum(-1), other.transpose(0, 1) + 1], share=1e-6)
    assert_near(results, [of_product * other, of_product * one + of_turned.transpose(0, 1)], share=1e-6)
    assert_near([sums["layer.weight"]], [1 + (of_sum.unsqueeze(-1) * products).sum((0, 1))], share=1e-6)
    assert len(uncompiled) == (3 if way == "kept" else 2)


@pytest.mark.parametrize("way", ["forward", "kept", "recomputed"])
def test_a_graph_from_a_call_with_one_tensor_in_all_places_serves_other_calls(
    uncompiled: list[torch.fx.GraphModule], way: str
) -> None:
    """The planner measures layers with one tensor as input and as gradient of the output."""

    def results(block: Block, one: Tensor, other: Tensor, of_turned: Tensor) -> Sequence[Tensor]:
        sums, gradients = {"layer.weight": torch.zeros(4)}, (torch.ones(4, 4), of_turned)
        if way == "forward":
            return run_many_without_graph(block, weights, (one, other), {})
        if way == "kept":
            graph = run_with_graph(block, weights, (one, other), {})
            return *backward(block, graph, sums, *gradients), *sums.values()
        return *recomputed_backward(block, weights, (one, other), {}, sums, *gradients), *sums.values()

    eager, weights = Block("layer.", Mixing(), {"weight": (4,)}), {"layer.weight": torch.rand(4)}
    block = replace(eager, graphs=CompiledModule(eager.module, name="layers"))
    same, *others = (torch.rand(4, 4, 4) for _ in range(4))
    results(block, same, same, same)
    num_graphs = len(uncompiled)
    one, other, of_turned = others
    assert_near(results(block, one, other, of_turned), results(eager, one, other, of_turned), share=1e-6)
    assert len(uncompiled) == num_graphs > 0


class Choosing(nn.Module):
    """Its operations depend on the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight if inputs.sum().item() > 0 else inputs - self.weight


def fail_to_compile(monkeypatch: pytest.MonkeyPatch) -> BlockCase:
    def broken(graph: object, inputs: object, **options: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    return layer_case(parts_of("llama"))


def choose_by_numbers(monkeypatch: pytest.MonkeyPatch) -> BlockCase:
    block = Block("layer.", Choosing(), {"weight": (4,)})
    return BlockCase(block, {"layer.weight": torch.rand(4)}, -torch.rand(2, 4), {}, torch.rand(2, 4))


@pytest.mark.parametrize("make", [fail_to_compile, choose_by_numbers])
def test_what_has_no_graph_is_left_to_autograd_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make: Callable[[pytest.MonkeyPatch], BlockCase]
) -> None:
    case = with_graphs(make(monkeypatch))

    for _ in range(2):
        assert_equal(case.recomputed(), case.by_autograd()[1:])
        assert_equal(case.kept(), case.by_autograd())
        assert_equal([case.forward()], case.by_autograd()[:1])

    lines = [record.getMessage() for record in caplog.records if record.name == CompiledModule.__module__]
    assert len(lines) == 1
    assert lines[0].startswith("layers run without compiled graphs, which is slower: ")
