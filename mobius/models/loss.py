"""Passes of the final head over a microbatch, chunk by chunk of tokens, so that full logits never exist.

    cross_entropy        loss and gradients of the targets' cross entropy, weighted or not, in one pass
    log_probabilities    of each target, without gradients
    evaluate             summed cross entropy, and the number of targets with the top logit, without gradients
    scores               of a reward model: output at the end of each sequence, and its backward
    with_logits          any loss of each chunk's logits, and its backward
    of_logits            any function of each token's logits, without gradients

Objectives (`mobius/objectives`) are made of these passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from mobius.models.compiled import CompiledFunction
from mobius.models.structure import ScalingSteps, apply_scaling, apply_scaling_with_derivative

IGNORE_INDEX = -100
"""Label of positions without a target."""
EXISTS: Final = "exists"
"""Value of each sequence: 1, and 0 in the places of a row that no sequence fills."""

Head = Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]
"""hidden [tokens, H] -> logits [tokens, V] in the working dtype, and their backward.

The backward takes the logits' gradient, accumulates parameter gradients, and returns the hidden states' gradient.
"""
Logits = Callable[[Tensor], Tensor]
"""hidden [tokens, H] -> logits [tokens, V] in the working dtype, without autograd graph."""


def shift_labels(labels: Tensor) -> Tensor:
    """Shift labels [B, L] so that position t holds the token that t predicts; the last position gets -100."""
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].contiguous()


def shift_left(values: Tensor) -> Tensor:
    """Shift values of tokens [B, L, ...] so that position t has those of the token that t predicts; 0 at the end."""
    return F.pad(values, (0, 0) * (values.dim() - 2) + (0, 1))[:, 1:].contiguous()


@dataclass(frozen=True)
class TargetRows:
    """Targets of a microbatch's rows, and values by name that an objective reads."""

    targets: Tensor
    """int64 [B, L]: next token at each position (`shift_labels`), -100 where there is no target."""
    token_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> fp32 [B, L]: a value of each target, such as its weight; or several values of each, [B, L, K]."""
    sequence_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> fp32 [B, S]: a value of each of the sequences in a row."""
    sequences: Tensor | None = None
    """int64 [B, L]: place of each position's sequence in its row, S in padding; None for plain samples."""
    tokens: Tensor | None = None
    """int64 [B, L]: token ids, for objectives on sequences; None for plain samples."""

    def next_tokens(self) -> Tensor:
        """Return the next token of the same sequence at each position, target or not; -100 at a sequence's end."""
        assert self.tokens is not None, "the rows have sequences"
        assert self.sequences is not None, "the rows have sequences"
        is_inside = (self.sequences[:, 1:] == self.sequences[:, :-1]) & self.is_in_sequence[:, 1:]
        return torch.where(F.pad(is_inside, (0, 1)), shift_left(self.tokens), IGNORE_INDEX)

    def ends(self, padding: int | None) -> Tensor:
        """Return the position of each sequence's last token other than `padding`, int64 [B, S]; 0 without a sequence.

        transformers reads scores there, also where the padding token is the end token.
        """
        assert self.tokens is not None, "the rows have sequences"
        assert self.sequences is not None, "the rows have sequences"
        places = torch.arange(self.sequence_values[EXISTS].shape[1], device=self.tokens.device)
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        own = self.sequences if padding is None else torch.where(self.tokens == padding, -1, self.sequences)
        return torch.where(own.unsqueeze(1) == places.view(1, -1, 1), positions, 0).amax(-1)

    @property
    def is_in_sequence(self) -> Tensor:
        """Bool [B, L]: False in padding."""
        assert self.sequences is not None, "the rows have sequences"
        return self.sequences < self.sequence_values[EXISTS].shape[1]


