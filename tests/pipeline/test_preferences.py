"""Steps on pairs of answers equal those of a plain model that reads each answer alone, in loss and every gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from harness.pipelines import Pipeline, assert_near, make_model
from harness.sequence_steps import NEAR, WAYS, plain_step, rows_of_sequences

from mobius.config.objective import LossType, ObjectiveConfig, ObjectiveName
from mobius.engine.step_inputs import StepBatch
from mobius.models.loss import EXISTS, TargetRows
from mobius.objectives.objective import KL, REFERENCE
from mobius.objectives.registry import make_objective
from mobius.objectives.sequences import SequenceObjective, reference_scores

OBJECTIVES = {
    "dpo": ObjectiveConfig(objective=ObjectiveName.DPO, beta=0.5),
    "ipo, sft": ObjectiveConfig(objective=ObjectiveName.DPO, loss_type=LossType.IPO, sft_weight=0.3),
    "orpo": ObjectiveConfig(objective=ObjectiveName.ORPO),
    "simpo": ObjectiveConfig(objective=ObjectiveName.SIMPO),
    "kto": ObjectiveConfig(objective=ObjectiveName.KTO, beta=0.5, undesirable_weight=1.5),
}


def pairs(num_microbatches: int, objective: SequenceObjective) -> StepBatch:
    """Rows with random reference scores."""
    batch = rows_of_sequences(num_microbatches)
    exists = batch.sequence_values[EXISTS]
    reference = -20 * exists * torch.rand(exists.shape, generator=torch.Generator().manual_seed(3))
    values = {EXISTS: exists, REFERENCE: reference, KL: 0.3 * exists, "label": exists.clone()}
    values["label"][:, 1::3] = 0
    counts = objective.counts(TargetRows(batch.labels, {}, values, batch.sequences))
    return replace(batch, sequence_values=values, counts=counts)


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
