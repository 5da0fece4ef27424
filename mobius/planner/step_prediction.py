"""Predicts a step: plays a schedule with the costs of a profile over everything that works at the same time.

What waits for what is what executor, slots and stepper do:

    compute     in the order of the actions; waits for the message, the stage's update of the step before, its load
    load        waits for its slot and for the stage's update; the copies of a rank take turns
    offload     waits for the stage's last compute; its gradients then wait for the optimizer
    optimizer   one stage's piece at a time, the lowest stage whose gradients are home first; with clipping only once
                all ranks have ended their backward
    step        begins when the last rank has ended the one before: loss and norms are summed over all ranks

Copies, optimizers and messages through the host share its memory and their links (step_tasks.py). Compute also waits
for the host to enqueue it, one action after the other from the step's beginning on. Everything else of the machine is
idle.

A step is limited by the part of the machine that, made a little faster, would shorten it most.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from mobius.planner.event_simulation import StageCost, StepRules, run
from mobius.planner.profile import Profile
from mobius.planner.request import PlanRequest
from mobius.planner.stage_costs import stage_costs
from mobius.planner.step_bounds import min_step_seconds
from mobius.planner.step_tasks import ComputeTask, StepTasks
from mobius.schedule.build import build_unchecked
from mobius.schedule.lanes import Lane, LaneSpan, WaitCause
from mobius.schedule.plan import Plan
from mobius.schedule.schedule import Schedule

TRIED_FACTOR = 1.1
NUM_STEPS = 2
"""Simulated; the first has nothing to wait for, the second is the steady one."""
SIMULATED_ROUNDS = 4
"""At most, of a step whose seconds alone are asked for; further ones last as long as the last of them."""
SIMULATED_MICROBATCHES = 128
"""At most per round, of a step whose seconds alone are asked for; each further one adds what the last 64 added."""
UNSTEADY_STEPS = 2
"""At the start of a run: memory is touched for the first time. They do not count if there are others."""


class Resource(StrEnum):
    """A part of the machine that a step may be limited by."""

    COMPUTE = "compute"
    PCIE = "PCIe"
    HOST_MEMORY = "host memory"
    CORES = "CPU cores"
    MESSAGES = "messages"
    REPLICAS = "the link between replicas"


@dataclass(frozen=True)
class SimulatedSteps:
    """A steady step, and all spans of the simulated ones."""

    step_seconds: float
    busy_seconds: tuple[float, ...]
    """Seconds of compute, by rank."""
    waits: tuple[dict[WaitCause, float], ...]
    """Seconds that compute waited, by rank and cause."""
    step_ends: tuple[float, ...]
    spans: tuple[tuple[LaneSpan, ...], ...]
    """Spans of every rank, in order of their start."""

    @property
    def bubble(self) -> float:
        """Share of the step in which compute stands still, over all ranks."""
        return 1 - sum(self.busy_seconds) / (self.step_seconds * len(self.busy_seconds))

    def worst_wait(self, cause: WaitCause) -> float:
        """Seconds of the rank that waits longest for `cause`, as a run reports it."""
        return max(waits[cause] for waits in self.waits)


def simulate_steps(
    schedule: Schedule, costs: Sequence[StageCost], profile: Profile, rules: StepRules, *, num_steps: int = 3
) -> SimulatedSteps:
    """Play `num_steps` steps back to back and describe the last one.

    Loads and offloads of resident stages in `schedule` are left out, so it may be one that streams all stages.
    """
    return _describe(_play(schedule, costs, profile, rules, num_steps))


def simulated_seconds(
    schedule: Schedule, costs: Sequence[StageCost], profile: Profile, rules: StepRules, *, num_steps: int = NUM_STEPS
) -> float:
    """`simulate_steps(...).step_seconds`, in less time because nothing else is told."""
    builder = _play(schedule, costs, profile, rules, num_steps, is_described=False)
    ends = [0.0, *(task.end for task in builder.step_ends)]
    return ends[-1] - ends[-2]


@lru_cache(maxsize=64)  # what is chosen among plans is looked at again
def predict_step_seconds(plan: Plan, request: PlanRequest, profile: Profile) -> float:
    """Seconds of a steady step of `plan` at the rates of `profile`.

    Many rounds, and many microbatches of a round, are extrapolated from fewer: a step's seconds are linear in both.
    """
    size = plan.microbatches_per_round
    if size > SIMULATED_MICROBATCHES and plan.num_slices == 1 and plan.num_offloaded_microbatches == 0:
        fewer, half = (
            replace(plan, num_microbatches=plan.accumulation_rounds * number)
            for number in (SIMULATED_MICROBATCHES, SIMULATED_MICROBATCHES // 2)
        )
        seconds = predict_step_seconds(fewer, request, profile)
        of_each = (seconds - predict_step_seconds(half, request, profile)) / (SIMULATED_MICROBATCHES // 2)
        return seconds + (size - SIMULATED_MICROBATCHES) * of_each
    if (more := plan.accumulation_rounds - SIMULATED_ROUNDS) > 0:
        fewer, shorter = (plan.with_rounds(SIMULATED_ROUNDS - missing) for missing in (0, 1))
        seconds = predict_step_seconds(fewer, request, profile)
        return seconds + more * (seconds - predict_step_seconds(shorter, request, profile))
    costs = stage_costs(plan, request.shape, profile)
    return simulated_seconds(build_unchecked(plan), costs, profile, request.rules)


def predict_min_step_seconds(plan: Plan, request: PlanRequest, profile: Profile) -> float:
    """A lower bound of `predict_step_seconds`, in a hundredth of its time."""
    return min_step_seconds(plan, stage_costs(plan, request.shape, profile), profile, request.rules)


def _play(
    schedule: Schedule,
    costs: Sequence[StageCost],
    profile: Profile,
    rules: StepRules,
    num_steps: int,
    *,
    is_described: bool = True,
) -> StepTasks:
    """The steps as they went."""
    builder = StepTasks(schedule, costs, profile, rules, is_described=is_described)
    with without_garbage_collection():
        for _ in range(num_steps):
            builder.add_step()
        run(builder.tasks, builder.capacities)
    return builder


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """No search for garbage meanwhile: many thousand tasks would set off many, each through all that torch has made.

    Around several simulations too: what they leave has no circles, and a search between two of them took a tenth of
    their time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _describe(builder: StepTasks) -> SimulatedSteps:
    ends = tuple(task.end for task in builder.step_ends)
    last = len(ends) - 1
    start = ends[-2] if last else 0.0
    busy, waits = [], []
    spans: list[list[LaneSpan]] = [[] for _ in builder.ranks]
    for task, (rank, lane, name, step, peer) in builder.names.items():
        if task.end > task.start or lane is Lane.COMPUTE:
            spans[rank].append(LaneSpan(lane, str(name), step, task.start, task.end, peer))
    for rank, state in enumerate(builder.ranks):
        rank_waits = dict.fromkeys(WaitCause, 0.0)
        busy.append(0.0)
        before = 0.0
        for compute in state.computes:
            waited = _waits_of(compute, before)
            before = compute.task.end
            spans[rank] += [
                LaneSpan(Lane.WAIT, cause.value, compute.step + 1, since, until) for cause, since, until in waited
            ]
            if compute.step == last:
                busy[rank] += compute.task.end - compute.task.start
                for cause, since, until in waited:
                    rank_waits[cause] += until - since
        own_end = max(c.task.end for c in state.computes if c.step == last)
        rank_waits[WaitCause.NEIGHBOURS] += ends[-1] - own_end
        waits.append(rank_waits)
    return SimulatedSteps(
        step_seconds=ends[-1] - start,
        busy_seconds=tuple(busy),
        waits=tuple(waits),
        step_ends=ends,
        spans=tuple(tuple(sorted(rank_spans, key=lambda s: (s.start, -s.end))) for rank_spans in spans),
    )


