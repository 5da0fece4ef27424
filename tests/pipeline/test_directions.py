"""A step is exact in any order of forwards and backwards, though they share the way between two ranks."""

from __future__ import annotations

import pytest
from harness import pipelines
from harness.pipelines import Pipeline, assert_same_bits, make_batch, make_model, plain_step
from harness.schedules import CROSSING, in_order

from mobius.schedule.check import check
from mobius.schedule.schedule import Schedule
from mobius.schedule.spec import ScheduleSpec


@pytest.mark.parametrize("num_ranks", CROSSING)
def test_gradients_that_overtake_activations_change_no_bit(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def crossing(spec: ScheduleSpec) -> Schedule:
        schedule = in_order(spec, CROSSING[num_ranks])
        check(schedule)
        return schedule

    monkeypatch.setattr(pipelines, "build_schedule", crossing)
    model, batch = make_model("llama", 4), make_batch(2)
    assert_same_bits(Pipeline(model, num_ranks, 4 // num_ranks, 2, None).step(batch), plain_step(model, batch, 2))
