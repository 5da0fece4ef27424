"""A head without a model: logits are hidden states times a weight."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mobius.models.loss import LossHead, TokenLosses


def head_of(hidden: Tensor, weight: Tensor, gradient: Tensor, chunk_tokens: int, *, compiled: bool) -> LossHead:
    """Head on `hidden` [B, L, H] with `weight` [V, H], whose gradient is added to `gradient`."""

    def head(part: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        def backward(of_logits: Tensor) -> Tensor:
            gradient.add_(of_logits.T @ part)
            return of_logits @ weight

        return part @ weight.T, backward

    losses = TokenLosses(compiled=compiled)
    return LossHead(losses, hidden, lambda part: part @ weight.T, head, chunk_tokens=chunk_tokens)
