"""What a run is predicted to take: told before it trains, and compared with what it took.

It neither predicts (planner/) nor measures (trainer.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mobius.plan.memory_use import StepModel, chosen_stages, schedule_of_slots
from mobius.plan.plan import Plan
from mobius.plan.preference import Candidate
from mobius.plan.profile import Profile
from mobius.plan.sensitivity import Resource, limiting_resource
from mobius.plan.shape import ModelShape
from mobius.plan.simulation import simulated_seconds
from mobius.plan.stage_costs import stage_costs

UNSTEADY_STEPS = 2
"""At the start of a run: memory is touched for the first time. They do not count if there are others."""


@dataclass(frozen=True)
class Forecast:
    """A predicted step, and what it rests on."""

    step_seconds: float
    limit: Resource
    gain: float
    """The share of a step that `limit` would save if it were 1.1 times as fast."""
    basis: str
    """Whether the rates are measured or estimated, and of what."""

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"predicted: {self.step_seconds:.3f} s per step, limited by {self.limit} ({self.gain:.0%} shorter if that "
            f"were 10 % faster), {self.basis}"
        )

    def compare(self, step_seconds: Sequence[float]) -> str:
        """One line: what was predicted beside the median of what was measured."""
        measured = steady_seconds(step_seconds)
        off = self.step_seconds / measured - 1
        return f"predicted {self.step_seconds:.3f} s per step, measured {measured:.3f}: off by {off:+.1%}"


def steady_seconds(step_seconds: Sequence[float]) -> float:
    """The median step without those at the start."""
    return statistics.median(step_seconds[UNSTEADY_STEPS:] or step_seconds)


def forecast(plan: Plan, uses: Sequence[Candidate], shape: ModelShape, model: StepModel) -> Forecast:
    """Predict the steps of `plan` where every rank uses its memory as `uses` says; takes some tenths of a second."""
    resident, graphs = chosen_stages(plan.num_ranks, plan.num_stages, uses)
    slots = [each.num_slots for each in uses]
    schedule = schedule_of_slots(plan.num_ranks, plan.num_stages, plan.num_microbatches, slots, resident)

    def seconds(profile: Profile) -> float:
        costs = stage_costs(plan.spans, shape, profile, resident=resident, graph_stages=graphs)
        return simulated_seconds(schedule, costs, profile, model.rules)

    limit, gain = limiting_resource(model.profile, seconds)
    basis = f"{model.profile.source} ({model.profile.basis})"
    return Forecast(seconds(model.profile), limit, gain, basis)
