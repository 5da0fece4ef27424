"""Sends a microbatch's router sums from stage to stage, for the loss of all routers (`models/router_loss.py`).

    forward     hidden states, sums of the layers so far             -> next stage
    last stage  sums of all layers                                   -> loss, gradient of the sums
    backward    gradient of the hidden states, gradient of the sums  -> previous stage

The sums and their gradient are fp32 [2, experts]; every layer gets the same gradient. These numbers are appended as
rows to the message of hidden states, which saves a second message and wait. The base classes are for models without a
router loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mobius.models.compiled import KeywordArguments
from mobius.models.router_loss import TOKEN_MASK, RouterLoss

_BYTES = 2 * torch.float32.itemsize
"""Bytes of one expert's two sums."""


class RouterContext:
    """Router sums of a microbatch in the forward or backward of one stage; this base class has none."""

    router_sums: Tensor | None = None
    """fp32 [2, experts]. In forward: the sums of all layers so far. In backward: the gradient of these sums."""

    def arguments(self, layer: int, own: KeywordArguments) -> KeywordArguments:
        """Return `own`, the arguments of `layer`; a layer with a router also gets the token mask of its sums."""
        return own

    def add(self, sums: Tensor) -> None:
        """Add the router sums that a layer's forward returned."""

    def gradients(self, layer: int) -> Sequence[Tensor]:
        """Return the gradient of the router sums that `layer` returns; empty if the layer has no router."""
        return ()


NO_ROUTERS = RouterContext()


class _MicrobatchRouters(RouterContext):
    """Router sums of a microbatch of a model with a router loss."""

    def __init__(self, layers: frozenset[int], token_mask: Tensor, router_sums: Tensor) -> None:
        """`layers`: numbers of the layers with a router. `token_mask`: fp32 [B, L], 1 for a token, 0 for padding."""
        self._layers, self.token_mask = layers, token_mask
        self.router_sums: Tensor = router_sums

    def arguments(self, layer: int, own: KeywordArguments) -> KeywordArguments:
        return KeywordArguments(dict(own) | {TOKEN_MASK: self.token_mask}) if layer in self._layers else own

    def add(self, sums: Tensor) -> None:
        self.router_sums = self.router_sums + sums

    def gradients(self, layer: int) -> Sequence[Tensor]:
        return (self.router_sums,) if layer in self._layers else ()


class RouterMessages:
    """Message format and router loss of one rank's stages; this base class sends hidden states only, without loss."""

    total: Tensor | None = None
    """fp32 scalar: router loss of the step so far, averaged over microbatches, not multiplied by its coefficient."""

    def begin_step(self, num_microbatches: int, token_masks: Callable[[], Sequence[Tensor]]) -> None:
        """Start a step; `num_microbatches` is of all replicas, `token_masks` returns the masks of this pipeline."""

    def context(self, microbatch: int, router_sums: Tensor | None) -> RouterContext:
        """Return a microbatch's context in one stage; `router_sums` were received (None before the first layer)."""
        return NO_ROUTERS

    def add_loss(self, loss: Tensor, context: RouterContext, loss_scale: float) -> Tensor:
        """Return a microbatch's `loss` plus its router loss; afterwards `context` holds the gradient of the sums."""
        return loss

    def sent_shape(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
        """Return the shape of a message with hidden states of `shape` [B, L, H] in `dtype`.

        With a router loss, the shape is [rows, H]: rows of hidden states, then rows with the router sums.
        """
        return tuple(shape)

    def pack(self, hidden: Tensor, router_sums: Tensor | None) -> Tensor:
        """Return the message with `hidden` [B, L, H] and the router sums."""
        return hidden

    def unpack(self, message: Tensor, batch_shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states [B, L, H] as a view, and a copy of the router sums if there are any."""
        return message, None


class _PipelinedRouterLoss(RouterMessages):
    """Computes the router loss of a step, and appends router sums to messages."""

    def __init__(self, loss: RouterLoss) -> None:
        self._loss = loss
        self._num_microbatches, self._token_masks = 0, list[Tensor]()

    def begin_step(self, num_microbatches: int, token_masks: Callable[[], Sequence[Tensor]]) -> None:
        self._num_microbatches, self._token_masks = num_microbatches, [*token_masks()]
        self.total = self._token_masks[0].new_zeros(())

    def context(self, microbatch: int, router_sums: Tensor | None) -> RouterContext:
        mask = self._token_masks[microbatch]
        sums = mask.new_zeros(2, self._loss.num_experts) if router_sums is None else router_sums
        return _MicrobatchRouters(self._loss.layers, mask, sums)

    def add_loss(self, loss: Tensor, context: RouterContext, loss_scale: float) -> Tensor:
        assert isinstance(context, _MicrobatchRouters), "created by `context`"
        assert self.total is not None, "the step has begun"
        number, num_tokens = self._num_microbatches, context.token_mask.sum()
        value = self._loss(context.router_sums, num_tokens, num_microbatches=number, loss_scale=loss_scale)
        context.router_sums = value.gradient
        self.total.add_(value.loss / number)
        return loss + value.weighted

    def sent_shape(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
        batch, length, width = shape
        return batch * length - -_BYTES * self._loss.num_experts // (width * dtype.itemsize), width

    def pack(self, hidden: Tensor, router_sums: Tensor | None) -> Tensor:
        assert router_sums is not None, "the microbatch's context has router sums"
        message = hidden.new_empty(self.sent_shape(hidden.shape, hidden.dtype))
        num_rows = hidden.shape[:2].numel()
        message[:num_rows].view(hidden.shape).copy_(hidden)
        self._place(message, num_rows).copy_(router_sums.flatten().view(torch.uint8))
        return message

    def unpack(self, message: Tensor, batch_shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        num_rows = batch_shape[0] * batch_shape[1]
        router_sums = self._place(message, num_rows).clone().view(torch.float32).view(2, -1)
        return message[:num_rows].view(*batch_shape, -1), router_sums

    def _place(self, message: Tensor, num_rows: int) -> Tensor:
        """Return the bytes of the router sums, which follow the `num_rows` rows of hidden states."""
        return message[num_rows:].flatten().view(torch.uint8)[: _BYTES * self._loss.num_experts]


def router_messages(loss: RouterLoss | None) -> RouterMessages:
    """Return the message format and the router loss for a model whose router loss is `loss`."""
    return RouterMessages() if loss is None else _PipelinedRouterLoss(loss)
