"""Linear layers that return the two factors of their weight gradient instead of the gradient.

Autograd would allocate a gradient of the weight's size for every microbatch, in the working dtype, and a second pass
would add it to the sums. With the factors, one matrix product adds to the fp32 sums directly, without rounding.

    backward of y = x W^T       dx = dy W  is returned;   dW = dy^T x  is left to the caller, who gets dy and x

Autograd returns the factors as gradients of two placeholders: inputs whose values are never read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INPUT_PLACEHOLDER, OUTPUT_PLACEHOLDER = "input_placeholder", "output_placeholder"


class GradientFactors(Protocol):
    """Rule by which the gradient of one weight is returned as factors."""

    @property
    def weight(self) -> str:
        """Name of the weight within its block."""

    def make_placeholders(self, weight: Tensor, *, num_tokens: int) -> dict[str, Tensor]:
        """Graph inputs, by name, whose gradients are the factors; `weight` is the parameter's value."""

    def add_gradient(self, total: Tensor, found: Mapping[str, Tensor]) -> None:
        """Add the gradient to `total` (fp32) from its factors in `found`, by name; no-op if they are absent."""


@dataclass(frozen=True)
class LinearGradientFactors:
    """Gradient factors of a GradientFactorLinear; `linear` is empty if the block itself is the linear."""

    linear: str

    @property
    def weight(self) -> str:
        return f"{self.linear}.weight".removeprefix(".")

    @property
    def _names(self) -> tuple[str, str]:
        """Names of the input placeholder and the output placeholder."""
        return f"{self.linear}.{INPUT_PLACEHOLDER}".removeprefix(
            "."
        ), f"{self.linear}.{OUTPUT_PLACEHOLDER}".removeprefix(".")

    def make_placeholders(self, weight: Tensor, *, num_tokens: int) -> dict[str, Tensor]:
        return dict(zip(self._names, make_linear_placeholders(weight, num_tokens=num_tokens), strict=True))

    def add_gradient(self, total: Tensor, found: Mapping[str, Tensor]) -> None:
        of_input, of_output = self._names
        if of_output in found:
            add_linear_weight_gradient(total, found[of_output], found[of_input])


class GradientFactorLinear(nn.Linear):
    """`nn.Linear`; if `functional_call` passes placeholders, backward returns factors instead of a weight gradient."""

    input_placeholder: Tensor | None
    """[tokens, in_features]; its gradient is the input x."""
    output_placeholder: Tensor | None
    """[tokens, out_features]; its gradient is dy, the gradient of the output."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        for tap in (INPUT_PLACEHOLDER, OUTPUT_PLACEHOLDER):
            self.register_buffer(tap, None, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self.input_placeholder is None:
            return super().forward(input)
        tensors = input, self.weight, self.bias, self.input_placeholder, self.output_placeholder
        return cast(Tensor, _TappedProduct.apply(*tensors))  # type: ignore[no-untyped-call]


class _TappedProduct(torch.autograd.Function):
    """x W^T + b, with the factors of W's gradient as gradients of the placeholders."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        input_placeholder: Tensor,
        output_placeholder: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        bias_gradient = rows.sum(0) if ctx.has_bias else None
        # Detached: otherwise the input would keep its own graph alive.
        return gradient @ weight, None, bias_gradient, inputs.detach().reshape(-1, inputs.shape[-1]), rows


def replace_linears(module: nn.Module) -> None:
    """Replace every plain `nn.Linear` under `module` by a GradientFactorLinear on the meta device."""
    for name, child in list(module.named_modules()):
        if type(child) is nn.Linear:
            options = {"bias": child.bias is not None, "device": "meta", "dtype": child.weight.dtype}
            tapped = GradientFactorLinear(child.in_features, child.out_features, **options)
            module.set_submodule(name, tapped.train(child.training))


def find_linear_gradient_factors(
    module: nn.Module, run: Callable[[], object], *, num_tokens: int
) -> tuple[LinearGradientFactors, ...]:
    """Gradient factors of trained linears under `module` that `run` calls exactly once, on `num_tokens` rows.

    Other linears keep autograd's gradient: a second call would sum the factors, a linear that sees some tokens only
    (experts) has other shapes, and an output modified in place would give a wrong gradient.
    """
    linears = {
        child: name
        for name, child in module.named_modules()
        if isinstance(child, GradientFactorLinear) and child.weight.requires_grad
    }
    outputs: dict[nn.Module, list[Tensor]] = {linear: [] for linear in linears}

    def keep(linear: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> None:
        outputs[linear].append(output)

    with contextlib.ExitStack() as hooks:
        for linear in linears:
            hooks.callback(linear.register_forward_hook(keep).remove)
        run()

    def is_fit(made: list[Tensor]) -> bool:
        return [each.shape[:-1].numel() for each in made] == [num_tokens] and made[0]._version == 0

    return tuple(LinearGradientFactors(name) for linear, name in linears.items() if is_fit(outputs[linear]))


def make_linear_placeholders(weight: Tensor, *, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Placeholders for input and output of a linear with weight [out, in]: expanded views of one element."""
    element = torch.empty(1, dtype=weight.dtype, device=weight.device)
    input_placeholder, output_placeholder = (element.expand(num_tokens, width) for width in reversed(weight.shape))
    return input_placeholder.requires_grad_(), output_placeholder.requires_grad_()


def make_leaves(
    weights: Mapping[str, Tensor],
    gradient_factors: Sequence[GradientFactors],
    frozen: Collection[str] = frozenset(),
    *,
    num_tokens: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split parameters into constants and leaves of a graph, both by name.

    Constants are frozen weights and weights with `gradient_factors`; leaves are other parameters and placeholders.
    """
    own = dict(weights)
    fixed = {name: own.pop(name).detach() for name in (*(tap.weight for tap in gradient_factors), *frozen)}
    leaves = {name: weight.detach().requires_grad_() for name, weight in own.items()}
    for tap in gradient_factors:
        leaves |= tap.make_placeholders(fixed[tap.weight], num_tokens=num_tokens)
    return fixed, leaves


def add_linear_weight_gradient(total: Tensor, output_gradient: Tensor, inputs: Tensor) -> None:
    """Add dy^T x to `total` (fp32 [out, in]); dy [tokens, out] and x [tokens, in] have the working dtype.

    A GPU accumulates in fp32 in one kernel; on a CPU the product is rounded to the working dtype first.
    """
    factors = output_gradient.t(), inputs
    if total.device.type != "cuda":
        total.add_(torch.mm(*factors))
    elif inputs.dtype == torch.float32:
        torch.addmm(total, *factors, out=total)
    else:
        torch.addmm(total, *factors, out_dtype=torch.float32, out=total)