def _waits_of(compute: ComputeTask, before: float) -> list[tuple[WaitCause, float, float]]:
    """For what compute stood still before it began, one cause after the other, as an action waits."""
    since = max(before, compute.begin.end if compute.begin else 0.0)
    found = []
    for cause, tasks in compute.waits.items():
        until = max((task.end for task in tasks), default=since)
        if until > since:
            found.append((cause, since, until))
            since = until
    return found


def with_faster(profile: Profile, resource: Resource, factor: float) -> Profile:
    """`profile` of a machine on which one thing is `factor` times as fast."""
    if resource is Resource.COMPUTE:
        kinds = tuple(kind.times(1 / factor) for kind in profile.layer_kinds)
        attention = profile.attention.times(1 / factor)
        return replace(profile, layer_kinds=kinds, attention=attention, loss=profile.loss / factor)
    copies = profile.copies
    if resource is Resource.PCIE:
        faster = replace(
            copies, host_to_device=copies.host_to_device * factor, device_to_host=copies.device_to_host * factor
        )
        return replace(profile, copies=faster)
    if resource is Resource.HOST_MEMORY:
        return replace(
            profile,
            copies=replace(
                copies,
                host_to_device_all_gpus=copies.host_to_device_all_gpus * factor,
                device_to_host_all_gpus=copies.device_to_host_all_gpus * factor,
                host_to_device_duplex=copies.host_to_device_duplex * factor,
                device_to_host_duplex=copies.device_to_host_duplex * factor,
            ),
            host_bandwidth=profile.host_bandwidth * factor,
            cpu_adamw_together=min(profile.cpu_adamw_together * factor, profile.cpu_adamw),
            cpu_adamw_beside_copies=profile.cpu_adamw_beside_copies * factor,
            copies_beside_cpu_adamw=profile.copies_beside_cpu_adamw * factor,
        )
    if resource is Resource.CORES:
        together = profile.cpu_adamw_together * factor
        return replace(profile, cpu_adamw=profile.cpu_adamw * factor, cpu_adamw_together=together)
    if resource is Resource.REPLICAS:
        return replace(profile, replicas=None if profile.replicas is None else profile.replicas.times(factor))
    messages = profile.messages
    faster_messages = replace(messages, bandwidth=messages.bandwidth * factor, latency=messages.latency / factor)
    return replace(profile, messages=faster_messages)


