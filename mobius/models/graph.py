"""Runs one block with a graph, and takes that graph back into gradients that add up in place.

Does not own what is kept of a forward, nor where weights and gradients are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mobius.models.blocks import Block
from mobius.models.linear import add_product, make_taps, tap_names, weight_name

Views = Mapping[str, Tensor]


@dataclass(frozen=True)
class BlockGraph:
    """A block's forward with its graph, until `backward` consumes it."""

    inputs: Tensor
    leaves: Mapping[str, Tensor]
    """Name within the block -> a leaf of the graph: parameters, and taps where a product makes the gradient."""
    output: Tensor


def own_views(views: Views, block: Block) -> dict[str, Tensor]:
    """The views of `block`'s parameters under their names within the block."""
    return {name: views[block.prefix + name] for name in block.shapes}


def run_with_graph(block: Block, weights: Views, inputs: Tensor, arguments: Mapping[str, Any]) -> BlockGraph:
    """Run `block` with a graph that ends in its parameters and, if they are numbers and not token ids, its inputs.

    Args:
        weights: by Hugging Face name.
        inputs: [..., H], or token ids.
    """
    own = own_views(weights, block)
    inputs = inputs.detach()
    if inputs.is_floating_point():
        inputs.requires_grad_()
    num_tokens = inputs.shape[:-1].numel()
    fixed = {weight_name(linear): own.pop(weight_name(linear)).detach() for linear in block.tapped}
    leaves = {name: view.detach().requires_grad_() for name, view in own.items()}
    for linear in block.tapped:
        leaves |= zip(tap_names(linear), make_taps(fixed[weight_name(linear)], num_tokens=num_tokens), strict=True)
    with torch.enable_grad():
        return BlockGraph(inputs, leaves, block({**fixed, **leaves}, inputs, **arguments))


def backward(block: Block, graph: BlockGraph, gradients: Views, gradient: Tensor) -> Tensor:
    """Add the gradients of `block`'s parameters to `gradients` (fp32, by Hugging Face name); return that of its inputs.

    `gradient` is that of the graph's output. Token ids have no gradient: then `gradient` is returned.
    """
    names, sources = list(graph.leaves), list(graph.leaves.values())
    if graph.inputs.requires_grad:
        sources.append(graph.inputs)
    results = torch.autograd.grad(graph.output, sources, gradient, allow_unused=True)
    # What has no gradient in this microbatch is left out.
    found = {name: result for name, result in zip(names, results, strict=False) if result is not None}
    sums = own_views(gradients, block)
    plain = [name for name in found if name in sums]
    if plain:
        torch._foreach_add_([sums[name] for name in plain], [found[name] for name in plain])
    for linear in block.tapped:
        input_tap, output_tap = tap_names(linear)
        if output_tap in found:
            add_product(sums[weight_name(linear)], found[output_tap], found[input_tap])
    if not graph.inputs.requires_grad:
        return gradient
    input_gradient = results[-1]
    assert input_gradient is not None
    return input_gradient
