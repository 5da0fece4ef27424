"""Runs a block of the model with or without an autograd graph; backward adds to gradient sums in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from mobius.models.compiled import (
    CompiledFunction,
    CompiledGraph,
    CompiledModule,
    Gradients,
    SavedProducts,
    Tensors,
    as_tuple,
    selective_checkpoint_contexts,
)
from mobius.models.linear import QUANTIZED_PARTS, GradientFactors, make_leaves
from mobius.schedule.plan import RecomputeLevel

NORM_CLASS = re.compile(r"Norm(?![a-z])")
"""Matches class names of norms, such as CohereLayerNorm, Qwen3RMSNorm and RMSNormGated."""
NamedTensors = Mapping[str, Tensor]
"""Hugging Face name -> weight, or fp32 sum of its gradients."""


@dataclass(frozen=True)
class Block:
    """One module of the model with the Hugging Face prefix of its parameters; blocks may share `module`."""

    prefix: str
    """Ends with a dot, for example `model.layers.3.`."""
    module: nn.Module
    """On the meta device; buffers (never trained) are real."""
    shapes: Mapping[str, tuple[int, ...]]
    """Parameter name within the module -> shape."""
    gradient_factors: tuple[GradientFactors, ...] = ()
    """Weights within the module whose gradients are computed outside autograd (`linear.py`, `experts.py`)."""
    compiled: CompiledFunction[..., Tensor] | None = None
    """The module under torch.compile, shared like `module`; None for eager mode."""
    frozen: frozenset[str] = frozenset()
    """Parameters that are not trained."""
    no_weight_decay: frozenset[str] = frozenset()
    """Parameters without weight decay: norms, biases, and tensors of at most one dimension."""
    graphs: CompiledModule | None = None
    """The module as compiled graphs, shared like `module`; None to run the module with autograd."""
    quantizable: tuple[str, ...] = ()
    """Linears within the module whose weights may be passed quantized, with `QUANTIZED_PARTS` next to them."""

    @classmethod
    def of(cls, prefix: str, module: nn.Module) -> Block:
        """Create a block that runs `module` without compiling it."""
        named = dict(module.named_parameters())
        frozen = frozenset(name for name, parameter in named.items() if not parameter.requires_grad)
        shapes = {name: tuple(each.shape) for name, each in named.items()}
        return cls(prefix, module, shapes, frozen=frozen, no_weight_decay=_without_decay(module))

    @property
    def num_parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @property
    def num_trained_parameters(self) -> int:
        """Number of elements of trained parameters."""
        return sum(torch.Size(shape).numel() for name, shape in self.shapes.items() if name not in self.frozen)

    def frozen_names(self) -> frozenset[str]:
        """Hugging Face names of parameters that are not trained."""
        return frozenset(self.prefix + name for name in self.frozen)

    def no_weight_decay_names(self) -> frozenset[str]:
        """Hugging Face names of parameters without weight decay."""
        return frozenset(self.prefix + name for name in self.no_weight_decay)

    def quantizable_names(self) -> tuple[str, ...]:
        """Hugging Face names of weights that may be passed quantized."""
        return tuple(f"{self.prefix}{linear}.weight" for linear in self.quantizable)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape."""
        return {self.prefix + name: shape for name, shape in self.shapes.items()}

    def __call__(self, weights: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Run the module on `weights` (name within the module -> tensor); placeholders of linears may be missing."""
        if self.compiled is not None:
            return self.compiled(dict(weights), args, kwargs)
        return cast(Tensor, functional_call(self.module, dict(weights), args, kwargs))

    def compile(self, name: str) -> Block:
        """Return this block, compiled; `name` is a plural noun, such as "layers", with which a warning begins."""

        def run(weights: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            return cast(Tensor, functional_call(self.module, weights, args, kwargs))

        return replace(self, compiled=CompiledFunction(run, name=name), graphs=CompiledModule(self.module, name=name))


def _without_decay(module: nn.Module) -> frozenset[str]:
    """Names of parameters without weight decay.

    Shape is not enough to find norms and biases: in some families, head norms and expert biases are matrices.
    """
    return frozenset(
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name, parameter in part.named_parameters(recurse=False)
        if parameter.ndim < 2 or NORM_CLASS.search(type(part).__name__) or name.endswith("bias")
    )


@dataclass(frozen=True)
class AutogradGraph:
    """A finished forward of a block, with its autograd graph; `backward` frees the graph."""

    inputs: Tensors
    leaves: Mapping[str, Tensor]
    """Name within the block -> leaf of the graph: a parameter, or a placeholder of gradient factors."""
    outputs: Tensors

    @property
    def output(self) -> Tensor:
        return self.outputs[0]

    def backward(self, gradients: Tensors) -> tuple[Gradients, Tensors]:
        """Return the gradients of the leaves, and of the inputs except token ids."""
        sources = [*self.leaves.values(), *(each for each in self.inputs if each.requires_grad)]
        results = torch.autograd.grad(self.outputs, sources, gradients, allow_unused=True)
        return dict(zip(self.leaves, results, strict=False)), results[len(self.leaves) :]


BlockGraph = AutogradGraph | CompiledGraph
"""A finished forward with all that `backward` needs; `output` is the first of its `outputs`."""


def _own_views(views: NamedTensors, block: Block) -> dict[str, Tensor]:
    own = {name: views[block.prefix + name] for name in block.shapes}
    for linear in block.quantizable:
        for name in (f"{linear}.{part}" for part in QUANTIZED_PARTS):
            if block.prefix + name in views:
                own[name] = views[block.prefix + name]
    return own


def run_without_graph(block: Block, weights: NamedTensors, inputs: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Run `block` without a graph; `weights` by Hugging Face name, `inputs` [..., H] or token ids."""
    return run_many_without_graph(block, weights, (inputs,), arguments)[0]


def run_many_without_graph(
    block: Block, weights: NamedTensors, inputs: Tensors, arguments: Mapping[str, Any]
) -> Tensors:
    """Like `run_without_graph`, with several outputs, and inputs [..., width] that have equally many rows."""
    own = _own_views(weights, block)
    graphs = block.graphs if inputs[0].is_floating_point() else None
    outputs = graphs.forward(own, inputs, arguments) if graphs is not None else None
    if outputs is not None:
        return outputs
    with torch.no_grad():
        return as_tuple(block(own, *inputs, **arguments))


def run_with_graph(
    block: Block,
    weights: NamedTensors,
    inputs: Tensor | Tensors,
    arguments: Mapping[str, Any],
    level: RecomputeLevel = RecomputeLevel.NONE,
) -> BlockGraph:
    """Run `block` with a graph, whose leaves are the parameters and the inputs [..., H], but not token ids.

    `level` selects which activations the graph saves for backward; results do not depend on it.
    """
    inputs = tuple(each.detach() for each in as_tuple(inputs))
    own = _own_views(weights, block)
    if inputs[0].is_floating_point():
        compiled = (
            block.graphs.forward_with_saved(own, block.gradient_factors, inputs, arguments, level)
            if block.graphs is not None
            else None
        )
        if compiled is not None:
            return compiled
        for each in inputs:
            each.requires_grad_()
    fixed, leaves = make_leaves(own, block.gradient_factors, block.frozen, num_tokens=inputs[0].shape[:-1].numel())
    run_block = partial(block, {**fixed, **leaves}, **arguments)
    with torch.enable_grad():
        outputs = run_block(*inputs) if level is RecomputeLevel.NONE else _run_checkpointed(run_block, inputs)
    return AutogradGraph(inputs, leaves, as_tuple(outputs))


def run_saving_products(
    block: Block, weights: NamedTensors, inputs: Tensor, arguments: Mapping[str, Any]
) -> tuple[Tensors, SavedProducts] | None:
    """Run `block` on [..., H]; return its outputs and the state for `resume_from_products`. None if not compiled."""
    if block.graphs is None:
        return None
    inputs, own = inputs.detach(), _own_views(weights, block)
    level = RecomputeLevel.ELEMENTWISE
    graph = block.graphs.forward_with_saved(own, block.gradient_factors, (inputs,), arguments, level)
    return None if graph is None else (graph.outputs, SavedProducts(inputs, graph.saved))


def resume_from_products(
    block: Block, weights: NamedTensors, products: SavedProducts, arguments: Mapping[str, Any]
) -> BlockGraph:
    """Rebuild the graph of the forward that saved `products`, with the same weights and arguments; empty `products`."""
    assert block.graphs is not None, "the forward was compiled"
    return block.graphs.resume_from_products(_own_views(weights, block), block.gradient_factors, products, arguments)


def _run_checkpointed(run_block: Callable[..., Tensor], inputs: Tensors) -> Tensor:
    """Run a block so that its graph saves matrix products only; backward recomputes the rest."""
    return cast(
        Tensor,
        checkpoint(
            run_block,
            *inputs,
            use_reentrant=False,
            context_fn=selective_checkpoint_contexts,
            preserve_rng_state=False,  # layers draw no random numbers
        ),
    )


def backward(block: Block, graph: BlockGraph, gradients: NamedTensors, *output_gradients: Tensor) -> Tensors:
    """Add the gradients of `block`'s parameters to `gradients` (fp32 sums); return the inputs' gradients.

    `output_gradients` are the gradients of the graph's outputs. Token ids have no gradient.
    """
    found, input_gradients = graph.backward(output_gradients)
    _add(block, found, gradients)
    return input_gradients


def recomputed_backward(
    block: Block,
    weights: NamedTensors,
    inputs: Tensors,
    arguments: Mapping[str, Any],
    gradients: NamedTensors,
    *output_gradients: Tensor,
) -> Tensors:
    """`run_with_graph` and `backward` in one call, for floating-point inputs. If compiled, it computes no output."""
    if block.graphs is not None:
        own = _own_views(weights, block)
        results = block.graphs.recomputed_backward(own, block.gradient_factors, inputs, arguments, output_gradients)
        if results is not None:
            _add(block, results[0], gradients)
            return results[1]
    graph = run_with_graph(block, weights, inputs, arguments)
    return backward(block, graph, gradients, *output_gradients)


def _add(block: Block, results: Gradients, gradients: NamedTensors) -> None:
    """Add `results`, the gradients of `block`'s leaves, to the sums `gradients`, which lack frozen parameters."""
    found = {name: result for name, result in results.items() if result is not None}
    sums = {name: gradients[block.prefix + name] for name in block.shapes if block.prefix + name in gradients}
    plain = [name for name in found if name in sums]
    if plain:
        torch._foreach_add_([sums[name] for name in plain], [found[name] for name in plain])
    for factors in block.gradient_factors:
        if factors.weight in sums:
            factors.add_gradient(sums[factors.weight], found)