def find_bottleneck(
    profile: Profile,
    step_seconds: Callable[[Profile], float],
    now: float,
    min_seconds: Callable[[Profile], float] = lambda _: 0.0,
) -> tuple[Resource, float]:
    """The resource whose 1.1-fold speed gains most, and the share of `now`, a step at `profile`, that it gains.

    What cannot gain more than another by `min_seconds`, a lower bound of `step_seconds`, is not tried.
    """
    tried = [each for each in Resource if each is not Resource.REPLICAS or profile.replicas is not None]
    faster = {resource: with_faster(profile, resource, TRIED_FACTOR) for resource in tried}
    bounds = {resource: min_seconds(faster[resource]) for resource in tried}
    seconds: dict[Resource, float] = {}
    for resource in sorted(tried, key=lambda resource: bounds[resource]):
        if bounds[resource] < min(seconds.values(), default=math.inf):
            seconds[resource] = step_seconds(faster[resource])
    best = min(seconds, key=lambda resource: seconds[resource])
    return best, 1 - seconds[best] / now


@dataclass(frozen=True)
class StepTimePrediction:
    """A predicted step, and what it rests on."""

    step_seconds: float
    bottleneck: Resource
    gain: float
    """The share of a step that `limit` would save if it were 1.1 times as fast."""
    basis: str
    """Whether the rates are measured or estimated, and of what."""

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"predicted: {self.step_seconds:.3f} s per step, limited by {self.bottleneck} ({self.gain:.0%} shorter "
            "if that "
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


def predict_step_time(plan: Plan, request: PlanRequest, profile: Profile) -> tuple[StepTimePrediction, SimulatedSteps]:
    """Predict the steps of `plan`; takes some tenths of a second."""
    prediction = simulate_steps(
        build_unchecked(plan), stage_costs(plan, request.shape, profile), profile, request.rules
    )
    seconds = prediction.step_seconds
    limit, gain = find_bottleneck(
        profile,
        lambda faster: predict_step_seconds(plan, request, faster),
        seconds,
        lambda faster: predict_min_step_seconds(plan, request, faster),
    )
    basis = f"{profile.source} ({profile.basis})"
    if request.packed is not None:
        basis += f", packed rows with attention over {request.attention_length:.0f} tokens on average"
    return StepTimePrediction(seconds, limit, gain, basis), prediction
