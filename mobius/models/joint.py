"""Forward and backward of a module as one compiled graph, for layers whose activations are not kept.

Beside two graphs with autograd between them it spares the host about half of its work, and the device what only the
output would need: above all the last product of the forward, which no gradient depends on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from mobius.errors import first_line
from mobius.models.linear import make_leaves

logger = logging.getLogger(__name__)

Gradients = Mapping[str, Tensor | None]
"""Name within the module, or name of a tap -> gradient; None where it has none."""


class JointGraph:
    """Gradients of a module's parameters and inputs, from its inputs; one graph per shape, whatever tensors come.

    The first call of each shape compiles.
    """

    def __init__(self, module: nn.Module, *, name: str) -> None:
        """`name` is what a message calls such modules, in the plural."""
        self._module, self._name = module, name
        self._buffers = dict(module.named_buffers())
        self._compiled: dict[Hashable, Callable[..., tuple[Gradients, Tensor]]] = {}
        self._is_broken = False

    def __call__(
        self,
        weights: Mapping[str, Tensor],
        tapped: Sequence[str],
        inputs: Tensor,
        arguments: Mapping[str, Any],
        gradient: Tensor,
    ) -> tuple[Gradients, Tensor] | None:
        """Gradients of the leaves that `make_leaves` gives for `weights` and `tapped`, and that of `inputs`.

        Args:
            weights: name within the module -> tensor.
            inputs: the module's first argument, floating point; `arguments` are the others by name.
            gradient: of the output.

        Returns None if the module cannot be traced or compiled: autograd must do it, now and from then on.
        """
        if self._is_broken:
            return None
        values, structure = pytree.tree_flatten(dict(arguments))
        tensors = [value for value in values if isinstance(value, Tensor)]
        key = (tuple(arguments), *map(_kind, (inputs, gradient, *values)))
        flat = [*weights.values(), *self._buffers.values(), inputs, gradient, *tensors]
        try:
            with torch.no_grad():
                if key not in self._compiled:
                    joint = self._function(tuple(weights), tapped, values, structure)
                    self._compiled[key] = torch.compile(_trace(joint, flat), dynamic=False)
                return self._compiled[key](*flat)
        except (TorchDynamoException, UntraceableError) as error:
            self._is_broken = True
            logger.warning(
                "%s are recomputed without a graph of their own, which is slower: %s", self._name, first_line(error)
            )
            return None

    def _function(
        self, names: Sequence[str], tapped: Sequence[str], values: Sequence[Any], structure: pytree.TreeSpec
    ) -> Callable[..., tuple[Gradients, Tensor]]:
        """What is traced: a function of tensors only; whatever else is among `values` is fixed."""

        def joint(*flat: Tensor) -> tuple[Gradients, Tensor]:
            rest = iter(flat)
            weights = {name: next(rest) for name in names}
            buffers = {name: next(rest) for name in self._buffers}
            inputs, gradient = next(rest).detach().requires_grad_(), next(rest)
            arguments = pytree.tree_unflatten(
                [next(rest) if isinstance(value, Tensor) else value for value in values], structure
            )
            fixed, leaves = make_leaves(weights, tapped, num_tokens=inputs.shape[:-1].numel())
            tensors = {**fixed, **leaves, **buffers}
            with torch.enable_grad():
                output = cast(Tensor, functional_call(self._module, tensors, (inputs,), arguments))
            *found, own = torch.autograd.grad(output, [*leaves.values(), inputs], gradient, allow_unused=True)
            return dict(zip(leaves, found, strict=True)), own

        return joint


def _kind(value: object) -> Hashable:
    """What of an argument a graph is made for."""
    return (value.dtype, *value.shape, *value.stride()) if isinstance(value, Tensor) else repr(value)


class UntraceableError(Exception):
    """A function whose operations depend on the numbers that go through it, or that the tracer does not know."""


def _trace(function: Callable[..., Any], flat: Sequence[Tensor]) -> torch.fx.GraphModule:
    """The operations of `function` on tensors like `flat`, found without memory or numbers."""
    try:
        return make_fx(function, tracing_mode="fake")(*flat)
    except Exception as error:
        raise UntraceableError(str(error)) from error
