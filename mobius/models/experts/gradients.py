"""Products of experts with their gradients; those of weights are whole, or leave as factors where there are taps.

    y = x W of each expert's rows       dx = dy W^T goes on;    dW = x^T dy is left to the caller, who gets both factors

They come out of autograd as gradients of three inputs that nothing reads, the taps, with the ends of experts' rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from mobius.models.experts.products import grouped_product, weight_gradient


class Matrix(NamedTuple):
    """Matrices of all experts, and their taps or None three times."""

    weight: Tensor
    """[experts, out, in], or [experts, in, out]."""
    is_transposed: bool
    """Whether the input's width comes first."""
    left_tap: Tensor | None = None
    """[rows, second dimension of the weight]."""
    right_tap: Tensor | None = None
    """[rows, third dimension of the weight]."""
    ends_tap: Tensor | None = None
    """fp32 [experts]: numbers of rows, which fp32 holds up to 2**24."""


class Routing(NamedTuple):
    """How rows, sorted by expert, belong to tokens, each of which has as many."""

    order: Tensor
    """[rows]: place of each row among (token, its experts)."""
    places: Tensor
    """[tokens x experts of a token]: row of each place."""
    ends: Tensor
    """int32 [experts]: behind each expert's last row."""


def multiply(rows: Tensor, ends: Tensor, matrix: Matrix) -> Tensor:
    """[rows, in] -> [rows, out]."""
    return cast(Tensor, _Product.apply(rows, ends, *matrix))  # type: ignore[no-untyped-call]


def spread(hidden: Tensor, routing: Routing, num_chosen: int) -> Tensor:
    """Each row's token: [T, H] -> [rows, H]; gradients of a token's rows are summed without adding at places."""
    tensors = hidden, routing.order, routing.places
    return cast(Tensor, _Spread.apply(*tensors, num_chosen))  # type: ignore[no-untyped-call]


def multiply_and_gather(rows: Tensor, shares: Tensor, routing: Routing, matrix: Matrix) -> Tensor:
    """Each token's sum of its rows' products times their shares [T, K]: [rows, in] -> [T, out].

    Backward needs no product again: a share's gradient is that of its row's input before the share, times the input.
    """
    return cast(Tensor, _LastProduct.apply(rows, shares, *routing, *matrix))  # type: ignore[no-untyped-call]


def _as_in_out(weight: Tensor, is_transposed: bool) -> Tensor:
    return weight if is_transposed else weight.transpose(1, 2)


def _of_weight(ctx: Any, rows: Tensor, gradient: Tensor, ends: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of a Matrix, from those factors of it that are the input's and the output's."""
    left, right = (rows, gradient) if ctx.is_transposed else (gradient, rows)
    if ctx.is_tapped:
        # Detached: an input itself would bring its own graph along.
        return None, None, left.detach(), right.detach(), ends.to(torch.float32)
    return weight_gradient(left, right, ends) if ctx.is_trained else None, None, None, None, None


class _Product(torch.autograd.Function):
    """`grouped_product` with gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, weight: Tensor, is_transposed: bool, *taps: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, weight)
        ctx.is_transposed, ctx.is_tapped, ctx.is_trained = is_transposed, taps[0] is not None, weight.requires_grad
        return grouped_product(rows, _as_in_out(weight, is_transposed), ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows = grouped_product(gradient, _as_in_out(weight, not ctx.is_transposed), ends)
        return of_rows, None, *_of_weight(ctx, rows, gradient, ends)


class _Spread(torch.autograd.Function):
    """Tokens to rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, places: Tensor, num_chosen: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_chosen = num_chosen
        return hidden[order // num_chosen]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return gradient[places].unflatten(0, (-1, ctx.num_chosen)).sum(1), None, None, None


class _LastProduct(torch.autograd.Function):
    """Rows to tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        shares: Tensor,
        order: Tensor,
        places: Tensor,
        ends: Tensor,
        weight: Tensor,
        is_transposed: bool,
        *taps: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, shares, order, places, ends, weight)
        ctx.is_transposed, ctx.is_tapped, ctx.is_trained = is_transposed, taps[0] is not None, weight.requires_grad
        made = grouped_product(rows, _as_in_out(weight, is_transposed), ends)
        tokens: Tensor = (made[places].unflatten(0, shares.shape) * shares.unsqueeze(-1)).sum(1)
        return tokens.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, shares, order, places, ends, weight = ctx.saved_tensors
        of_output = gradient[order // shares.shape[1]]
        unshared = grouped_product(of_output, _as_in_out(weight, not ctx.is_transposed), ends)
        own = shares.reshape(-1)[order].unsqueeze(-1)
        of_shares = (unshared.float() * rows.float()).sum(-1)[places].view(shares.shape).to(shares.dtype)
        of_rows = (unshared * own).to(rows.dtype)
        of_weight = _of_weight(ctx, (rows * own).to(rows.dtype), of_output, ends)
        return of_rows, of_shares, None, None, None, *of_weight
