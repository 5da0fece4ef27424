"""Passes a microbatch's router sums from stage to stage, for the loss over all routers (`router_loss.py`).

    forward     hidden states, sums of the layers so far             -> next stage
    last stage  sums of all layers                                   -> loss, gradient of the sums
    backward    gradient of the hidden states, gradient of the sums  -> stage before

Both directions carry fp32 [2, experts]; in backward it is the same for every layer. The numbers are appended as rows to
the message of hidden states, which saves a second message and wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mobius.models.compiled import KeywordArguments
from mobius.models.router_loss import TOKEN_MASK, RouterLoss, RouterLossValue

_BYTES = 2 * torch.float32.itemsize
"""Bytes of the two numbers of one expert."""


@dataclass
class RouterContext:
    """Routers of a microbatch in the forward or backward of one stage."""

    token_mask: Tensor
    """fp32 [B, L]: 1 for a token, 0 for padding."""
    router_sums: Tensor
    """fp32 [2, experts]: sums of the layers so far; in backward the gradient of the sums of all layers."""

    def arguments(self, own: Mapping[str, Any]) -> KeywordArguments:
        """Return a layer's arguments `own` plus the mask that makes it return its router sums."""
        return KeywordArguments(dict(own) | {TOKEN_MASK: self.token_mask})

    def add(self, sums: Tensor) -> None:
        """Add the sums of the next layer."""
        self.router_sums = self.router_sums + sums


def sent_shape(shape: Sequence[int], dtype: torch.dtype, loss: RouterLoss | None) -> tuple[int, ...]:
    """Shape of the messages of hidden states of `shape` [B, L, H] in `dtype`.

    With a router loss, its numbers follow them in further rows: [rows, H].
    """
    if loss is None:
        return tuple(shape)
    batch, length, width = shape
    return batch * length - -_BYTES * loss.num_experts // (width * dtype.itemsize), width


class PipelinedRouterLoss:
    """Router loss formula and message format, shared by the stages of a rank."""

    def __init__(self, loss: RouterLoss, device: torch.device) -> None:
        self._loss, self._device = loss, device

    def sent_shape(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
        """Return the shape of a message of hidden states of `shape` [B, L, H] in `dtype`."""
        return sent_shape(shape, dtype, self._loss)

    def token_mask(self, shape: Sequence[int], lengths: Tensor | None = None) -> Tensor:
        """Return fp32 [batch, L]: 1 for tokens, 0 for padding. `lengths` [batch]; None: rows are full."""
        if lengths is None:
            return torch.ones(*shape, device=self._device)
        return (torch.arange(shape[1], device=self._device) < lengths.unsqueeze(-1)).float()

    def context(self, token_mask: Tensor, router_sums: Tensor | None) -> RouterContext:
        """Return the context of one stage for the received numbers; None before the first layer."""
        if router_sums is None:
            router_sums = torch.zeros(2, self._loss.num_experts, device=self._device)
        return RouterContext(token_mask, router_sums)

    def compute_loss(self, context: RouterContext, *, num_microbatches: int, loss_scale: float) -> RouterLossValue:
        """Return the microbatch's loss after the last layer; the context then holds the gradient of the sums."""
        num_tokens = context.token_mask.sum()
        value = self._loss(context.router_sums, num_tokens, num_microbatches=num_microbatches, loss_scale=loss_scale)
        context.router_sums = value.gradient
        return value

    def pack(self, hidden: Tensor, context: RouterContext | None) -> Tensor:
        """Return a message with a copy of [B, L, H] `hidden`; without `context` its router numbers are undefined."""
        message = hidden.new_empty(sent_shape(hidden.shape, hidden.dtype, self._loss))
        num_rows = hidden.shape[:2].numel()
        message[:num_rows].view(hidden.shape).copy_(hidden)
        if context is not None:
            self._place(message, num_rows).copy_(context.router_sums.flatten().view(torch.uint8))
        return message

    def unpack(self, message: Tensor, batch_shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return hidden states [B, L, H] as a view, and a copy of the numbers."""
        num_rows = batch_shape[0] * batch_shape[1]
        router_sums = self._place(message, num_rows).clone().view(torch.float32).view(2, -1)
        return message[:num_rows].view(*batch_shape, -1), router_sums

    def _place(self, message: Tensor, num_rows: int) -> Tensor:
        """Bytes of the numbers after the `num_rows` rows of hidden states."""
        return message[num_rows:].flatten().view(torch.uint8)[: _BYTES * self._loss.num_experts]
