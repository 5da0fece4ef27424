"""Compiles functions under torch.compile, and modules into graphs of their own, forward alone and both ways back.

    activations kept        a forward, and a backward that takes what the forward kept
    recomputed              one graph of both; what only the output would need is not in it, above all the last product

A module's own graphs spare the host about half of the work that torch.compile and autograd give it: nothing is between
a call and its graph, neither autograd nor guards. All of them are made and called under torch.no_grad.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from mobius.errors import first_line
from mobius.models.linear import make_leaves

logger = logging.getLogger(__name__)

Weights = Mapping[str, Tensor]
"""Name within the module -> value."""
Gradients = Mapping[str, Tensor | None]
"""Name within the module, or name of a tap -> gradient; None where it has none."""
Results = Sequence[Tensor | None]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
"""Operations that give what they are given."""


class Arguments(dict[str, Any]):
    """Keyword arguments, which do not change; layers that share them flatten them once.

    torch's pytree takes them for a leaf, like any class of one's own: it must be given `dict(arguments)`.
    """

    @cached_property
    def flat(self) -> tuple[Sequence[Tensor], Hashable]:
        """Their tensors, and the kinds of all values: graphs are made for kinds."""
        values = pytree.tree_leaves(dict(self))
        return [value for value in values if isinstance(value, Tensor)], (tuple(self), *map(_kind, values))


class CompiledFunction(Generic[Parameters, Result]):
    """A function under torch.compile: one graph per shape and grad mode; compiling one takes up to a minute."""

    def __init__(self, function: Callable[Parameters, Result], *, name: str) -> None:
        """`name` is what a message calls it, in the plural."""
        self._function, self._name = function, name
        self._compiled = torch.compile(function, dynamic=False)
        self._is_broken = False

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Run the function; after a failure to compile, eagerly from then on."""
        if not self._is_broken:
            try:
                return self._compiled(*args, **kwargs)
            except TorchDynamoException as error:
                self._is_broken = True
                told = "%s run without compilation, which is slower: torch.compile failed: %s"
                logger.warning(told, self._name, first_line(error))
        return self._function(*args, **kwargs)


@dataclass(frozen=True)
class KeptActivations:
    """A forward until `backward` consumes it: its output, and what backward needs."""

    output: Tensor
    _known: list[Tensor]
    """Tensors of the call, and what the forward kept beside them."""
    _graphs: _SplitGraphs

    def backward(self, gradient: Tensor) -> tuple[Gradients, Tensor]:
        """Gradients of the leaves, and that of the inputs; `gradient` is that of `output`. Only once."""
        assert (gradient.shape, gradient.dtype) == (self.output.shape, self.output.dtype)
        with torch.no_grad():
            self._known.append(gradient.contiguous())
            taken = [self._known[position] for position in self._graphs.taken]
            self._known.clear()  # what is kept is freed as soon as it is used
            return _named(self._graphs.leaves, self._graphs.backward(taken))


