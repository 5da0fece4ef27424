"""Compiles functions of tensors: under torch.compile, or traced into graphs, whole or cut into forward and backward.

Nothing is between a call and a traced graph, neither autograd nor guards: the tensors of a call must have shapes,
strides, dtypes and devices of those that were traced. All is made and called under torch.no_grad.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from mobius.errors import first_line

logger = logging.getLogger(__name__)

Results = Sequence[Tensor | None]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
"""Operations that give what they are given."""


class CompiledFunction(Generic[Arguments, Result]):
    """A function under torch.compile: one graph per shape and per grad mode, whatever tensors are passed in.

    The first call of each kind compiles, which takes seconds to a minute.
    """

    def __init__(self, function: Callable[Arguments, Result], *, name: str) -> None:
        """`name` is what a message calls it, in the plural."""
        self._function, self._name = function, name
        self._compiled = torch.compile(function, dynamic=False)
        self._is_broken = False

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Run the function; after a failure to compile, eagerly from then on."""
        if not self._is_broken:
            try:
                return self._compiled(*args, **kwargs)
            except TorchDynamoException as error:
                self._is_broken = True
                told = "%s run without compilation, which is slower: torch.compile failed: %s"
                logger.warning(told, self._name, first_line(error))
        return self._function(*args, **kwargs)


class UntraceableError(Exception):
    """A function whose operations depend on the numbers that go through it, or that torch cannot trace or compile."""


def compile_function(
    function: Callable[[Sequence[Tensor]], Results], tensors: Sequence[Tensor]
) -> Callable[..., Results]:
    """`function` as one graph for tensors like these, which it takes one by one. Raises UntraceableError."""

    def of_all(*tensors: Tensor) -> Results:
        return function(tensors)

    try:
        return _compile(make_fx(of_all, tracing_mode="fake")(*tensors))
    except Exception as error:  # torch has no class for all that may fail
        raise UntraceableError(str(error)) from error


@dataclass(frozen=True)
class SplitFunction:
    """Two parts of a function of tensors and a gradient: its first result, which needs no gradient, and the others."""

    _forward: Callable[..., Results]
    _backward: Callable[[list[Tensor]], Results]
    _taken: tuple[int, ...]
    """Positions in [*tensors, *kept, gradient] of what the second part takes."""

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The first result, and what to hand to `backward`: `tensors` and what is kept beside them."""
        result, *kept = cast(Sequence[Tensor], self._forward(*tensors))
        return result, [*tensors, *kept]

    def backward(self, known: list[Tensor], gradient: Tensor) -> Results:
        """The other results. Empties `known`: what is kept is freed as soon as it is used."""
        known.append(gradient)
        taken = [known[position] for position in self._taken]
        known.clear()
        return self._backward(taken)


def split_function(
    function: Callable[[Sequence[Tensor], Tensor], Results], tensors: Sequence[Tensor], gradient: Tensor
) -> SplitFunction:
    """Trace function(tensors, gradient) on tensors like these, cut it, and compile both parts.

    What is cheap to make again is not kept; the cut is torch's partitioner's, as under torch.compile. Raises
    UntraceableError.
    """

    # By this name the partitioner tells the gradient from other inputs; it sees what is cheap in small operations only.
    def joint(primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Results:
        return function(primals, tangents[0])

    given = list(tensors), [gradient]
    try:
        graph = make_fx(joint, decomposition_table=select_decomp_table(), tracing_mode="fake")(*given)
        _drop_same(graph.graph)
        forward, backward = min_cut_rematerialization_partition(graph, given, num_fwd_outputs=1)
        taken = _keep_no_inputs(forward.graph, backward.graph)
        forward.recompile()
        return SplitFunction(_compile(forward), _compile_emptying(backward), taken)
    except Exception as error:
        raise UntraceableError(str(error)) from error


def _drop_same(graph: Graph) -> None:
    """Take out operations that do nothing: what is kept would be their outputs, in the place of inputs."""
    for node in list(graph.nodes):
        if node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


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
    compiled: Callable[..., Results] = torch._inductor.compile(module, _examples(module))
    return compiled


def _compile_emptying(module: GraphModule) -> Callable[[list[Tensor]], Results]:
    """`module`, given its inputs in one list, which the compiled code empties: nothing else is to hold them."""
    graph = Graph()
    given = graph.placeholder("tensors")
    given.meta["steal_arg"] = True
    copies: dict[Any, Any] = {}
    for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
        copies[node] = graph.call_function(operator.getitem, (given, position))
    for node in module.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    examples: Any = [_examples(module)]
    compiled: Callable[[list[Tensor]], Results] = torch._inductor.compile(GraphModule(module, graph), examples)
    return compiled


def _examples(module: GraphModule) -> list[Any]:
    """Fake tensors like the inputs of `module`."""
    return [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
