"""Gradient factors of expert matrices, which are added to the fp32 sums outside autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mobius.models.experts.fused import fused_experts, matrix_names
from mobius.models.experts.grouped_matmul import add_weight_gradient

_MOST_ROWS = 2**24
"""Largest count up to which fp32 holds every integer."""


def placeholder_names(weight: str) -> tuple[str, str, str]:
    """Placeholder names of matrix `weight`: left factor, right factor, and expert offsets."""
    return f"{weight}_left_tap", f"{weight}_right_tap", f"{weight}_ends_tap"


@dataclass(frozen=True)
class ExpertsGradientFactors:
    """Gradient factors of one parameter of fused experts."""

    weight: str
    """Name within the layer."""
    num_experts_per_token: int
    """Experts per token (top-k)."""

    def make_placeholders(self, weight: Tensor, *, num_tokens: int) -> dict[str, Tensor]:
        """Placeholders by name for the parameter's value: expanded views of one element each."""
        rows = num_tokens * self.num_experts_per_token
        assert rows <= _MOST_ROWS, "more rows than fp32 counts exactly"
        element = torch.empty(1, dtype=weight.dtype, device=weight.device)
        expert_offsets = torch.empty(1, dtype=torch.float32, device=weight.device).expand(len(weight))
        placeholders = *(element.expand(rows, width) for width in weight.shape[1:]), expert_offsets
        return {
            name: tap.requires_grad_() for name, tap in zip(placeholder_names(self.weight), placeholders, strict=True)
        }

    def add_gradient(self, total: Tensor, found: Mapping[str, Tensor]) -> None:
        """Add the gradient to `total` (fp32, shape of the weight) if `found` has its factors."""
        left, right, expert_offsets = placeholder_names(self.weight)
        if left in found:
            add_weight_gradient(total, found[left], found[right], found[expert_offsets].to(torch.int32))


def find_experts_gradient_factors(
    module: nn.Module, run: Callable[[], object], *, num_tokens: int
) -> tuple[ExpertsGradientFactors, ...]:
    """Factors of trained fused-expert matrices under `module` that `run` calls exactly once, on all `num_tokens`."""
    calls: dict[str, list[tuple[int, ...]]] = {name: [] for name in fused_experts(module)}

    def keep(name: str) -> Callable[..., None]:
        def keep_shape(_: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            top_k_index = given[1] if len(given) > 1 else named["top_k_index"]
            calls[name].append(tuple(top_k_index.shape))

        return keep_shape

    if not calls:
        return ()
    with contextlib.ExitStack() as hooks:
        for name in calls:
            handle = module.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True)
            hooks.callback(handle.remove)
        run()
    taps = list[ExpertsGradientFactors]()
    for name, shapes in calls.items():
        if len(shapes) == 1 and shapes[0][0] == num_tokens:
            experts = module.get_submodule(name)
            trained = [own for own in matrix_names(experts) if experts.get_parameter(own).requires_grad]
            taps += [ExpertsGradientFactors(f"{name}.{own}", shapes[0][1]) for own in trained]
    return tuple(taps)