class ModuleGraphs:
    """A module as graphs, one of each kind per shape; the first call of each shape compiles.

    `weights` are by name within the module; `make_leaves` gives the leaves of gradients for them and `tapped`. `inputs`
    is the module's first argument, floating point; `arguments` are the others by name. All methods return None if the
    module cannot be traced or compiled: it must then be called as it is.
    """

    def __init__(self, module: nn.Module, *, name: str) -> None:
        """`name` is what a message calls such modules, in the plural."""
        self._module, self._name = module, name
        self._buffers = dict(module.named_buffers())
        self._graphs: dict[Hashable, Any] = {}
        self._is_broken = False

    def forward(self, weights: Weights, inputs: Tensor, arguments: Mapping[str, Any]) -> Tensor | None:
        """The output, of which no gradient will be asked."""
        with torch.no_grad():
            call = self._call(weights, (), inputs, arguments)
            graph = self._graph(("forward", call.key), lambda: _compile_function(call.run, call.tensors))
            return None if graph is None else cast(Tensor, graph(*call.tensors)[0])

    def recompute(
        self, weights: Weights, tapped: Sequence[str], inputs: Tensor, arguments: Mapping[str, Any], gradient: Tensor
    ) -> tuple[Gradients, Tensor] | None:
        """Gradients of the leaves and that of `inputs`, from the inputs; `gradient` is that of the output."""
        with torch.no_grad():
            call = self._call(weights, tapped, inputs, arguments)
            tensors = [*call.tensors, gradient]
            key = "both", call.key, _kind(gradient)
            made = self._graph(key, lambda: (_compile_function(call.gradients, tensors), call.leaves))
            return None if made is None else _named(made[1], made[0](*tensors))

    def keep(
        self, weights: Weights, tapped: Sequence[str], inputs: Tensor, arguments: Mapping[str, Any]
    ) -> KeptActivations | None:
        """The forward; its backward needs the same `weights` where they are. The output has the shape of `inputs`."""
        with torch.no_grad():
            call = self._call(weights, tapped, inputs, arguments)
            graphs = self._graph(("split", call.key), lambda: _split(call, inputs))
            if graphs is None:
                return None
            output, *kept = cast(Sequence[Tensor], graphs.forward(*call.tensors))
            return KeptActivations(output, [*call.tensors, *kept], graphs)

    def _call(self, weights: Weights, tapped: Sequence[str], inputs: Tensor, arguments: Mapping[str, Any]) -> _Call:
        tensors, kinds = (arguments if isinstance(arguments, Arguments) else Arguments(arguments)).flat
        return _Call(
            self._module,
            tuple(weights),
            tuple(self._buffers),
            tapped,
            arguments,
            [*weights.values(), inputs, *self._buffers.values(), *tensors],
            (_kind(next(iter(weights.values()), None)), _kind(inputs), kinds),
        )

    def _graph(self, key: Hashable, make: Callable[[], Result]) -> Result | None:
        """The graph of this key, made at its first call; None once something could not be traced or compiled."""
        if not self._is_broken and key not in self._graphs:
            try:
                self._graphs[key] = make()
            except Exception as error:  # torch has no class for all that may fail
                self._is_broken = True
                logger.warning("%s run without graphs of their own, which is slower: %s", self._name, first_line(error))
        return None if self._is_broken else self._graphs[key]


def _kind(value: object) -> Hashable:
    """Properties of an argument that a graph is made for."""
    return (value.device, value.dtype, *value.shape, *value.stride()) if isinstance(value, Tensor) else repr(value)


def _named(leaves: Sequence[str], gradients: Results) -> tuple[Gradients, Tensor]:
    *found, own = gradients
    return dict(zip(leaves, found, strict=True)), cast(Tensor, own)


@dataclass(frozen=True)
class _Call:
    """The tensors of a call in a row, and how to make the call with others like them."""

    module: nn.Module
    weights: Sequence[str]
    buffers: Sequence[str]
    tapped: Sequence[str]
    arguments: Mapping[str, Any]
    """Arguments behind the module's first."""
    tensors: Sequence[Tensor]
    """Weights, the first argument, buffers, and those of `arguments`."""
    key: Hashable
    """Kinds of all that goes in: each key has a graph of its own."""

    @property
    def leaves(self) -> Sequence[str]:
        """Names of what has a gradient beside the first argument."""
        return tuple(make_leaves(self._sorted(self.tensors)[0], self.tapped, num_tokens=1)[1])

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

    def gradients(self, tensors: Sequence[Tensor]) -> Results:
        """Gradients of `leaves` and of the first argument; the last of `tensors` is that of the output."""
        return self.differentiate(tensors[:-1], tensors[-1])[1:]

    def _sorted(self, tensors: Sequence[Tensor]) -> tuple[Weights, Tensor, Iterator[Tensor]]:
        """Weights, the first argument, and the others: buffers and those of `arguments`."""
        inputs, *rest = tensors[len(self.weights) :]
        return dict(zip(self.weights, tensors, strict=False)), inputs, iter(rest)

    def _output(self, weights: Weights, inputs: Tensor, rest: Iterator[Tensor]) -> Tensor:
        buffers = {name: next(rest) for name in self.buffers}
        arguments = pytree.tree_map_only(Tensor, lambda _: next(rest), dict(self.arguments))
        return cast(Tensor, functional_call(self.module, {**weights, **buffers}, (inputs,), arguments))


