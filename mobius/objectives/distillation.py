"""Distillation: a student learns the next tokens that a teacher expects, of which the most likely ones are known.

Teacher and student are compared over the teacher's K most likely tokens and one event for all other tokens. So the
divergence is 0 if they agree on these K + 1 probabilities, and never larger than over the whole vocabulary. Divergences
and temperature are TRL 1.16's, which does not multiply by the squared temperature either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mobius.config.objective import Divergence, ObjectiveConfig
from mobius.models.compiled import CompiledFunction
from mobius.models.loss import IGNORE_INDEX, LossHead, TargetRows
from mobius.models.structure import ScalingSteps, apply_scaling, apply_scaling_with_derivative
from mobius.objectives.cross_entropy import WEIGHT, CrossEntropy
from mobius.objectives.objective import StepScale, TeacherTokens

TEACHER_IDS: Final = "teacher_ids"
"""Value of each token: the tokens that the teacher found most likely in its place, int32 [K]."""
TEACHER_LOGPS: Final = "teacher_logps"
"""Value of each token: log-probabilities of these tokens and of all others together, fp16 [K + 1]."""
_LEAST: Final = 1e-7
"""Least probability of all other tokens: fp32 sums of the K probabilities are no more exact."""
_LOG_LEAST: Final = math.log(1.001 * _LEAST)


class Distillation(CrossEntropy):
    """Mean divergence from the teacher over the targets of a step, and a share of their cross entropy."""

    number_names = ("divergence", "cross_entropy")
    evaluation_names = ("divergence", *CrossEntropy.evaluation_names)

    def __init__(self, config: ObjectiveConfig) -> None:
        self.teacher = TeacherTokens(config.top_k_logprobs, config.temperature)
        self._kind, self._temperature, self._weight = config.divergence, config.temperature, config.sft_weight
        self._compiled = CompiledFunction(self._loss_and_gradient, name="divergences")

    def loss(self, head: LossHead, rows: TargetRows, scale: StepScale) -> tuple[Tensor, Tensor]:
        """As `Objective.loss`."""
        divisor = scale.counts.get(WEIGHT, scale.num_targets)
        function = self._compiled if head.is_compiled else self._loss_and_gradient
        # Pass a tensor: a Python number would be a constant of the graph, but the divisor changes every step.
        factor = torch.full((), scale.loss_scale / divisor, device=rows.targets.device)

        def of_chunk(logits: Tensor, chunk: slice, steps: ScalingSteps) -> tuple[Tensor, Tensor]:
            return function(logits, *_cut(rows, chunk), factor, steps)

        sums, gradient = head.with_logits(rows.targets, of_chunk)
        divergence, cross_entropy = sums / divisor
        return torch.stack([divergence + self._weight * cross_entropy, divergence, cross_entropy]), gradient

    def evaluate(self, head: LossHead, rows: TargetRows) -> Tensor:
        """Return summed divergence and cross entropy, weighted if the data are, and the number of hits."""

        def of_chunk(logits: Tensor, chunk: slice, steps: ScalingSteps) -> Tensor:
            targets, ids, teacher, weights = _cut(rows, chunk)
            student = _student(apply_scaling(logits, steps).float() / self._temperature, ids)
            divergence = _divergence(self._kind, teacher, student)[0]
            return torch.where(targets != IGNORE_INDEX, divergence if weights is None else divergence * weights, 0.0)

        divergence = head.of_logits(rows.targets, of_chunk).double().sum()
        return torch.cat([divergence.reshape(1), super().evaluate(head, rows)])

    def scores(self, sums: Mapping[str, float], scale: StepScale) -> dict[str, float]:
        """Return the loss and its parts, perplexity and token accuracy."""
        scores = super().scores(sums, scale)
        divergence = sums["divergence"] / scale.counts.get(WEIGHT, scale.num_targets)
        parts = {"divergence": divergence, "cross_entropy": scores["loss"]}
        return {**scores, "loss": divergence + self._weight * scores["loss"], **parts}

    def _loss_and_gradient(
        self,
        logits: Tensor,
        targets: Tensor,
        ids: Tensor,
        teacher: Tensor,
        weights: Tensor | None,
        factor: Tensor,
        steps: ScalingSteps,
    ) -> tuple[Tensor, Tensor]:
        """Sums of divergence and cross entropy, fp32 [2], and `factor` times the gradient of their sum."""
        values, slope = apply_scaling_with_derivative(logits.float(), steps)
        tempered = values / self._temperature
        student = _student(tempered, ids)
        divergence, slopes = _divergence(self._kind, teacher, student)
        # The probability of the rest falls as those of the K tokens rise, unless it is at its least.
        rest = torch.where(student[:, -1:] > _LOG_LEAST, torch.exp(student[:, :-1] - student[:, -1:]), 0.0)
        slopes = slopes[:, :-1] - slopes[:, -1:] * rest
        gradient = -slopes.sum(-1, keepdim=True) * torch.softmax(tempered, -1)
        gradient = gradient.scatter_add(-1, ids, slopes) / self._temperature
        log_sums, indices = torch.logsumexp(values, -1, keepdim=True), targets.clamp(min=0).unsqueeze(-1)
        losses = torch.stack([divergence, (log_sums - values.gather(-1, indices)).squeeze(-1)])
        if self._weight:
            classes = torch.arange(logits.shape[-1], device=logits.device)
            gradient = gradient + self._weight * (torch.exp(values - log_sums) - (classes == indices).float())
        if weights is not None:
            losses, factor = losses * weights, (factor * weights).unsqueeze(-1)
        is_target = targets != IGNORE_INDEX
        # torch.where instead of a product with the mask: rows of ignored positions may hold non-finite values.
        gradient = torch.where(is_target.unsqueeze(-1), gradient * factor * slope, 0.0)
        return torch.where(is_target, losses, 0.0).sum(-1), gradient.to(logits.dtype)


def empty_values(teacher: TeacherTokens, num_rows: int, length: int) -> dict[str, npt.NDArray[Any]]:
    """Return a teacher's values of the tokens of rows without targets."""
    return {
        TEACHER_IDS: np.zeros((num_rows, length, teacher.number), dtype=np.int32),
        TEACHER_LOGPS: np.zeros((num_rows, length, teacher.number + 1), dtype=np.float16),
    }


