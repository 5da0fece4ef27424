"""The prediction is told with what it rests on, and compared with steady steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mobius.plan.cards import CARDS, estimate_profile
from mobius.plan.forecast import Forecast, forecast, steady_seconds
from mobius.plan.memory_use import StepModel
from mobius.plan.model_files import shape_of_model
from mobius.plan.plan import make_plan
from mobius.plan.preference import Candidate
from mobius.plan.sensitivity import Resource
from mobius.plan.stage_costs import StepRules
from mobius.units import GIB

FORECAST = Forecast(2.0, Resource.PCIE, 0.05, "estimated (2 x L20)")


def test_the_line_says_how_long_what_limits_and_what_it_rests_on() -> None:
    assert FORECAST.describe() == (
        "predicted: 2.000 s per step, limited by PCIe (5% shorter if that were 10 % faster), estimated (2 x L20)"
    )


def test_the_first_two_steps_do_not_count_if_there_are_others() -> None:
    assert steady_seconds([9.0, 5.0, 2.4, 2.6]) == 2.5
    assert steady_seconds([9.0, 5.0]) == 7.0
    assert "measured 2.500: off by -20.0%" in FORECAST.compare([9.0, 5.0, 2.4, 2.6])


def test_a_step_that_only_computes_is_limited_by_compute() -> None:
    shape = replace(shape_of_model("1b"), layer_parameters=shape_of_model("1b").layer_parameters[:4])
    plan = make_plan(shape, num_ranks=1, num_stages=4, num_microbatches=2, num_slots=None)
    profile = estimate_profile(CARDS["L20"], shape, microbatch_tokens=2048, seq_length=512, num_ranks=1)
    model = StepModel(profile, StepRules(clips=False, message_bytes=GIB))
    found = forecast(plan, [Candidate(4, 4, 0)], shape, model)
    layers = 2 * 4 * (profile.layer_kinds[0].forward + profile.layer_kinds[0].backward)
    ends = 2 * (profile.embedding_forward + profile.embedding_backward + profile.loss)
    updates = shape.num_parameters * (1 / profile.gpu_adamw + 14 / profile.gpu_bandwidth)
    assert found.step_seconds == pytest.approx(layers + ends + updates + profile.step_overhead, rel=0.01)
    assert found.limit is Resource.COMPUTE
    assert found.gain == pytest.approx(1 / 11, abs=0.02)
    assert found.basis.startswith("estimated (1 x L20")
