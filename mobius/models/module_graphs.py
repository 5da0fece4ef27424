"""The compiled graphs of a module: its forward alone, and both ways of going forward and back.

    activations kept        a forward, and a backward that takes what the forward kept
    recomputed              one graph of both; what only the output would need is not in it, above all the last product

They spare the host about half of the work that torch.compile and autograd give it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from mobius.errors import first_line
from mobius.models.linear import make_leaves
from mobius.models.tracing import Results, SplitFunction, UntraceableError, compile_function, split_function

logger = logging.getLogger(__name__)

Gradients = Mapping[str, Tensor | None]
"""Name within the module, or name of a tap -> gradient; None where it has none."""
Result = TypeVar("Result")
KNOWN_ARGUMENTS = 1024
"""Number of arguments that are kept flattened: those of every layer for some sequence lengths."""


@dataclass(frozen=True)
class _Arguments:
    """Arguments behind a module's first."""

    named: Mapping[str, Any]
    values: Sequence[Any]
    structure: pytree.TreeSpec
    """Structure of `named`, whose leaves are `values`."""
    tensors: Sequence[Tensor]
    """Tensors among `values`."""
    kinds: tuple[Hashable, ...]

    @staticmethod
    def of(named: Mapping[str, Any]) -> _Arguments:
        values, structure = pytree.tree_flatten(dict(named))
        tensors = [value for value in values if isinstance(value, Tensor)]
        return _Arguments(named, values, structure, tensors, (tuple(named), *map(_kind, values)))


@dataclass(frozen=True)
class _Call:
    """The tensors of a call in a row, and how to make the call with others like them."""

    module: nn.Module
    weights: Sequence[str]
    buffers: Sequence[str]
    tapped: Sequence[str]
    arguments: _Arguments
    tensors: Sequence[Tensor]
    """Weights, the first argument, buffers, and those of `arguments`."""
    key: tuple[Hashable, ...]
    """Kinds of all that goes in: each key has a graph of its own."""

    @property
    def leaves(self) -> Sequence[str]:
        """Names of what has a gradient beside the first argument."""
        weights = dict(zip(self.weights, self.tensors, strict=False))
        return tuple(make_leaves(weights, self.tapped, num_tokens=1)[1])

    def run(self, tensors: Sequence[Tensor]) -> Results:
        """The output for `tensors`, in a row; what is no tensor is as in this call."""
        return (self._output(*self._sorted(tensors)),)

    def differentiate(self, tensors: Sequence[Tensor], gradient: Tensor) -> Results:
        """The output, and gradients of `leaves` and of the first argument."""
        weights, inputs, rest = self._sorted(tensors)
        inputs = inputs.detach().requires_grad_()
        fixed, leaves = make_leaves(weights, self.tapped, num_tokens=inputs.shape[:-1].numel())
        with torch.enable_grad():
            output = self._output({**fixed, **leaves}, inputs, rest)
        return output.detach(), *torch.autograd.grad(output, [*leaves.values(), inputs], gradient, allow_unused=True)

    def _sorted(self, tensors: Sequence[Tensor]) -> tuple[dict[str, Tensor], Tensor, Iterator[Tensor]]:
        """Weights, the first argument, and the others: buffers and those of `arguments`."""
        inputs, *rest = tensors[len(self.weights) :]
        return dict(zip(self.weights, tensors, strict=False)), inputs, iter(rest)

    def _output(self, weights: Mapping[str, Tensor], inputs: Tensor, rest: Iterator[Tensor]) -> Tensor:
        buffers = {name: next(rest) for name in self.buffers}
        values = [next(rest) if isinstance(value, Tensor) else value for value in self.arguments.values]
        arguments = pytree.tree_unflatten(values, self.arguments.structure)
        return cast(Tensor, functional_call(self.module, {**weights, **buffers}, (inputs,), arguments))


@dataclass(frozen=True)
class KeptActivations:
    """A forward until `backward` consumes it: its output, and what backward needs."""

    output: Tensor
    _known: list[Tensor]
    _graph: SplitFunction
    _leaves: Sequence[str]

    def backward(self, gradient: Tensor) -> tuple[Gradients, Tensor]:
        """Gradients of the leaves, and that of the inputs; `gradient` is that of `output`. Only once."""
        assert (gradient.shape, gradient.dtype) == (self.output.shape, self.output.dtype)
        with torch.no_grad():
            return _named(self._leaves, self._graph.backward(self._known, gradient.contiguous()))


