"""Steps on rollouts equal those of a plain model that reads each alone; the first ratio is exactly 1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness.pipelines import Pipeline, assert_near, make_model
from harness.sequence_steps import NEAR, ROWS, WAYS, plain_step, rows_of_sequences

from mobius.config.objective import ObjectiveConfig, ObjectiveName, PolicyLoss
from mobius.data.token_store import ADVANTAGE, REWARD, SAMPLER
from mobius.engine.step_inputs import StepBatch
from mobius.models.loss import TargetRows
from mobius.objectives.objective import REFERENCE
from mobius.objectives.policy import TokenPolicy, make_policy
from mobius.objectives.sequences import token_scores


def rollouts(num_microbatches: int, objective: TokenPolicy) -> StepBatch:
    """Rows with random advantages, and random log-probabilities before step 1 and by a sampler."""
    batch, generator = rows_of_sequences(num_microbatches), torch.Generator().manual_seed(3)
    values = {name: torch.randn(len(ROWS), 5, generator=generator) for name in (ADVANTAGE, REWARD)}
    before = -4.5 - torch.rand(batch.input_ids.shape, generator=generator)
    of_tokens = {REFERENCE: before, SAMPLER: before + 0.3 * torch.randn(before.shape, generator=generator)}
    batch = replace(batch, sequence_values={**batch.sequence_values, **values}, token_values=of_tokens)
    rows = TargetRows(batch.labels, batch.token_values, batch.sequence_values, batch.sequences)
    return replace(batch, counts=objective.counts(rows))


@pytest.mark.parametrize("loss", PolicyLoss)
@pytest.mark.parametrize(("num_ranks", "stages_per_rank", "num_microbatches", "num_slots"), WAYS)
def test_a_step_on_rollouts_is_that_of_the_plain_model(
    loss: PolicyLoss, num_ranks: int, stages_per_rank: int, num_microbatches: int, num_slots: int | None
) -> None:
    kl_weight = 0.0 if loss is PolicyLoss.RLOO else 0.1
    objective = make_policy(ObjectiveConfig(objective=ObjectiveName.POLICY, policy_loss=loss, kl_weight=kl_weight))
    model, batch = make_model("llama", 6), rollouts(num_microbatches, objective)
    pipeline = Pipeline(model, num_ranks, stages_per_rank, num_microbatches, num_slots, objective=objective)
    assert_near(pipeline.step(batch), plain_step(model, batch, objective), **NEAR)


@pytest.mark.parametrize("loss", PolicyLoss)
def test_the_first_ratio_is_exactly_1_however_the_step_is_cut(loss: PolicyLoss) -> None:
    objective = make_policy(ObjectiveConfig(objective=ObjectiveName.POLICY, policy_loss=loss))
    model = make_model("llama", 6)
    for num_ranks, stages_per_rank, num_microbatches, num_slots in WAYS:
        batch = rollouts(num_microbatches, objective)
        pipeline = Pipeline(model, num_ranks, stages_per_rank, num_microbatches, num_slots, objective=objective)
        found = pipeline.evaluated(batch, token_scores)
        scores = torch.cat([found[microbatch] for microbatch in sorted(found)])
        pipeline.run(replace(batch, token_values={REFERENCE: scores}))
        numbers = pipeline.numbers
        names = ("ratio", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean")
        assert [numbers[name] for name in names] == [1.0, 0.0, 0.0, 0.0]
