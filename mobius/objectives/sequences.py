"""Objectives that are functions of the targets' log-probabilities, such as sums over each sequence.

The head passes twice over its chunks: once for the log-probabilities, and once for the gradient of the sum of
cross entropies times coefficients. The coefficients are the negative gradient of the objective with respect to the
log-probabilities, which autograd finds on a tensor of one number for each token. An objective on other outputs of the
head, such as scores, replaces these two passes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mobius.models.loss import EXISTS, IGNORE_INDEX, LossHead, TargetRows
from mobius.objectives.objective import Objective, StepScale


def sum_sequences(values: Tensor, rows: TargetRows) -> Tensor:
    """Return the sum of `values` [B, L] over each sequence, fp32 [B, S].

    Sums are made in fp64 and rounded once. So equal values give equal sums, wherever a row has the sequence.
    """
    assert rows.sequences is not None, "the rows have sequences"
    places = torch.arange(rows.sequence_values[EXISTS].shape[1], device=values.device)
    is_own = rows.sequences.unsqueeze(1) == places.view(1, -1, 1)
    return torch.where(is_own, values.unsqueeze(1).double(), 0.0).sum(-1).float()


def num_targets_of(rows: TargetRows) -> Tensor:
    """Return the number of targets of each sequence, fp32 [B, S], at least 1."""
    return sum_sequences(rows.targets != IGNORE_INDEX, rows).clamp(min=1)


class SequenceObjective(Objective):
    """Objective whose numbers are sums of functions of log-probabilities, each over a count of the step."""

    number_counts: ClassVar[Mapping[str, str]]
    """Number -> name of the count by which it is divided."""
    loss_parts: ClassVar[Sequence[str]] = ("loss",)
    """Numbers whose sum is the loss."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "number_counts" in vars(cls):
            cls.evaluation_names = tuple(cls.number_counts)
            cls.number_names = tuple(name for name in cls.number_counts if name != "loss")

    @abstractmethod
    def sums(self, outputs: Tensor, rows: TargetRows) -> Mapping[str, Tensor]:
        """Return the numbers of `number_counts` before they are divided, fp32 scalars.

        `outputs` are those of the method `outputs`. Parts of the loss are differentiable.
        """

    def outputs(self, head: LossHead, rows: TargetRows) -> Tensor:
        """Return what the head says of the rows: the log-probabilities of `scored_targets`, fp32 [B, L]."""
        return head.log_probabilities(self.scored_targets(rows))

    def backward(self, head: LossHead, rows: TargetRows, gradient: Tensor) -> Tensor:
        """Return the gradient of hidden states for the `gradient` of `outputs`."""
        return head.cross_entropy(self.scored_targets(rows), -gradient, divisor=1, loss_scale=1.0)[1]

    def scored_targets(self, rows: TargetRows) -> Tensor:
        """Return the tokens whose log-probabilities the objective needs, int64 [B, L], -100 for none."""
        return rows.targets

    def loss(self, head: LossHead, rows: TargetRows, scale: StepScale) -> tuple[Tensor, Tensor]:
        """As `Objective.loss`."""
        outputs = self.outputs(head, rows).requires_grad_()
        with torch.enable_grad():
            sums = self.sums(outputs, rows).items()
            numbers = {name: each / scale.counts[self.number_counts[name]] for name, each in sums}
            loss = torch.stack([numbers[name] for name in self.loss_parts]).sum()
            (gradient,) = torch.autograd.grad(loss * scale.loss_scale, outputs)
        hidden_gradient = self.backward(head, rows, gradient)
        return torch.stack([loss, *(numbers[name] for name in self.number_names)]).detach(), hidden_gradient

    def evaluate(self, head: LossHead, rows: TargetRows) -> Tensor:
        """Return the sums of `number_counts`, not divided."""
        sums = self.sums(self.outputs(head, rows), rows)
        return torch.stack([sums[name].double() for name in self.evaluation_names])

    def scores(self, sums: Mapping[str, float], scale: StepScale) -> dict[str, float]:
        """Return each number over its count."""
        numbers = {name: sums[name] / scale.counts[count] for name, count in self.number_counts.items()}
        return {"loss": sum(numbers[name] for name in self.loss_parts), **numbers}


def token_scores(head: LossHead, rows: TargetRows) -> Tensor:
    """Return the log-probability of each token that is a target, fp32 [B, L], else 0, as an `Evaluation`."""
    return F.pad(head.log_probabilities(rows.targets), (1, 0))[:, :-1]


def reference_scores(head: LossHead, rows: TargetRows) -> Tensor:
    """Return the sum of log-probabilities of each sequence, fp32 [B, S], as an `Evaluation`."""
    return sum_sequences(head.log_probabilities(rows.targets), rows)
