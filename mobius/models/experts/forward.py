"""The forward of fused experts, as an experts implementation of transformers, so that every family takes it.

    tokens --router--> experts of each token, and their shares
    rows: a token as often as it has experts, sorted by expert --> product --> gate --> product --> times shares
    a token's rows are summed in its experts' order

No token is dropped, whatever the router does, and no shape depends on it. Nothing here waits for a GPU in bf16. On a
CPU operations and their order are those of transformers' `grouped_mm`, so that results are its bits.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mobius.models.experts.fused import fused_experts, matrices
from mobius.models.experts.products import grouped_product, weight_gradient

IMPLEMENTATION = "mobius_experts"
"""Name by which transformers finds `run_experts`."""


def use_experts(model: nn.Module) -> None:
    """Let the fused experts of `model`, be run by `run_experts`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for experts in fused_experts(model).values():
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_experts)
        cast(Any, experts.config)._experts_implementation = IMPLEMENTATION


def run_experts(module: nn.Module, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Each token's sum of its experts' outputs, as transformers calls it.

    Args:
        module: fused experts.
        hidden: tokens [T, H].
        chosen: experts of each token, integers [T, K].
        shares: their weights [T, K].
    """
    experts, num_chosen = cast(Any, module), chosen.shape[1]
    # Tokens of one expert are added up in this order, which for transformers' bits is not to be the stable one.
    sorted_experts, order = torch.sort(chosen.reshape(-1))
    numbers = torch.arange(experts.num_experts, device=chosen.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
    into, out_of = matrices(experts)
    rows = _multiply(experts, into, hidden[order // num_chosen], ends)
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    rows = _multiply(experts, out_of, rows, ends)
    rows = rows * shares.reshape(-1)[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return rows[places].view(len(hidden), num_chosen, -1).sum(1).to(hidden.dtype)


def _multiply(experts: Any, name: str, rows: Tensor, ends: Tensor) -> Tensor:
    """Rows times a matrix of their experts."""
    weight = getattr(experts, name)
    tensors = rows.to(weight.dtype), weight, ends
    return cast(Tensor, _Product.apply(*tensors, experts.is_transposed))  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """`grouped_product` with gradients; weights are [experts, out, in] or, transposed, [experts, in, out]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, is_transposed: bool) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        ctx.is_transposed = is_transposed
        return grouped_product(rows, weight if is_transposed else weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows = grouped_product(gradient, weight.transpose(1, 2) if ctx.is_transposed else weight, ends)
        left, right = (rows, gradient) if ctx.is_transposed else (gradient, rows)
        of_weight = weight_gradient(left, right, ends) if ctx.needs_input_grad[1] else None
        return of_rows, of_weight, None, None
