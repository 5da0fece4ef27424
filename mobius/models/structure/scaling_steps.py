"""Elementwise steps by which a family scales embeddings, hidden states or logits between modules.

They are recorded from the family's own operations, so no table of families and fields is needed:

    embedding --steps--> first layer      norm --steps--> head      head --steps--> logits

A step is a product or a quotient with a number, tanh, or a cast to fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten


class ScalingKind(StrEnum):
    """Operation of a step."""

    MULTIPLY = "times"
    DIVIDE = "over"
    TANH = "tanh"
    FLOAT = "float"


class ScalingStep(NamedTuple):
    """One elementwise operation; only MULTIPLY and DIVIDE use `number`."""

    kind: ScalingKind
    number: float = 0.0


ScalingSteps = tuple[ScalingStep, ...]

_APPLY: Mapping[ScalingKind, Callable[[Tensor, float], Tensor]] = {
    ScalingKind.MULTIPLY: lambda values, number: values * number,
    ScalingKind.DIVIDE: lambda values, number: values / number,
    ScalingKind.TANH: lambda values, _: torch.tanh(values),
    ScalingKind.FLOAT: lambda values, _: values.float(),
}
_SLOPE: Mapping[ScalingKind, Callable[[Tensor, float], Tensor | float]] = {
    ScalingKind.MULTIPLY: lambda _, number: number,
    ScalingKind.DIVIDE: lambda _, number: 1.0 / number,
    ScalingKind.TANH: lambda bounded, _: 1.0 - bounded * bounded,
    ScalingKind.FLOAT: lambda *_: 1.0,
}
"""Derivative of a step, from the step's result."""


def apply_scaling(values: Tensor, steps: ScalingSteps) -> Tensor:
    """Apply the steps as the family does."""
    for step in steps:
        values = _APPLY[step.kind](values, step.number)
    return values


def apply_scaling_with_derivative(values: Tensor, steps: ScalingSteps) -> tuple[Tensor, Tensor | float]:
    """Apply the steps; return the result and its derivative at each of `values`."""
    slope: Tensor | float = 1.0
    for step in steps:
        values = _APPLY[step.kind](values, step.number)
        slope = slope * _SLOPE[step.kind](values, step.number)
    return values, slope


class ScaledModule(nn.Module):
    """A module followed by its scaling steps; parameters have the names that they have one level up."""

    def __init__(self, name: str, module: nn.Module, steps: ScalingSteps) -> None:
        super().__init__()
        self.add_module(name, module)
        self._name, self._steps = name, steps

    def forward(self, inputs: Tensor) -> Tensor:
        """Scaled output of the module."""
        return apply_scaling(self._modules[self._name](inputs), self._steps)  # type: ignore[misc]


class OperationRecorder(TorchDispatchMode):
    """Records the operation that made each tensor while entered, and which tensors derive from `start`."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[Any, tuple[Any, ...], Tensor]] = {}
        self._from_start = {id(start)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = tuple(tree_leaves((args, kwargs or {})))
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and not any(each is other for other in given):
                self._made[id(each)] = (func, given, each)  # holds the tensor, so that its id is not reused
                if any(id(other) in self._from_start for other in given):
                    self._from_start.add(id(each))
        return output

    def is_made_from_start(self, tensor: Tensor) -> bool:
        """Whether the values of `tensor` may depend on the recorder's `start`."""
        return id(tensor) in self._from_start

    def steps(self, start: Tensor, end: Tensor) -> ScalingSteps | None:
        """Steps from `start` to `end`, or None if another operation is between them."""
        found = list[ScalingStep]()
        while end is not start:
            if id(end) not in self._made:
                return None
            func, args, _ = self._made[id(end)]
            step = _step(func.overloadpacket, args, end)
            if step is None or not isinstance(args[0], Tensor):
                return None
            if step is not _NOTHING:
                found.append(step)
            end = args[0]
        return tuple(reversed(found))


_NOTHING = ScalingStep(ScalingKind.MULTIPLY, 1.0)
"""Marks an operation that returns its input."""
_PRODUCTS = {_aten.mul: ScalingKind.MULTIPLY, _aten.div: ScalingKind.DIVIDE}
_SAME = (_aten.alias, _aten.detach, _aten.clone, _aten.view, _aten.slice, _aten._unsafe_view, _aten.contiguous)


def _step(operation: Any, args: tuple[Any, ...], made: Tensor) -> ScalingStep | None:
    if operation in _PRODUCTS:
        number = _number(args[1])
        return None if number is None else ScalingStep(_PRODUCTS[operation], number)
    if operation is _aten.tanh:
        return ScalingStep(ScalingKind.TANH)
    if operation is _aten._to_copy and made.dtype == torch.float32:
        return ScalingStep(ScalingKind.FLOAT)
    return _NOTHING if operation in _SAME and made.shape == args[0].shape else None


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        is_constant = value.ndim == 0 and not value.is_meta and not isinstance(value, nn.Parameter)
        return float(value) if is_constant else None
    return float(value) if isinstance(value, int | float) else None
