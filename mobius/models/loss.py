"""Objective of training: the last stage computes next-token cross entropy from logits and targets.

Forward also computes gradients, one chunk of tokens at a time, so the logits of all tokens never exist at once.
Evaluation uses the same chunks without gradients, and counts tokens whose argmax is the target.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mobius.models.compiled import CompiledFunction
from mobius.models.structure import ScalingSteps, apply_scaling, apply_scaling_with_derivative

IGNORE_INDEX = -100
"""Label of positions without a target."""

Head = Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]
"""hidden [tokens, H] -> logits [tokens, V] in the working dtype, and a backward function.

Backward takes the gradient of the logits, accumulates parameter gradients, and returns the gradient of `hidden`.
"""
Logits = Callable[[Tensor], Tensor]
"""hidden [tokens, H] -> logits [tokens, V] in the working dtype, without autograd graph."""


def shift_labels(labels: Tensor) -> Tensor:
    """Shift labels [B, L] so that position t holds the token that t predicts; the last position gets -100."""
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].contiguous()


class Objective:
    """Next-token cross entropy, the only objective: loss and gradients for training, sums for evaluation."""

    def __init__(self, steps: ScalingSteps = (), *, compiled: bool = False) -> None:
        """`steps` scale or bound the logits, for example softcap * tanh(logits / softcap).

        If `compiled`, a compiled function that reads logits twice replaces torch's cross entropy.
        """
        self._steps = steps
        self._compiled = CompiledFunction(_loss_and_gradient, name="losses") if compiled else None
        self._evaluate = CompiledFunction(_loss_and_hits, name="losses") if compiled else None

    def loss(
        self,
        head: Head,
        hidden: Tensor,
        targets: Tensor,
        *,
        num_targets: int,
        loss_scale: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        """Loss of `targets` [B, L] (`shift_labels`) for `hidden` [B, L, H] after the final norm, and the gradient.

        Args:
            num_targets: number of target tokens in the whole step (all microbatches), by which the sum is divided.
            loss_scale: factor on the gradients only (fp16 scaling).
            chunk_tokens: maximum number of tokens whose logits exist at the same time.

        Returns the loss (fp32 scalar, unscaled, no graph) and the gradient of `hidden`, both on `hidden`'s device.
        """
        tokens = hidden.detach().view(-1, hidden.shape[-1])
        targets = targets.view(-1)
        hidden_gradient = torch.empty_like(tokens)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, tokens.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits, backward = head(tokens[chunk])
            loss, logits_gradient = self._chunk_loss(logits, targets[chunk], num_targets, loss_scale)
            hidden_gradient[chunk] = backward(logits_gradient)
            total += loss
            del logits, backward, logits_gradient  # frees them before the next chunk allocates its logits
        return total, hidden_gradient.view_as(hidden)

    def evaluate(
        self, logits_of: Logits, hidden: Tensor, targets: Tensor, *, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Evaluate `targets` [B, L] for `hidden` [B, L, H] after the final norm, without gradients.

        Returns scalars on `hidden`'s device: summed cross entropy (fp32), and the number of targets with the top logit
        (int64). The logits of at most `chunk_tokens` tokens exist at the same time; chunk sums are added in order.
        """
        tokens, targets = hidden.view(-1, hidden.shape[-1]), targets.view(-1)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        num_hits = torch.zeros((), dtype=torch.int64, device=hidden.device)
        run = self._evaluate or _plain_loss_and_hits
        for start in range(0, tokens.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            with torch.no_grad():
                summed, hits = run(logits_of(tokens[chunk]), targets[chunk], self._steps)
            total += summed
            num_hits += hits
        return total, num_hits

    def _chunk_loss(
        self, logits: Tensor, targets: Tensor, num_targets: int, loss_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Loss of a chunk, and the gradient of loss * `loss_scale` with respect to `logits` [tokens, V]."""
        if self._compiled is not None:
            # Pass a tensor: a Python number would be a constant of the graph, but `num_targets` changes every step.
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
    # `where` rather than a product, because rows of ignored positions may hold non-finite values.
    gradient = torch.where(is_target.unsqueeze(-1), difference * factor, 0.0)
    return summed, (gradient * slope).to(logits.dtype)


def _loss_and_hits(logits: Tensor, targets: Tensor, steps: ScalingSteps) -> tuple[Tensor, Tensor]:
    """Summed cross entropy in fp32 throughout, and the number of targets with the top logit."""
    values = apply_scaling(logits.float(), steps)
    losses = torch.logsumexp(values, -1) - values.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(targets != IGNORE_INDEX, losses, 0.0).sum(), (values.argmax(-1) == targets).sum()


def _plain_loss_and_hits(logits: Tensor, targets: Tensor, steps: ScalingSteps) -> tuple[Tensor, Tensor]:
    """`_loss_and_hits`, computed with torch's cross entropy."""
    values = apply_scaling(logits, steps).float()
    hits = (values.argmax(-1) == targets).sum()  # -100 is never a token id
    return F.cross_entropy(values, targets, ignore_index=IGNORE_INDEX, reduction="sum"), hits