@dataclass(frozen=True)
class _SplitGraphs:
    """Two parts of a call's differentiation: the output, which needs no gradient, and the gradients."""

    forward: Callable[..., Results]
    """Gives the output, and what is kept beside the call's tensors, which it takes one by one."""
    backward: Callable[[list[Tensor]], Results]
    """Takes a list, which it empties."""
    taken: tuple[int, ...]
    """Positions in [*tensors, *kept, gradient] of what `backward` takes."""
    leaves: Sequence[str]


def _compile_function(
    function: Callable[[Sequence[Tensor]], Results], tensors: Sequence[Tensor]
) -> Callable[..., Results]:
    """`function` as one graph for tensors like these, which it takes one by one."""
    return _compile(make_fx(lambda *tensors: function(tensors), tracing_mode="fake")(*tensors))


def _split(call: _Call, inputs: Tensor) -> _SplitGraphs:
    """`call.differentiate` for a gradient like `inputs`, cut by torch's partitioner as under torch.compile."""

    # By this name the partitioner tells the gradient from other inputs; it sees what is cheap in small operations only.
    def joint(primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Results:
        return call.differentiate(primals, tangents[0])

    given = list(call.tensors), [torch.empty_like(inputs, memory_format=torch.contiguous_format)]
    graph = make_fx(joint, decomposition_table=select_decomp_table(), tracing_mode="fake")(*given)
    for node in list(graph.graph.nodes):
        if node.target in _SAME:  # or what is kept would be its output, in the place of an input
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    forward, backward = min_cut_rematerialization_partition(graph, given, num_fwd_outputs=1)
    taken = _keep_no_inputs(forward.graph, backward.graph)
    forward.recompile()
    return _SplitGraphs(_compile(forward), _compile_emptying(backward), taken, call.leaves)


def _keep_no_inputs(forward: Graph, backward: Graph) -> tuple[int, ...]:
    """Let `forward` give its result and what it makes, not what it is given; tell where `backward` gets its inputs."""
    (output,) = forward.find_nodes(op="output")
    inputs = forward.find_nodes(op="placeholder")
    result, *saved = output.args[0]
    made = [node for node in saved if node not in inputs]
    output.args = ((result, *made),)
    # Nodes of different graphs; what is the same has the same name, and what is not in forward is the gradient.
    names = [node.name for node in (*inputs, *made)]
    taken = (node.name for node in backward.find_nodes(op="placeholder"))
    return tuple(names.index(name) if name in names else len(names) for name in taken)


def _compile(module: GraphModule) -> Callable[..., Results]:
    return cast(Callable[..., Results], torch._inductor.compile(module, _examples(module)))


def _compile_emptying(module: GraphModule) -> Callable[[list[Tensor]], Results]:
    """`module`, given its inputs in one list, which the compiled code empties: nothing else is to hold them."""
    graph = Graph()
    given = graph.placeholder("tensors")
    given.meta["steal_arg"] = True
    inputs = enumerate(module.graph.find_nodes(op="placeholder"))
    copies = {node: graph.call_function(operator.getitem, (given, position)) for position, node in inputs}
    for node in module.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    examples: Any = [_examples(module)]
    return cast(Callable[..., Results], torch._inductor.compile(GraphModule(module, graph), examples))


def _examples(module: GraphModule) -> list[Any]:
    """Fake tensors like the inputs of `module`."""
    return [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
