"""Carries the numbers of a microbatch's routers from stage to stage, for the loss over all of them (`router_loss.py`).

    forward     hidden states, sums of the layers so far             -> next stage
    last stage  sums of all layers                                   -> loss, gradient of the sums
    backward    gradient of the hidden states, gradient of the sums  -> stage before

Both times they are fp32 [2, experts], the same for every layer in backward. They travel in the message of the hidden
states, in rows behind these, so that there is no further message and no further wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mobius.models.compiled import KeywordArguments
from mobius.models.experts.router_loss import TOKEN_MASK, RouterLoss, RouterLossValue

_BYTES = 2 * torch.float32.itemsize
"""Bytes of an expert's two numbers."""


@dataclass
class RouterContext:
    """A microbatch's routers in one stage's forward or backward."""

    token_mask: Tensor
    """fp32 [B, L]: 1 where a token counts, 0 at padding."""
    router_sums: Tensor
    """fp32 [2, experts]: the sums of the layers so far; in backward the gradient of those of all layers."""

    def arguments(self, own: Mapping[str, Any]) -> KeywordArguments:
        """Arguments by which a layer that has `own` gives the sums of its router, too."""
        return KeywordArguments(dict(own) | {TOKEN_MASK: self.token_mask})

    def add(self, sums: Tensor) -> None:
        """Take the sums of the next layer."""
        self.router_sums = self.router_sums + sums


def shape_with_numbers(shape: Sequence[int], dtype: torch.dtype, num_experts: int) -> tuple[int, int]:
    """Shape [rows, H] of the message of hidden states of `shape` [B, L, H] in `dtype`, with the numbers behind them."""
    batch, length, width = shape
    return batch * length - -_BYTES * num_experts // (width * dtype.itemsize), width


def sent_shape(shape: Sequence[int], dtype: torch.dtype, loss: RouterLoss | None) -> tuple[int, ...]:
    """Shape of the messages of a model's hidden states of `shape` [B, L, H]; `loss` None: routers have none."""
    return tuple(shape) if loss is None else shape_with_numbers(shape, dtype, loss.num_experts)


class PipelinedRouterLoss:
    """Formula of the loss over routers and form of its messages, which a rank's stages share."""

    def __init__(self, loss: RouterLoss, device: torch.device) -> None:
        self._loss, self._device = loss, device

    def token_mask(self, shape: Sequence[int], lengths: Tensor | None = None) -> Tensor:
        """1 where rows [batch, L] have tokens and 0 at their padding, fp32; `lengths` [batch] None: they are full."""
        if lengths is None:
            return torch.ones(*shape, device=self._device)
        return (torch.arange(shape[1], device=self._device) < lengths.unsqueeze(-1)).float()

    def context(self, token_mask: Tensor, router_sums: Tensor | None) -> RouterContext:
        """Begin a stage's turn with what came from its neighbour, or None before the first layer."""
        if router_sums is None:
            router_sums = torch.zeros(2, self._loss.num_experts, device=self._device)
        return RouterContext(token_mask, router_sums)

    def compute_loss(self, context: RouterContext, *, num_microbatches: int, loss_scale: float) -> RouterLossValue:
        """The microbatch's loss, behind the last layer; the turn then goes backward."""
        num_tokens = context.token_mask.sum()
        value = self._loss(context.router_sums, num_tokens, num_microbatches=num_microbatches, loss_scale=loss_scale)
        context.router_sums = value.gradient
        return value

    def pack(self, hidden: Tensor, context: RouterContext | None) -> Tensor:
        """The message of hidden states [B, L, H] or their gradient, a copy; without a turn its numbers mean nothing."""
        message = hidden.new_empty(shape_with_numbers(hidden.shape, hidden.dtype, self._loss.num_experts))
        num_rows = hidden.shape[:2].numel()
        message[:num_rows].view(hidden.shape).copy_(hidden)
        if context is not None:
            self._place(message, num_rows).copy_(context.router_sums.flatten().view(torch.uint8))
        return message

    def unpack(self, message: Tensor, batch_shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hidden states [B, L, H] as a view, and the numbers."""
        num_rows = batch_shape[0] * batch_shape[1]
        router_sums = self._place(message, num_rows).clone().view(torch.float32).view(2, -1)
        return message[:num_rows].view(*batch_shape, -1), router_sums

    def _place(self, message: Tensor, num_rows: int) -> Tensor:
        """The bytes of the numbers in a message with so many rows of hidden states."""
        return message[num_rows:].flatten().view(torch.uint8)[: _BYTES * self._loss.num_experts]
