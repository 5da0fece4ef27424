"""Steps on pairs of answers equal those of a plain model that reads each answer alone, in loss and every gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from harness.packed_rows import make_packed_batch
from harness.pipelines import Pipeline, assert_near, make_model
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from mobius.config.objective import LossType, ObjectiveConfig, ObjectiveName
from mobius.engine.step_inputs import StepBatch
from mobius.models.loss import EXISTS, TargetRows
from mobius.objectives.objective import REFERENCE
from mobius.objectives.registry import make_objective
from mobius.objectives.sequences import SequenceObjective, reference_scores

LENGTH, NEAR = 40, {"loss": 1e-5, "gradients": 1e-5}
ROWS = [[9, 8], [6, 7, 8, 5], [12, 11, 9, 6], [7, 9]]
"""Lengths of the answers of each row's pairs."""
WAYS = [  # ranks, stages of a rank, microbatches, slots
    (1, 1, 1, None),
    (1, 3, 4, 2),
    (2, 2, 2, 2),
    (2, 1, 4, None),
    (3, 2, 4, 1),
]
OBJECTIVES = {
    "dpo": ObjectiveConfig(objective=ObjectiveName.DPO, beta=0.5),
    "ipo, sft": ObjectiveConfig(objective=ObjectiveName.DPO, loss_type=LossType.IPO, sft_weight=0.3),
    "orpo": ObjectiveConfig(objective=ObjectiveName.ORPO),
    "simpo": ObjectiveConfig(objective=ObjectiveName.SIMPO),
}


def pairs(num_microbatches: int, objective: SequenceObjective) -> StepBatch:
    """Rows with the values of their sequences, and random reference scores."""
    batch, most = make_packed_batch(ROWS, LENGTH, num_microbatches), max(map(len, ROWS)) + 1
    places, exists = torch.full_like(batch.input_ids, most), torch.zeros(len(ROWS), most)
    for number, row in enumerate(ROWS):
        places[number, : sum(row)] = torch.arange(len(row)).repeat_interleave(torch.tensor(row))
        exists[number, : len(row)] = 1
    reference = -20 * exists * torch.rand(exists.shape, generator=torch.Generator().manual_seed(3))
    values = {EXISTS: exists, REFERENCE: reference}
    counts = objective.counts(TargetRows(batch.labels, {}, values, places))
    return replace(batch, sequence_values=values, sequences=places, counts=counts)


def plain_step(
    model: PreTrainedModel, batch: StepBatch, objective: SequenceObjective
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same step on log-probabilities of each answer alone, with gradients by autograd."""
    model.zero_grad()
    logps = torch.zeros(batch.labels.shape)
    for number, row in enumerate(ROWS):
        for place, length in enumerate(row):
            own = slice(start := sum(row[:place]), start + length)
            logits = model(input_ids=batch.input_ids[number : number + 1, own]).logits[0, :-1].log_softmax(-1)
            following = batch.input_ids[number, own][1:]
            logps = logps.clone()
            logps[number, start : start + length - 1] = logits.gather(-1, following.unsqueeze(-1)).squeeze(-1)
    targets = F.pad(batch.labels, (0, 1), value=-100)[:, 1:]
    rows = TargetRows(targets, {}, batch.sequence_values, batch.sequences, batch.input_ids)
    scored = objective.scored_targets(rows)
    sums = objective.sums(torch.where(scored != -100, logps, 0.0), rows)
    loss = torch.stack(
        [sums[part] / batch.counts[objective.number_counts[part]] for part in objective.loss_parts]
    ).sum()
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    return loss.detach(), {name: each.grad for name, each in named if each.grad is not None}


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@pytest.mark.parametrize(("num_ranks", "stages_per_rank", "num_microbatches", "num_slots"), WAYS)
def test_a_step_on_pairs_is_that_of_the_plain_model(
    name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int, num_slots: int | None
) -> None:
    objective = make_objective(OBJECTIVES[name])
    assert isinstance(objective, SequenceObjective)
    model, batch = make_model("llama", 6), pairs(num_microbatches, objective)
    pipeline = Pipeline(model, num_ranks, stages_per_rank, num_microbatches, num_slots, objective=objective)
    assert_near(pipeline.step(batch), plain_step(model, batch, objective), **NEAR)


def test_the_first_loss_is_exactly_ln_2_however_the_step_is_cut() -> None:
    """The reference scores are made with the rows and microbatches of the step."""
    objective = make_objective(ObjectiveConfig(objective=ObjectiveName.DPO))
    assert isinstance(objective, SequenceObjective)
    model = make_model("llama", 6)
    for num_ranks, stages_per_rank, num_microbatches, num_slots in WAYS:
        batch = pairs(num_microbatches, objective)
        pipeline = Pipeline(model, num_ranks, stages_per_rank, num_microbatches, num_slots, objective=objective)
        found = pipeline.evaluated(batch, reference_scores)
        scores = torch.cat([found[microbatch] for microbatch in sorted(found)])
        scored = replace(batch, sequence_values={**batch.sequence_values, REFERENCE: scores})
        loss = pipeline.run(scored)
        numbers = pipeline.numbers
        assert numbers["rewards/margins"] == numbers["rewards/chosen"] == numbers["rewards/rejected"] == 0.0
        assert float(loss) == pytest.approx(math.log(2), rel=1e-7)
