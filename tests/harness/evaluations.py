"""Evaluations through a pipeline of rank-threads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from harness.local_transport import LocalTransport, run_rank_threads
from harness.pipelines import CPU, ModelWeights, Pipeline, _on_one_core, _parts
from transformers import PreTrainedModel

from mobius.engine.evaluation_sums import EvaluationSums
from mobius.engine.executor import StepBatch
from mobius.schedule.build import build_schedule
from mobius.schedule.spec import ScheduleSpec
from mobius.training.stages import RankStages


@dataclass(frozen=True)
class Case:
    """The cut of an evaluation."""

    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    num_slots: int | None
    resident: frozenset[int] = frozenset()
    loss_chunk_tokens: int = 4096
    sizes: tuple[int, ...] | None = None
    num_slices: int = 1


def evaluate(model: PreTrainedModel, batch: StepBatch, case: Case) -> EvaluationSums:
    """Evaluate by rank-threads; gradients that anybody made would be an error."""
    num_stages = case.num_ranks * case.stages_per_rank
    resident = frozenset(stage for stage in case.resident if stage < num_stages)
    settings = Pipeline(
        model,
        case.num_ranks,
        case.stages_per_rank,
        case.num_microbatches,
        case.num_slots,
        resident=resident,
        sizes=case.sizes,
        num_slices=case.num_slices,
    )
    packed = None if batch.documents is None and case.num_slices == 1 else torch.float32

    def work(transport: LocalTransport) -> EvaluationSums:
        own = _parts(model.config, CPU, transport.rank, packed, compiled=False, adapters=settings.adapters)
        plan = settings._plan(len(own.layers))
        stages = RankStages.allocate(
            own,
            plan,
            transport.rank,
            device=CPU,
            dtype=torch.float32,
            gradient_dtype=torch.float32,
            loss_chunk_tokens=case.loss_chunk_tokens,
            deferred_updates=range(plan.num_stages),
        )
        stages.load_weights(ModelWeights(model))
        schedule = build_schedule(
            ScheduleSpec.of(
                case.num_ranks,
                case.stages_per_rank,
                case.num_microbatches,
                case.num_slots,
                resident,
                num_slices=case.num_slices,
                is_evaluation=True,
            )
        )
        before = [stage.state.gradients.clone() for stage in stages.memory.values()]
        executor = stages.executor(schedule, transport)
        sums = executor.evaluate(batch)
        assert len(executor._saved_activations) == 0
        for stage, gradients in zip(stages.memory.values(), before, strict=True):
            assert torch.equal(stage.state.gradients, gradients)
        stages.close()
        return sums

    with _on_one_core():
        sums = run_rank_threads(case.num_ranks, work)
    for other in sums[: (num_stages - 1) % case.num_ranks] + sums[(num_stages - 1) % case.num_ranks + 1 :]:
        assert not other.losses.any()
        assert not other.num_correct.any()
    return sums[(num_stages - 1) % case.num_ranks]
