"""Linear layers: the number format of their matrix products, and the two factors of a weight's gradient.

    forward     y  = x W^T + b      ProductFormat.output            in 8-bit codes, if the weight is quantized
    backward    dx = dy W           ProductFormat.input_gradient    in 8-bit codes, if the weight is quantized
                dW = dy^T x         ProductFormat.add_weight_gradient, from the factors dy and x

Autograd would allocate dW for every microbatch, in the working dtype, and a second pass would add it to the sums.
Instead, autograd returns the two factors, and one matrix product adds dW directly to the fp32 sums, without rounding.
The factors are returned as gradients of two placeholders: inputs whose values are never read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mobius.models import quantization

INPUT_PLACEHOLDER, OUTPUT_PLACEHOLDER = "input_placeholder", "output_placeholder"
QUANTIZED_PARTS = quantization.QuantizedMatrix._fields[1:]
"""Buffers that a linear layer has besides its weight, if the weight is quantized by row."""


class GradientFactors(Protocol):
    """Factors of one weight's gradient: how to get them from autograd, and how to add their product to a sum."""

    @property
    def weight(self) -> str:
        """Name of the weight within its block."""

    def make_placeholders(self, weight: Tensor, *, num_tokens: int) -> dict[str, Tensor]:
        """Return graph inputs, by name, whose gradients are the factors: views of one element, which take no memory."""

    def add_gradient(self, total: Tensor, found: Mapping[str, Tensor]) -> None:
        """Add the product of the factors in `found` (by name) to `total` (fp32); do nothing if `found` lacks them."""


@dataclass(frozen=True)
class LinearGradientFactors:
    """Gradient factors of a GradientFactorLinear; `linear` is empty if the block itself is the linear."""

    linear: str

    @property
    def weight(self) -> str:
        return self._within("weight")

    def make_placeholders(self, weight: Tensor, *, num_tokens: int) -> dict[str, Tensor]:
        # If weights are codes, activations are in bf16.
        dtype = weight.dtype if weight.is_floating_point() and weight.itemsize > 1 else torch.bfloat16
        element = torch.empty(1, dtype=dtype, device=weight.device)
        widths = zip((INPUT_PLACEHOLDER, OUTPUT_PLACEHOLDER), reversed(weight.shape), strict=True)
        return {self._within(name): element.expand(num_tokens, width).requires_grad_() for name, width in widths}

    def add_gradient(self, total: Tensor, found: Mapping[str, Tensor]) -> None:
        if (output := self._within(OUTPUT_PLACEHOLDER)) in found:
            ProductFormat.add_weight_gradient(total, found[output], found[self._within(INPUT_PLACEHOLDER)])

    def _within(self, name: str) -> str:
        return f"{self.linear}.{name}".removeprefix(".")


