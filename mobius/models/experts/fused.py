"""Fused experts: transformers stores each matrix of all experts of a layer in one tensor, [experts, out, in].

Such classes are recognized by attributes of the decorator `use_experts_implementation`, not by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_OPTIONS = ("has_gate", "has_bias", "is_transposed")
"""Attributes that the decorator sets on each module."""


def matrix_names(experts: nn.Module) -> tuple[str, str]:
    """Names of the input matrix and the output matrix of fused experts."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of fused experts, by name."""
    return {name: module for name, module in model.named_modules() if _is_fused(module)}


def _is_fused(module: nn.Module) -> bool:
    return hasattr(type(module).forward, "__wrapped__") and all(name in vars(module) for name in _OPTIONS)


def unsupported_experts_reason(model: nn.Module) -> str | None:
    """Reason (a clause after the family's name) why the model's experts cannot be run, or None if they can.

    Parameters of experts are recognized by `.experts.` in their names; shared experts, used by every token, are not.
    """
    fused = fused_experts(model)
    for name, module in fused.items():
        if reason := _other_form(module):
            return f"has experts with {reason}, which are not run here ({name})"
    known = tuple(f"{name}." for name in fused)
    others = sorted(name for name, _ in model.named_parameters() if ".experts." in name and not name.startswith(known))
    return f"has experts that are not held in one tensor per matrix (such as {others[0]})" if others else None


def _other_form(experts: Any) -> str | None:
    if experts.has_bias:
        return "biases"
    if getattr(experts, "has_post_expert_norm", False):
        return "norms of their own"
    shapes: Mapping[str, tuple[int, ...]] = {name: tuple(each.shape) for name, each in experts.named_parameters()}
    if shapes.keys() != {*matrix_names(experts)} or any(len(shape) != 3 for shape in shapes.values()):
        return f"other parameters than two matrices of three dimensions ({', '.join(shapes)})"
    return None
