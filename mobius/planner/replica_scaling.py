"""Costs of the traffic between replicas in a predicted step, and whether another node pays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mobius.planner.profile import Profile
from mobius.planner.solver import PlanResult
from mobius.planner.step_prediction import predict_step_seconds

NO_LINK = 1e6
"""Times as fast as it is: a link that takes no time."""
PAYS, GOAL = 0.75, 0.95
"""Shares of the nodes' number that a speed-up must reach, so that each node is worth it, and so that it is good."""
FASTEST = 64
"""Times as fast as it is: the fastest link that is looked for."""
TRIES = 10
"""Halvings of the range in which it is looked for: to half a percent."""


@dataclass(frozen=True)
class Traffic:
    """Seconds of a step that concern what travels between replicas."""

    reductions: float
    """Time of the link for gradients of all stages of a pipeline, if nothing else used it."""
    weights: float
    exposed_seconds: float
    """Seconds that the step is longer than with a link that takes no time."""

    @property
    def overlapped_fraction(self) -> float:
        """Share of the link's seconds that runs beside other work."""
        whole = self.reductions + self.weights
        return max(0.0, 1 - self.exposed_seconds / whole) if whole else 1.0


def traffic_of(result: PlanResult) -> Traffic:
    """The traffic of a predicted step with replicas."""
    profile, shape = result.profile, result.request.shape
    assert profile is not None, "a step is predicted"
    assert profile.replicas is not None, "there are replicas"
    rules = result.request.rules
    trained = [cut.num_trained(shape) for cut in result.plan.cuts]
    reduced, gathered = (
        sum(map(each, trained)) / profile.replicas.together
        for each in (rules.sharding.reduce_bytes, lambda count: rules.sharding.remote_size(count) * rules.weight_bytes)
    )
    return Traffic(reduced, gathered, max(0.0, result.step_seconds - seconds_with(result, NO_LINK)))


def seconds_with(result: PlanResult, factor: float) -> float:
    """Seconds of the predicted step with a link that is so many times as fast."""
    return predict_step_seconds(result.plan, result.request, _with_link(result.profile, factor))


def _with_link(profile: Profile | None, factor: float) -> Profile:
    assert profile is not None
    assert profile.replicas is not None
    # A link that takes no time takes nothing of PCIe or the host's memory, either.
    through_host = profile.replicas.is_through_host and factor < NO_LINK
    return replace(profile, replicas=replace(profile.replicas.times(factor), is_through_host=through_host))


def describe_traffic(result: PlanResult) -> str:
    """One line: what reductions and weights take, and how much of it shows."""
    traffic, machine = traffic_of(result), result.request.machine
    link = f"{machine.node_link:g} GB/s of each node" if machine.num_nodes > 1 else "the links within a node"
    return (
        f"replicas: reductions take {traffic.reductions:.3f} s of {link}, weights {traffic.weights:.3f} s; "
        f"{100 * traffic.overlapped_fraction:.0f} % of it hides, {traffic.exposed_seconds:.3f} s of the step is due "
        "to it"
    )


@dataclass(frozen=True)
class NodeScaling:
    """A step on several nodes beside one on a single node with as many tokens per node."""

    result: PlanResult
    alone: PlanResult

    @property
    def nodes(self) -> int:
        return self.result.request.machine.num_nodes

    @property
    def speed_up(self) -> float:
        """Tokens per second over those of one node."""
        return self.result.tokens_per_second / self.alone.tokens_per_second

    @property
    def verdict(self) -> str:
        """Whether another node pays, in words."""
        if self.speed_up < 1:
            return "does not pay: slower than one node"
        return "pays" if self.speed_up >= PAYS * self.nodes else "pays little"

    def needed_link(self, goal: float = GOAL) -> float | None:
        """GB/s with which the speed-up would be `goal` of the nodes' number, by the same plan.

        None if no usual link would do. Nobody needs a slower one than there is where that is fast enough.
        """
        wanted = self.alone.step_seconds / goal
        if seconds_with(self.result, FASTEST) > wanted:
            return None
        low, high = 0.0, math.log2(FASTEST)
        for _ in range(TRIES):
            middle = (low + high) / 2
            low, high = (low, middle) if seconds_with(self.result, 2**middle) <= wanted else (middle, high)
        return self.result.request.machine.node_link * 2**high

    def describe(self) -> str:
        """One line: the speed-up, what it is bound by, and what would be needed for more."""
        traffic, step_time_prediction = traffic_of(self.result), self.result.step_time_prediction
        assert step_time_prediction is not None
        text = (
            f"{self.speed_up:.2f} x one node: {self.verdict}; {100 * traffic.overlapped_fraction:.0f} % of the "
            "traffic hides"
        )
        if self.speed_up >= GOAL * self.nodes:
            return text
        text += f", {traffic.exposed_seconds:.2f} s show; limited by {step_time_prediction.bottleneck}"
        link = self.needed_link()
        if link is None:
            return f"{text}; no link gives {GOAL * self.nodes:.3g} x with this plan: more tokens per step may"
        return f"{text}; {GOAL * self.nodes:.3g} x needs {link:.3g} GB/s, or more tokens per step"
