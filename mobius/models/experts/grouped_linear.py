"""Matrix products of experts with gradients; weight gradients are full, or factors if there are placeholders.

    y = x W of each expert's rows       dx = dy W^T is returned;   dW = x^T dy is left to the caller, who gets x and dy

Autograd returns factors and expert offsets as gradients of three placeholders, whose values are never read.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from mobius.models.experts.grouped_matmul import grouped_matmul, grouped_weight_gradient


class ExpertMatrices(NamedTuple):
    """One matrix of all experts, with its three placeholders or None for each."""

    weight: Tensor
    """[experts, out, in], or [experts, in, out]."""
    is_transposed: bool
    """Whether the input dimension comes first."""
    left_placeholder: Tensor | None = None
    """[rows, second dimension of the weight]."""
    right_placeholder: Tensor | None = None
    """[rows, third dimension of the weight]."""
    offsets_placeholder: Tensor | None = None
    """fp32 [experts]: row offsets, which fp32 holds exactly up to 2**24."""


class Routing(NamedTuple):
    """Mapping between rows, sorted by expert, and tokens, which have K rows each."""

    order: Tensor
    """[rows]: index of each row in the flattened [tokens, K]."""
    inverse_order: Tensor
    """[tokens * K]: row of each such index."""
    expert_offsets: Tensor
    """int32 [experts]: end of each expert's rows."""


def grouped_linear(rows: Tensor, expert_offsets: Tensor, matrix: ExpertMatrices) -> Tensor:
    """Multiply each row by its expert's matrix: [rows, in] -> [rows, out]."""
    return cast(Tensor, _Product.apply(rows, expert_offsets, *matrix))  # type: ignore[no-untyped-call]


def permute_tokens(hidden: Tensor, routing: Routing, num_experts_per_token: int) -> Tensor:
    """Copy tokens to rows: [T, H] -> [rows, H]; backward sums the rows of a token without scatter-add."""
    tensors = hidden, routing.order, routing.inverse_order
    return cast(Tensor, _PermuteTokens.apply(*tensors, num_experts_per_token))  # type: ignore[no-untyped-call]


def multiply_and_unpermute(rows: Tensor, top_k_weights: Tensor, routing: Routing, matrix: ExpertMatrices) -> Tensor:
    """Multiply rows by their experts' matrices and sum them per token, weighted by [T, K]: [rows, in] -> [T, out].

    Backward recomputes no product: a weight's gradient is the dot product of its row and the row's unweighted gradient.
    """
    return cast(Tensor, _MultiplyAndUnpermute.apply(rows, top_k_weights, *routing, *matrix))  # type: ignore[no-untyped-call]


def _as_in_out(weight: Tensor, is_transposed: bool) -> Tensor:
    return weight if is_transposed else weight.transpose(1, 2)


def _of_weight(ctx: Any, rows: Tensor, gradient: Tensor, expert_offsets: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the five `ExpertMatrices` fields, from input rows and output gradient."""
    left, right = (rows, gradient) if ctx.is_transposed else (gradient, rows)
    if ctx.is_tapped:
        # Detached: otherwise the input would keep its own graph alive.
        return None, None, left.detach(), right.detach(), expert_offsets.to(torch.float32)
    return grouped_weight_gradient(left, right, expert_offsets) if ctx.is_trained else None, None, None, None, None


class _Product(torch.autograd.Function):
    """`grouped_matmul` with gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, expert_offsets: Tensor, weight: Tensor, is_transposed: bool, *placeholders: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, expert_offsets, weight)
        ctx.is_transposed, ctx.is_tapped, ctx.is_trained = (
            is_transposed,
            placeholders[0] is not None,
            weight.requires_grad,
        )
        return grouped_matmul(rows, _as_in_out(weight, is_transposed), expert_offsets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, expert_offsets, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows = grouped_matmul(gradient, _as_in_out(weight, not ctx.is_transposed), expert_offsets)
        return of_rows, None, *_of_weight(ctx, rows, gradient, expert_offsets)


class _PermuteTokens(torch.autograd.Function):
    """`permute_tokens` with gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, inverse_order: Tensor, num_experts_per_token: int) -> Tensor:
        ctx.save_for_backward(inverse_order)
        ctx.num_experts_per_token = num_experts_per_token
        return hidden[order // num_experts_per_token]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_order,) = ctx.saved_tensors
        return gradient[inverse_order].unflatten(0, (-1, ctx.num_experts_per_token)).sum(1), None, None, None


class _MultiplyAndUnpermute(torch.autograd.Function):
    """`multiply_and_unpermute` with gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        top_k_weights: Tensor,
        order: Tensor,
        inverse_order: Tensor,
        expert_offsets: Tensor,
        weight: Tensor,
        is_transposed: bool,
        *placeholders: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, top_k_weights, order, inverse_order, expert_offsets, weight)
        ctx.is_transposed, ctx.is_tapped, ctx.is_trained = (
            is_transposed,
            placeholders[0] is not None,
            weight.requires_grad,
        )
        made = grouped_matmul(rows, _as_in_out(weight, is_transposed), expert_offsets)
        tokens: Tensor = (made[inverse_order].unflatten(0, top_k_weights.shape) * top_k_weights.unsqueeze(-1)).sum(1)
        return tokens.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, top_k_weights, order, inverse_order, expert_offsets, weight = ctx.saved_tensors
        of_output = gradient[order // top_k_weights.shape[1]]
        unshared = grouped_matmul(of_output, _as_in_out(weight, not ctx.is_transposed), expert_offsets)
        own = top_k_weights.reshape(-1)[order].unsqueeze(-1)
        of_shares = (
            (unshared.float() * rows.float()).sum(-1)[inverse_order].view(top_k_weights.shape).to(top_k_weights.dtype)
        )
        of_rows = (unshared * own).to(rows.dtype)
        of_weight = _of_weight(ctx, (rows * own).to(rows.dtype), of_output, expert_offsets)
        return of_rows, of_shares, None, None, None, *of_weight
