"""A training loop takes the batches that it trains on, each before it is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.sessions import make_single_trainer

from mobius.data.batches import Batch, TrainingBatches
from mobius.engine.optimizer_stepper import OptimizerStepper, StepOutcome
from mobius.engine.step_sums import StepSums

OPTIONS = "--device cpu --num_stages 2 --num_chunks 2 --batch_size 4 --seq_length 16 --num_iterations 3"


def test_the_next_batch_is_made_before_a_step_is_waited_for_and_none_behind_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    take, apply = TrainingBatches.__next__, OptimizerStepper.apply

    def taken(self: TrainingBatches) -> Batch:
        events.append("batch")
        return take(self)

    def applied(self: OptimizerStepper, sums: StepSums, *, step: int) -> StepOutcome:
        events.append(f"end of step {step}")
        return apply(self, sums, step=step)

    monkeypatch.setattr(TrainingBatches, "__next__", taken)
    monkeypatch.setattr(OptimizerStepper, "apply", applied)
    trainer, session = make_single_trainer(tmp_path, OPTIONS)

    assert [metrics.step for metrics in trainer.train()] == [1, 2, 3]

    session.close()
    assert events == ["batch", "batch", "end of step 1", "batch", "end of step 2", "end of step 3"]
