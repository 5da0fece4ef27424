"""Runs one block with a graph, and takes that graph back into gradients that add up in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mobius.models.blocks import Block
from mobius.models.compiled import Gradients, KeptActivations
from mobius.models.linear import add_product, make_leaves, tap_names, weight_name

Views = Mapping[str, Tensor]


@dataclass(frozen=True)
class AutogradGraph:
    """A block's forward with autograd's graph, until `backward` consumes it."""

    inputs: Tensor
    leaves: Mapping[str, Tensor]
    """Name within the block -> a leaf of the graph: parameters, and taps where a product makes the gradient."""
    output: Tensor

    def backward(self, gradient: Tensor) -> tuple[Gradients, Tensor]:
        """Gradients of the leaves, and that of the inputs, or `gradient` where the inputs are token ids."""
        sources = [*self.leaves.values(), *([self.inputs] if self.inputs.requires_grad else [])]
        results = torch.autograd.grad(self.output, sources, gradient, allow_unused=True)
        found = dict(zip(self.leaves, results, strict=False))
        return found, results[-1] if self.inputs.requires_grad else gradient


BlockGraph = AutogradGraph | KeptActivations
"""A forward with all that `backward` needs of it, and its `output`."""


def _own_views(views: Views, block: Block) -> dict[str, Tensor]:
    return {name: views[block.prefix + name] for name in block.shapes}


def run(block: Block, weights: Views, inputs: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Run `block` without a graph; `weights` by Hugging Face name, `inputs` [..., H] or token ids."""
    own = _own_views(weights, block)
    graphs = block.graphs if inputs.is_floating_point() else None
    output = graphs.forward(own, inputs, arguments) if graphs is not None else None
    if output is not None:
        return output
    with torch.no_grad():
        return block(own, inputs, **arguments)


def run_with_graph(block: Block, weights: Views, inputs: Tensor, arguments: Mapping[str, Any]) -> BlockGraph:
    """Run `block` with a graph that ends in its parameters and, if they are [..., H] and not token ids, its inputs."""
    inputs = inputs.detach()
    own = _own_views(weights, block)
    if inputs.is_floating_point():
        kept = block.graphs.keep(own, block.tapped, inputs, arguments) if block.graphs is not None else None
        if kept is not None:
            return kept
        inputs.requires_grad_()
    fixed, leaves = make_leaves(own, block.tapped, num_tokens=inputs.shape[:-1].numel())
    with torch.enable_grad():
        return AutogradGraph(inputs, leaves, block({**fixed, **leaves}, inputs, **arguments))


def backward(block: Block, graph: BlockGraph, gradients: Views, gradient: Tensor) -> Tensor:
    """Add the gradients of `block`'s parameters to `gradients` (fp32, by Hugging Face name); return that of its inputs.

    `gradient` is that of the graph's output. Token ids have no gradient: then `gradient` is returned.
    """
    found, input_gradient = graph.backward(gradient)
    _add(block, found, gradients)
    return input_gradient


def recomputed_backward(
    block: Block, weights: Views, inputs: Tensor, arguments: Mapping[str, Any], gradients: Views, gradient: Tensor
) -> Tensor:
    """Do `backward` of `run_with_graph` for inputs that are numbers, in one graph if the block is compiled."""
    if block.graphs is not None:
        results = block.graphs.recompute(_own_views(weights, block), block.tapped, inputs, arguments, gradient)
        if results is not None:
            _add(block, results[0], gradients)
            return results[1]
    return backward(block, run_with_graph(block, weights, inputs, arguments), gradients, gradient)


def _add(block: Block, results: Gradients, gradients: Views) -> None:
    """Add the gradients found for the leaves of `block` to its sums; a frozen parameter has no sum."""
    found = {name: result for name, result in results.items() if result is not None}
    sums = {name: gradients[block.prefix + name] for name in block.shapes if block.prefix + name in gradients}
    plain = [name for name in found if name in sums]
    if plain:
        torch._foreach_add_([sums[name] for name in plain], [found[name] for name in plain])
    for linear in block.tapped:
        input_tap, output_tap = tap_names(linear)
        if output_tap in found and weight_name(linear) in sums:
            add_product(sums[weight_name(linear)], found[output_tap], found[input_tap])
