"""Replicas in words: how they share a step, what their traffic costs, and whether another node pays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mobius.planner.request import PlanRequest
from mobius.planner.solver import PlanResult
from mobius.planner.step_prediction import predict_step_seconds

NO_LINK = 1e6
"""Speed-up of a link that takes no time."""
PAYS, GOAL = 0.75, 0.95
"""Shares of the number of nodes that a speed-up must reach, so that each node is worth it, and so that it is good."""
FASTEST = 64
"""Maximum speed-up of the link that is considered."""
TRIES = 10
"""Halvings of the range in which the link is searched: to half a percent."""


def describe_replicas(request: PlanRequest) -> str:
    """One line: how many pipelines there are, where they are, and what each has of a step."""
    machine, rows = request.machine, request.config.pipeline.batch_size
    where = f"{machine.replicas_per_node} on each of {machine.num_nodes} node(s)"
    return (
        f"{machine.num_replicas} replicas of a pipeline of {machine.num_ranks} rank(s), {where}: each plays "
        f"{request.rows} of {rows} rows of a step, and updates 1/{machine.num_replicas} of each stage"
    )


@dataclass(frozen=True)
class Traffic:
    """Seconds of a step that concern what travels between replicas."""

    reductions: float
    """Time of the link for gradients of all stages of a pipeline, if nothing else used it."""
    weights: float
    exposed_seconds: float
    """Seconds that the step is longer than with a link that takes no time."""

    @classmethod
    def of(cls, result: PlanResult) -> Traffic:
        """Return the traffic of a predicted step with replicas."""
        profile, rules = result.profile, result.request.rules
        assert profile is not None, "a step is predicted"
        assert profile.replicas is not None, "there are replicas"
        rate = profile.replicas.together
        trained = [cut.num_trained(result.request.shape) for cut in result.plan.cuts]
        reduced = sum(map(rules.sharding.reduce_bytes, trained)) / rate
        gathered = sum(map(rules.sharding.remote_size, trained)) * rules.weight_bytes / rate
        return cls(reduced, gathered, max(0.0, result.step_seconds - _seconds_with(result, NO_LINK)))

    @property
    def overlapped_fraction(self) -> float:
        """Share of the link's seconds that overlaps with other work."""
        whole = self.reductions + self.weights
        return max(0.0, 1 - self.exposed_seconds / whole) if whole else 1.0


def _seconds_with(result: PlanResult, factor: float) -> float:
    """Seconds of the predicted step with a link that is `factor` times as fast."""
    profile = result.profile
    assert profile is not None
    assert profile.replicas is not None
    # A link that takes no time takes nothing of PCIe or the host's memory, either.
    through_host = profile.replicas.is_through_host and factor < NO_LINK
    replicas = replace(profile.replicas.times(factor), is_through_host=through_host)
    return predict_step_seconds(result.plan, result.request, replace(profile, replicas=replicas))


def describe_traffic(result: PlanResult) -> str:
    """One line: what reductions and weights take, and how much of it shows."""
    traffic, machine = Traffic.of(result), result.request.machine
    link = f"{machine.node_link:g} GB/s of each node" if machine.num_nodes > 1 else "the links within a node"
    return (
        f"replicas: reductions take {traffic.reductions:.3f} s of {link}, weights {traffic.weights:.3f} s; "
        f"{100 * traffic.overlapped_fraction:.0f} % of it hides, {traffic.exposed_seconds:.3f} s of the step is due "
        "to it"
    )


@dataclass(frozen=True)
class NodeScaling:
    """A step on several nodes, and one on a single node with as many tokens per node."""

    result: PlanResult
    alone: PlanResult

    @property
    def nodes(self) -> int:
        return self.result.request.machine.num_nodes

    @property
    def speed_up(self) -> float:
        """Tokens per second divided by those of one node."""
        return self.result.tokens_per_second / self.alone.tokens_per_second

    @property
    def verdict(self) -> str:
        """Whether another node pays, in words."""
        if self.speed_up < 1:
            return "does not pay: slower than one node"
        return "pays" if self.speed_up >= PAYS * self.nodes else "pays little"

    def needed_link(self, goal: float = GOAL) -> float | None:
        """GB/s with which the speed-up of the same plan would be `goal` times the number of nodes.

        At least what there is; None if no usual link would do.
        """
        wanted = self.alone.step_seconds / goal
        if _seconds_with(self.result, FASTEST) > wanted:
            return None
        low, high = 0.0, math.log2(FASTEST)
        for _ in range(TRIES):
            middle = (low + high) / 2
            low, high = (low, middle) if _seconds_with(self.result, 2**middle) <= wanted else (middle, high)
        return self.result.request.machine.node_link * 2**high

    def describe(self) -> str:
        """One line: the speed-up, what limits it, and what would be needed for more."""
        traffic, prediction = Traffic.of(self.result), self.result.step_time_prediction
        assert prediction is not None
        hidden = f"{100 * traffic.overlapped_fraction:.0f} % of the traffic hides"
        text = f"{self.speed_up:.2f} x one node: {self.verdict}; {hidden}"
        if self.speed_up >= GOAL * self.nodes:
            return text
        text += f", {traffic.exposed_seconds:.2f} s show; limited by {prediction.bottleneck}"
        link = self.needed_link()
        if link is None:
            return f"{text}; no link gives {GOAL * self.nodes:.3g} x with this plan: more tokens per step may"
        return f"{text}; {GOAL * self.nodes:.3g} x needs {link:.3g} GB/s, or more tokens per step"