class ProductFormat:
    """A linear's three matrix products, in the working dtype of weights and activations, or in 8-bit codes.

    `weight` [out, in], `inputs` [..., in] and `gradient` [..., out] have the same dtype. With `scales`, the weight
    holds codes as in `quantization.QuantizedMatrix`, and the other factor is quantized here.
    """

    @staticmethod
    def output(inputs: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> Tensor:
        """Return x W^T + b, [..., out]; `scales` are [out]."""
        if scales is None:
            return F.linear(inputs, weight, bias)
        output = quantization.product(inputs, weight, scales)
        return output if bias is None else output + bias

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
        """Return the input gradient dy W, [..., in]; with `scales` [in], `weight` holds codes by column, [in, out]."""
        return gradient @ weight if scales is None else quantization.product(gradient, weight, scales)

    @staticmethod
    def add_weight_gradient(total: Tensor, gradient: Tensor, inputs: Tensor) -> None:
        """Add dy^T x to `total` (fp32 [out, in]); `gradient` [tokens, out] and `inputs` [tokens, in] are matrices.

        A GPU accumulates in fp32 in one kernel; on a CPU the product is rounded to the working dtype first.
        """
        factors = gradient.t(), inputs
        if total.device.type != "cuda":
            total.add_(torch.mm(*factors))
        elif inputs.dtype == torch.float32:
            torch.addmm(total, *factors, out=total)
        else:
            torch.addmm(total, *factors, out_dtype=torch.float32, out=total)


class GradientFactorLinear(nn.Linear):
    """`nn.Linear`; if `functional_call` passes placeholders, backward returns factors instead of a weight gradient.

    If `functional_call` passes `QUANTIZED_PARTS`, the weight holds codes by row.
    """

    input_placeholder: Tensor | None
    """[tokens, in_features]; its gradient is the input x."""
    output_placeholder: Tensor | None
    """[tokens, out_features]; its gradient is dy, the gradient of the output."""
    row_scales: Tensor | None
    by_columns: Tensor | None
    column_scales: Tensor | None

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        for name in (INPUT_PLACEHOLDER, OUTPUT_PLACEHOLDER, *QUANTIZED_PARTS):
            self.register_buffer(name, None, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self.input_placeholder is None and self.row_scales is None:
            return ProductFormat.output(input, self.weight, self.bias)
        tensors = input, self.weight, self.bias, self.input_placeholder, self.output_placeholder
        parts = self.row_scales, self.by_columns, self.column_scales
        return cast(Tensor, _ProductWithFactors.apply(*tensors, *parts))  # type: ignore[no-untyped-call]


class _ProductWithFactors(torch.autograd.Function):
    """x W^T + b. Backward returns the factors of W's gradient as gradients of the placeholders, if there are any."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        input_placeholder: Tensor | None,
        output_placeholder: Tensor | None,
        row_scales: Tensor | None,
        by_columns: Tensor | None,
        column_scales: Tensor | None,
    ) -> Tensor:
        ctx.has_factors = input_placeholder is not None
        in_backward = weight if by_columns is None else by_columns
        ctx.save_for_backward(in_backward, column_scales, inputs if ctx.has_factors else None)
        return ProductFormat.output(inputs, weight, bias, row_scales)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, scales, inputs = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        bias_gradient = rows.sum(0) if ctx.needs_input_grad[2] else None
        input_gradient = ProductFormat.input_gradient(gradient, weight, scales)
        factors: tuple[Tensor | None, ...] = (None, None)
        if ctx.has_factors:
            # Without detach, the input would keep its graph alive.
            factors = inputs.detach().reshape(-1, inputs.shape[-1]), rows
        return input_gradient, None, bias_gradient, *factors, None, None, None


def replace_linears(module: nn.Module) -> None:
    """Replace every plain `nn.Linear` under `module` by a GradientFactorLinear on the meta device."""
    for name, child in list(module.named_modules()):
        if type(child) is nn.Linear:
            options = {"bias": child.bias is not None, "device": "meta", "dtype": child.weight.dtype}
            replacement = GradientFactorLinear(child.in_features, child.out_features, **options)
            module.set_submodule(name, replacement.train(child.training))


def find_linear_gradient_factors(
    module: nn.Module, run: Callable[[], object], *, num_tokens: int
) -> tuple[LinearGradientFactors, ...]:
    """Gradient factors of trained linears under `module` that `run` calls exactly once, on `num_tokens` rows.

    Autograd computes the gradients of other linears: a second call would sum the factors; a linear that gets only some
    tokens (in experts) has other shapes; an output that is modified in place would give wrong factors.
    """
    linears = {
        child: name
        for name, child in module.named_modules()
        if isinstance(child, GradientFactorLinear) and child.weight.requires_grad
    }
    calls = record_calls(linears, run)

    found = list[LinearGradientFactors]()
    for linear, name in linears.items():
        outputs: list[Tensor] = [call.output for call in calls[linear]]
        if [each.shape[:-1].numel() for each in outputs] == [num_tokens] and outputs[0]._version == 0:
            found.append(LinearGradientFactors(name))
    return tuple(found)


def find_quantizable_linears(
    module: nn.Module, run: Callable[[], object], *, num_tokens: int, kept: Collection[int] = ()
) -> tuple[str, ...]:
    """Names of linears under `module` that may multiply in eight bits: `run` calls them once, on all tokens.

    Their sizes are multiples of `quantization.WIDTH_MULTIPLE`. A linear whose number of outputs is in `kept`, such as a
    router, keeps the working dtype.
    """
    named = {each: name for name, each in module.named_modules() if isinstance(each, GradientFactorLinear)}
    calls = record_calls(named, run)
    return tuple(
        name
        for linear, name in named.items()
        if [call.output.shape[:-1].numel() for call in calls[linear]] == [num_tokens]
        and all(size % quantization.WIDTH_MULTIPLE == 0 for size in linear.weight.shape)
        and linear.out_features not in kept
    )


class Call(NamedTuple):
    """A module's call."""

    arguments: tuple[Any, ...]
    keyword_arguments: Mapping[str, Any]
    output: Any


def record_calls(modules: Iterable[nn.Module], run: Callable[[], object]) -> dict[nn.Module, list[Call]]:
    """Run `run` and return the calls of each of `modules`."""
    calls: dict[nn.Module, list[Call]] = {module: [] for module in modules}
    with contextlib.ExitStack() as hooks:
        for module, own in calls.items():
            handle = module.register_forward_hook(partial(_record, own), with_kwargs=True)
            hooks.callback(handle.remove)
        run()
    return calls


def _record(calls: list[Call], _: nn.Module, *call: Any) -> None:
    calls.append(Call(*call))


def make_leaves(
    weights: Mapping[str, Tensor],
    gradient_factors: Sequence[GradientFactors],
    frozen: Collection[str] = frozenset(),
    *,
    num_tokens: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split parameters into constants and leaves of a graph, both by name.

    Constants are frozen weights, weights with `gradient_factors`, and quantized weights with their `QUANTIZED_PARTS`.
    Leaves are the other parameters and the placeholders.
    """
    own = dict(weights)
    codes = [name for name, each in own.items() if each.itemsize == 1 or name.rpartition(".")[2] in QUANTIZED_PARTS]
    names = dict.fromkeys((*(each.weight for each in gradient_factors), *frozen, *codes))
    fixed = {name: own.pop(name).detach() for name in names}
    leaves = {name: weight.detach().requires_grad_() for name, weight in own.items()}
    for each in gradient_factors:
        leaves |= each.make_placeholders(fixed[each.weight], num_tokens=num_tokens)
    return fixed, leaves