def teacher_numbers(head: LossHead, rows: TargetRows, *, teacher: TeacherTokens, vocab_size: int) -> Tensor:
    """Return tokens and log-probabilities of each position, fp32 [B, L, 2 K + 1], as an `Evaluation`.

    First the most likely of the first `vocab_size` tokens, then their log-probabilities and that of all other tokens.
    Models of one tokenizer may have different numbers of logits, because some are padding.
    """

    def of_chunk(logits: Tensor, _: slice, steps: ScalingSteps) -> Tensor:
        values = apply_scaling(logits[:, :vocab_size], steps).float() / teacher.temperature
        top = values.topk(teacher.number)
        return torch.cat([top.indices.float(), _with_rest(top.values - torch.logsumexp(values, -1, keepdim=True))], -1)

    return head.of_logits(rows.targets, of_chunk)


def _cut(rows: TargetRows, chunk: slice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return targets [n], the teacher's tokens [n, K] and log-probabilities [n, K + 1], and the targets' weights."""
    values = {name: value.flatten(0, 1)[chunk] for name, value in rows.token_values.items()}
    ids, logps = values[TEACHER_IDS].long(), values[TEACHER_LOGPS].float()
    return rows.targets.flatten()[chunk], ids, logps, values.get(WEIGHT)


def _with_rest(logps: Tensor) -> Tensor:
    """Return log-probabilities [n, K] followed by that of all other tokens."""
    total = torch.logsumexp(logps, -1, keepdim=True).clamp(max=-_LEAST)
    return torch.cat([logps, torch.log(-torch.expm1(total))], -1)


def _student(values: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities of the tokens `ids` and of all others, fp32 [n, K + 1], from logits [n, V]."""
    return _with_rest(values.gather(-1, ids) - torch.logsumexp(values, -1, keepdim=True))


def _divergence(kind: Divergence, teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divergence of log-probabilities [n, K + 1], fp32 [n], and its derivative by the student's."""
    if kind is Divergence.FORWARD:
        shares = torch.exp(teacher)
        return (shares * (teacher - student)).sum(-1), -shares
    shares = torch.exp(student)
    if kind is Divergence.REVERSE:
        return (shares * (student - teacher)).sum(-1), shares * (student - teacher + 1)
    middle = torch.logaddexp(teacher, student) - torch.log(torch.full((), 2.0, device=student.device))
    both = torch.exp(teacher) * (teacher - middle) + shares * (student - middle)
    return both.sum(-1) / 2, shares * (student - middle) / 2