class ModuleGraphs:
    """A module as graphs, one of each kind per shape; the first call of each shape compiles.

    `weights` are by name within the module; `make_leaves` gives the leaves of gradients for them and `tapped`. `inputs`
    is the module's first argument, floating point; `arguments` are the others by name, which do not change after their
    first call. All methods return None if the module cannot be traced or compiled: it must then be called as it is.
    """

    def __init__(self, module: nn.Module, *, name: str) -> None:
        """`name` is what a message calls such modules, in the plural."""
        self._module, self._name = module, name
        self._buffers = dict(module.named_buffers())
        self._forward: dict[Hashable, Callable[..., Results]] = {}
        self._whole: dict[Hashable, tuple[Callable[..., Results], Sequence[str]]] = {}
        self._split: dict[Hashable, tuple[SplitFunction, Sequence[str]]] = {}
        # By identity; an entry holds what it was made of, so no other has its number.
        self._arguments: dict[int, _Arguments] = {}
        self._is_broken = False

    def forward(self, weights: Mapping[str, Tensor], inputs: Tensor, arguments: Mapping[str, Any]) -> Tensor | None:
        """The output, of which no gradient will be asked."""

        def run() -> Tensor:
            call = self._call(weights, (), inputs, arguments)
            if call.key not in self._forward:
                self._forward[call.key] = compile_function(call.run, call.tensors)
            (output,) = self._forward[call.key](*call.tensors)
            return cast(Tensor, output)

        return self._attempt(run)

    def recompute(
        self,
        weights: Mapping[str, Tensor],
        tapped: Sequence[str],
        inputs: Tensor,
        arguments: Mapping[str, Any],
        gradient: Tensor,
    ) -> tuple[Gradients, Tensor] | None:
        """Gradients of the leaves and that of `inputs`, from the inputs; `gradient` is that of the output."""

        def run() -> tuple[Gradients, Tensor]:
            call = self._call(weights, tapped, inputs, arguments)
            key = (*call.key, _kind(gradient))
            flat = [*call.tensors, gradient]
            if key not in self._whole:
                function = compile_function(lambda given: call.differentiate(given[:-1], given[-1])[1:], flat)
                self._whole[key] = function, call.leaves
            function, leaves = self._whole[key]
            return _named(leaves, function(*flat))

        return self._attempt(run)

    def keep(
        self, weights: Mapping[str, Tensor], tapped: Sequence[str], inputs: Tensor, arguments: Mapping[str, Any]
    ) -> KeptActivations | None:
        """The forward; its backward needs the same `weights` where they are. The output has the shape of `inputs`."""

        def run() -> KeptActivations:
            call = self._call(weights, tapped, inputs, arguments)
            if call.key not in self._split:
                gradient = torch.empty_like(inputs, memory_format=torch.contiguous_format)
                self._split[call.key] = split_function(call.differentiate, call.tensors, gradient), call.leaves
            graph, leaves = self._split[call.key]
            return KeptActivations(*graph.forward(call.tensors), graph, leaves)

        return self._attempt(run)

    def _call(
        self, weights: Mapping[str, Tensor], tapped: Sequence[str], inputs: Tensor, arguments: Mapping[str, Any]
    ) -> _Call:
        known = self._arguments.get(id(arguments))
        if known is None:
            if len(self._arguments) >= KNOWN_ARGUMENTS:
                self._arguments.clear()
            known = self._arguments[id(arguments)] = _Arguments.of(arguments)
        return _Call(
            self._module,
            tuple(weights),
            tuple(self._buffers),
            tapped,
            known,
            [*weights.values(), inputs, *self._buffers.values(), *known.tensors],
            (_kind(next(iter(weights.values()), None)), _kind(inputs), known.kinds),
        )

    def _attempt(self, run: Callable[[], Result]) -> Result | None:
        """The result of `run`; None once there was something that it could not trace or compile."""
        if self._is_broken:
            return None
        try:
            with torch.no_grad():
                return run()
        except UntraceableError as error:
            self._is_broken = True
            logger.warning("%s run without graphs of their own, which is slower: %s", self._name, first_line(error))
            return None


def _named(leaves: Sequence[str], gradients: Results) -> tuple[Gradients, Tensor]:
    *found, own = gradients
    return dict(zip(leaves, found, strict=True)), cast(Tensor, own)


def _kind(value: object) -> Hashable:
    """Properties of an argument that a graph is made for."""
    return (value.device, value.dtype, *value.shape, *value.stride()) if isinstance(value, Tensor) else repr(value)
