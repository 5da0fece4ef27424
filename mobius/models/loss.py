"""Head and cross entropy over chunks of tokens: the forward computes gradients, full logits are never materialized.

Evaluation uses the same chunks without gradients, and counts tokens where the argmax is the target.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mobius.models.compiled import CompiledFunction
from mobius.models.structure.scaling_steps import ScalingSteps, apply_scaling, apply_scaling_with_derivative

IGNORE_INDEX = -100
"""Label of positions without a target."""

Head = Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]
"""hidden [tokens, H] -> logits [tokens, V] in the working dtype, and their backward.

The backward takes the logits' gradient, accumulates parameter gradients, and returns the hidden states' gradient.
"""
Logits = Callable[[Tensor], Tensor]
"""hidden [tokens, H] -> logits [tokens, V] in the working dtype, without autograd graph."""


def shift_labels(labels: Tensor) -> Tensor:
    """Shift labels [B, L] so that position t holds the token that t predicts; the last position gets -100."""
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].contiguous()


class LogitsLoss:
    """Cross entropy of logits with its gradient: torch's own, or one compiled function that reads logits twice."""

    def __init__(self, steps: ScalingSteps = (), *, compiled: bool = False) -> None:
        """`steps` scale or bound the logits, for example softcap * tanh(logits / softcap)."""
        self._steps = steps
        self._compiled = CompiledFunction(_loss_and_gradient, name="losses") if compiled else None
        self._evaluate = CompiledFunction(_loss_and_hits, name="losses") if compiled else None

    def __call__(
        self, logits: Tensor, targets: Tensor, *, num_targets: int, loss_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Cross entropy summed over `targets` [tokens] (-100: ignored), divided by `num_targets`.

        Returns the loss (fp32 scalar, unscaled) and the gradient of loss * `loss_scale` with respect to `logits`
        [tokens, V], in their dtype.
        """
        if self._compiled is not None:
            # A tensor, because a Python number would be a graph constant, and `num_targets` changes every step.
            factor = torch.full((), loss_scale / num_targets, device=logits.device)
            summed, gradient = self._compiled(logits, targets, factor, self._steps)
            return summed / num_targets, gradient
        logits = logits.detach().requires_grad_()
        with torch.enable_grad():
            scaled = apply_scaling(logits, self._steps)
            summed = F.cross_entropy(scaled.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")
            loss = summed / num_targets
            (gradient,) = torch.autograd.grad(loss * loss_scale, logits)
        return loss.detach(), gradient

    def evaluate(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy summed over `targets` [tokens] (-100: ignored), and the number of targets with the top logit.

        Returns two scalars without gradients, fp32 and int64; both are 0 if there are no targets.
        """
        with torch.no_grad():
            if self._evaluate is not None:
                return self._evaluate(logits, targets, self._steps)
            values = apply_scaling(logits, self._steps).float()
            hits = (values.argmax(-1) == targets).sum()  # -100 is never a token id
            return F.cross_entropy(values, targets, ignore_index=IGNORE_INDEX, reduction="sum"), hits


def _loss_and_gradient(logits: Tensor, targets: Tensor, factor: Tensor, steps: ScalingSteps) -> tuple[Tensor, Tensor]:
    """Summed cross entropy, and `factor` times its gradient (softmax minus one-hot), in fp32 throughout."""
    values, slope = apply_scaling_with_derivative(logits.float(), steps)
    is_target = targets != IGNORE_INDEX
    indices = targets.clamp(min=0).unsqueeze(-1)
    log_sums = torch.logsumexp(values, -1, keepdim=True)
    losses = log_sums - values.gather(-1, indices)
    summed = torch.where(is_target, losses.squeeze(-1), 0.0).sum()
    classes = torch.arange(logits.shape[-1], device=logits.device)
    difference = torch.exp(values - log_sums) - (classes == indices).float()
    # where instead of a product: rows of ignored positions may hold non-finite values.
    gradient = torch.where(is_target.unsqueeze(-1), difference * factor, 0.0)
    return summed, (gradient * slope).to(logits.dtype)


def _loss_and_hits(logits: Tensor, targets: Tensor, steps: ScalingSteps) -> tuple[Tensor, Tensor]:
    """Summed cross entropy in fp32 throughout, and the number of targets with the top logit."""
    values = apply_scaling(logits.float(), steps)
    losses = torch.logsumexp(values, -1) - values.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(targets != IGNORE_INDEX, losses, 0.0).sum(), (values.argmax(-1) == targets).sum()


def chunked_evaluation(
    logits_of: Logits, hidden: Tensor, labels: Tensor, *, chunk_tokens: int, logits_loss: LogitsLoss
) -> tuple[Tensor, Tensor]:
    """Evaluate shifted `labels` [B, L] for `hidden` [B, L, H] after the final norm.

    Returns scalars on `hidden`'s device: summed cross entropy (fp32), and the number of targets with the top logit
    (int64). Only `chunk_tokens` tokens have logits at a time; chunk sums are added in order.
    """
    tokens, targets = hidden.view(-1, hidden.shape[-1]), labels.view(-1)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    num_hits = torch.zeros((), dtype=torch.int64, device=hidden.device)
    for start in range(0, tokens.shape[0], chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        summed, hits = logits_loss.evaluate(logits_of(tokens[chunk]), targets[chunk])
        total += summed
        num_hits += hits
    return total, num_hits


def chunked_cross_entropy(
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    *,
    num_targets: int,
    loss_scale: float,
    chunk_tokens: int,
    logits_loss: LogitsLoss,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of shifted `labels` [B, L] for `hidden` [B, L, H] after the final norm, and its gradient.

    Args:
        num_targets: target tokens of the whole step (all microbatches), the divisor of the sum.
        loss_scale: factor on the gradients only (fp16 scaling).
        chunk_tokens: tokens whose logits exist at a time.

    Returns the loss (fp32 scalar, unscaled, no graph) and the gradient [B, L, H], both on `hidden`'s device.
    """
    tokens = hidden.detach().view(-1, hidden.shape[-1])
    targets = labels.view(-1)
    hidden_gradient = torch.empty_like(tokens)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, tokens.shape[0], chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        logits, backward = head(tokens[chunk])
        loss, logits_gradient = logits_loss(logits, targets[chunk], num_targets=num_targets, loss_scale=loss_scale)
        hidden_gradient[chunk] = backward(logits_gradient)
        total += loss
        del logits, backward, logits_gradient  # before the next chunk's are allocated
    return total, hidden_gradient.view_as(hidden)