class TokenLosses:
    """Losses of a chunk's targets, from the chunk's logits."""

    def __init__(self, steps: ScalingSteps = (), *, compiled: bool = False) -> None:
        """`steps` scale or bound the logits, for example softcap * tanh(logits / softcap).

        `compiled`: compiled functions that read logits twice, instead of torch's own cross entropy.
        """
        self.steps = steps
        self.loss_and_gradient = CompiledFunction(_loss_and_gradient, name="losses") if compiled else None
        self.loss_and_hits = CompiledFunction(_loss_and_hits, name="losses") if compiled else _plain_loss_and_hits
        self.log_probabilities = (
            CompiledFunction(_log_probabilities, name="log-probabilities") if compiled else _plain_log_probabilities
        )

    def weighted(
        self, logits: Tensor, targets: Tensor, weights: Tensor | None, *, divisor: float, loss_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Loss of a chunk, and the gradient of loss * `loss_scale` with respect to `logits` [tokens, V]."""
        if self.loss_and_gradient is not None:
            # Pass a tensor: a Python number would be a constant of the graph, but `divisor` changes every step.
            factor = torch.full((), loss_scale / divisor, device=logits.device)
            summed, gradient = self.loss_and_gradient(logits, targets, factor, self.steps, weights)
            return summed / divisor, gradient
        logits = logits.detach().requires_grad_()
        with torch.enable_grad():
            # No name for the fp32 logits: it would keep them in memory during backward.
            summed = F.cross_entropy(
                apply_scaling(logits, self.steps).float(),
                targets,
                ignore_index=IGNORE_INDEX,
                reduction="sum" if weights is None else "none",
            )
            summed = summed if weights is None else (summed * weights).sum()
            loss = summed / divisor
            (gradient,) = torch.autograd.grad(loss * loss_scale, logits)
        return loss.detach(), gradient


class LossHead:
    """Final head on the hidden states of one microbatch."""

    def __init__(
        self,
        losses: TokenLosses,
        hidden: Tensor,
        logits: Logits,
        head: Head | None = None,
        *,
        chunk_tokens: int,
        padding: int | None = None,
    ) -> None:
        """`hidden` [B, L, H] comes from the final norm; the logits of `chunk_tokens` tokens exist at a time.

        Without training, `head` is missing. `padding`: token at which no score is read.
        """
        self._losses, self._logits, self._head, self._chunk_tokens = losses, logits, head, chunk_tokens
        self._padding = padding
        self._shape, self._tokens = hidden.shape, hidden.detach().view(-1, hidden.shape[-1])

    def cross_entropy(
        self, targets: Tensor, weights: Tensor | None = None, *, divisor: float, loss_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Sum of cross entropies of `targets` [B, L] times `weights` fp32 [B, L], / `divisor`; and the sum's gradient.

        `loss_scale` is a factor on the gradients only (fp16 scaling). Returns the loss (fp32 scalar, unscaled, no
        graph) and the gradient of `hidden` [B, L, H].
        """

        def of_chunk(logits: Tensor, chunk: slice, _: ScalingSteps) -> tuple[Tensor, Tensor]:
            own = None if weights is None else weights.view(-1)[chunk]
            return self._losses.weighted(logits, targets.view(-1)[chunk], own, divisor=divisor, loss_scale=loss_scale)

        return self.with_logits(targets, of_chunk)

    def log_probabilities(self, targets: Tensor) -> Tensor:
        """Log-probabilities of the targets, fp32 [B, L], 0 where there is no target; without gradients."""
        flat, function = targets.view(-1), self._losses.log_probabilities
        logps = self.of_logits(targets, lambda logits, chunk, steps: function(logits, flat[chunk], steps))
        return logps.view(targets.shape)

    def evaluate(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Summed cross entropy (fp32 scalar), and the number of targets with the top logit (int64 scalar).

        Without gradients; sums of chunks are added in order.
        """
        total, num_hits = self._zero(torch.float32), self._zero(torch.int64)
        for chunk, of_chunk in self._chunks(targets):
            with torch.no_grad():
                logits = self._logits(self._tokens[chunk])
                summed, hits = self._losses.loss_and_hits(logits, of_chunk, self._losses.steps)
            total += summed
            num_hits += hits
        return total, num_hits

    def scores(self, rows: TargetRows) -> Tensor:
        """Score of each sequence, fp32 [B, S]: the head's only output at its end; without gradients."""
        ends = self._ends(rows)
        with torch.no_grad():
            return self._logits(self._tokens[ends.view(-1)]).float().view(ends.shape)

    def scores_backward(self, rows: TargetRows, gradient: Tensor) -> Tensor:
        """Run the backward of `scores` for their `gradient` [B, S]; return the gradient of `hidden` [B, L, H]."""
        assert self._head is not None, "an evaluation has no backward"
        ends = self._ends(rows).view(-1)
        outputs, backward = self._head(self._tokens[ends])
        # Places without a sequence have no gradient, so each sum has at most one summand other than 0.
        hidden_gradient = torch.zeros_like(self._tokens)
        hidden_gradient.index_add_(0, ends, backward(gradient.to(outputs.dtype).view(outputs.shape)))
        return hidden_gradient.view(self._shape)

    def with_logits(
        self, targets: Tensor, loss: Callable[[Tensor, slice, ScalingSteps], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Sums of a loss, and the gradient of `hidden` [B, L, H].

        `loss` takes the logits [tokens, V] of a chunk of all positions, the chunk, and the scaling steps. It returns
        its sums over the chunk, fp32 [n], and the gradient of the logits.
        """
        assert self._head is not None, "an evaluation has no backward"
        hidden_gradient, total = torch.empty_like(self._tokens), self._zero(torch.float32)
        for chunk, _ in self._chunks(targets):
            logits, backward = self._head(self._tokens[chunk])
            sums, logits_gradient = loss(logits, chunk, self._losses.steps)
            hidden_gradient[chunk] = backward(logits_gradient)
            total = total + sums
            del logits, backward, logits_gradient  # free them before the next chunk allocates its tensors
        return total, hidden_gradient.view(self._shape)

    def of_logits(self, targets: Tensor, function: Callable[[Tensor, slice, ScalingSteps], Tensor]) -> Tensor:
        """`function` of the logits of each position, fp32 [B, L, n]; arguments as in `with_logits`."""
        results = []
        for chunk, _ in self._chunks(targets):
            with torch.no_grad():
                results.append(function(self._logits(self._tokens[chunk]), chunk, self._losses.steps))
        return torch.cat(results).view(*targets.shape, -1)

    @property
    def is_compiled(self) -> bool:
        """Whether functions of logits run compiled."""
        return self._losses.loss_and_gradient is not None

    def _ends(self, rows: TargetRows) -> Tensor:
        """Return the ends of sequences as positions in all rows, int64 [B, S]."""
        num_rows, length = rows.targets.shape
        starts = torch.arange(0, num_rows * length, length, device=rows.targets.device)
        return rows.ends(self._padding) + starts.unsqueeze(1)

    def _chunks(self, targets: Tensor) -> list[tuple[slice, Tensor]]:
        """Return the position and the targets of each chunk."""
        flat, size = targets.view(-1), self._chunk_tokens
        return [(slice(start, start + size), flat[start : start + size]) for start in range(0, len(flat), size)]

    def _zero(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros((), dtype=dtype, device=self._tokens.device)


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, factor: Tensor, steps: ScalingSteps, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Summed (weighted) cross entropy, and `factor` times its gradient (softmax minus one-hot), in fp32 throughout."""
    values, slope = apply_scaling_with_derivative(logits.float(), steps)
    is_target = targets != IGNORE_INDEX
    indices = targets.clamp(min=0).unsqueeze(-1)
    log_sums = torch.logsumexp(values, -1, keepdim=True)
    losses = (log_sums - values.gather(-1, indices)).squeeze(-1)
    if weights is not None:
        losses, factor = losses * weights, (factor * weights).unsqueeze(-1)
    summed = torch.where(is_target, losses, 0.0).sum()
    classes = torch.arange(logits.shape[-1], device=logits.device)
    difference = torch.exp(values - log_sums) - (classes == indices).float()
    # torch.where instead of a product with the mask: rows of ignored positions may hold non-finite values.
    gradient = torch.where(is_target.unsqueeze(-1), difference * factor, 0.0)
    return summed, (gradient * slope).to(logits.dtype)


def _loss_and_hits(logits: Tensor, targets: Tensor, steps: ScalingSteps) -> tuple[Tensor, Tensor]:
    """Summed cross entropy in fp32 throughout, and the number of targets with the top logit."""
    values = apply_scaling(logits.float(), steps)
    losses = torch.logsumexp(values, -1) - values.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(targets != IGNORE_INDEX, losses, 0.0).sum(), (values.argmax(-1) == targets).sum()


def _plain_loss_and_hits(logits: Tensor, targets: Tensor, steps: ScalingSteps) -> tuple[Tensor, Tensor]:
    """`_loss_and_hits` by torch's own cross entropy."""
    values = apply_scaling(logits, steps).float()
    hits = (values.argmax(-1) == targets).sum()  # no hit without a target: -100 is no token id
    return F.cross_entropy(values, targets, ignore_index=IGNORE_INDEX, reduction="sum"), hits


def _log_probabilities(logits: Tensor, targets: Tensor, steps: ScalingSteps) -> Tensor:
    """Log-probability of each target, in fp32 throughout; 0 where there is no target."""
    values = apply_scaling(logits.float(), steps)
    logs = values.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1) - torch.logsumexp(values, -1)
    return torch.where(targets != IGNORE_INDEX, logs, 0.0)


def _plain_log_probabilities(logits: Tensor, targets: Tensor, steps: ScalingSteps) -> Tensor:
    """`_log_probabilities` by torch's own cross entropy."""
    values = apply_scaling(logits, steps).float()
    return -F.cross_entropy(values, targets, ignore_index=IGNORE_INDEX, reduction="none")
