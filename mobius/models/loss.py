"""Head and cross entropy over slices of tokens: gradients are made in the forward, full logits never exist."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

HeadFunction = Callable[[dict[str, Tensor], Tensor], Tensor]
"""(weights, hidden [tokens, H]) -> logits [tokens, V] in the working dtype."""


def shift_labels(labels: Tensor) -> Tensor:
    """Move labels [B, L] so that position t holds the token that t predicts; the last position holds -100."""
    return F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()


def chunked_cross_entropy(
    head: HeadFunction,
    weights: dict[str, Tensor],
    gradients: dict[str, Tensor],
    hidden: Tensor,
    labels: Tensor,
    *,
    num_targets: int,
    loss_scale: float,
    chunk_tokens: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of shifted `labels` [B, L], summed and divided by `num_targets`, and its gradient.

    Args:
        weights: the head's parameters; `gradients`: fp32 tensors of the same names that their gradients are added to.
        hidden: [B, L, H] after the final norm.
        num_targets: target tokens of the whole step (all microbatches), not of this microbatch.
        loss_scale: factor on the gradients only (fp16 scaling).
        chunk_tokens: tokens whose logits exist at one time.

    Returns the loss (fp32 scalar, unscaled, no graph) and the gradient of `hidden`, both on `hidden`'s device.
    """
    tokens = hidden.detach().view(-1, hidden.shape[-1])
    targets = labels.view(-1)
    hidden_gradient = torch.empty_like(tokens)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    names = list(weights)
    with torch.enable_grad():
        for start in range(0, tokens.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            part = tokens[chunk].requires_grad_()
            leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
            logits = head(leaves, part)
            if softcap is not None:
                logits = torch.tanh(logits / softcap) * softcap
            summed = F.cross_entropy(logits.float(), targets[chunk], ignore_index=-100, reduction="sum")
            loss = summed / num_targets
            part_gradient, *weight_gradients = torch.autograd.grad(loss * loss_scale, [part, *leaves.values()])
            hidden_gradient[chunk] = part_gradient
            torch._foreach_add_([gradients[name] for name in names], weight_gradients)
            total += loss.detach()
    return total, hidden_gradient.view_as(hidden)
