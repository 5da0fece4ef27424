"""Predicts a step: simulates a schedule with the costs of a profile, on all parts of the machine that work at once.

The tasks wait for each other as in executor, slots and stepper:

    compute     runs in the order of the actions; waits for its message, the stage's last update, and the stage's load
    load        waits for its slot and for the stage's update; the loads of a rank run one after the other
    offload     waits for the stage's last compute; the copied gradients then wait for the optimizer
    optimizer   updates one piece of a stage at a time, first of the lowest stage whose gradients are on the host. With
                clipping, it waits until all ranks have ended their backward
    step        begins when the last rank has ended the previous step, as loss and norms are summed over all ranks
    pass        forwards of as many rows before the step, if the objective needs them; the step begins when all ranks
                have ended the pass

Copies, optimizers and messages through the host share host memory and links (step_tasks.py). Compute also waits until
the host has enqueued it; the host enqueues one action after the other from the step's start. All other parts of the
machine are assumed to be idle.

A step is limited by the part of the machine that would shorten the step most if this part were a little faster.

A lower bound takes a hundredth of a simulation's time, so that only plans that may win are simulated. A step takes at
least as long as each of the following times, and the bound is the largest of these times:

    compute    all compute of a rank, and in each round the time of the first microbatch from stage 0 to the rank and of
               the last gradient back. During the last way back, the rank may finish gradients and update its stages.
               Or, in each round, one microbatch goes through all stages, and all others through the last stage
    copies     all copies and updates of streamed stages, at the rates of links, CPUs, host memory and disks
    updates    with clipping, where forward waits: the updates of the ranks' first stages, and all compute after them
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache, partial
from itertools import accumulate

from mobius.planner.event_simulation import Flow, run, shared_bandwidth
from mobius.planner.profile import Profile, times
from mobius.planner.request import PlanRequest
from mobius.planner.stage_costs import StageCost, StepRules, stage_costs
from mobius.planner.step_tasks import FINISH_GRADIENTS_BYTES, ComputeTask, StepTasks
from mobius.schedule.build import build_unchecked
from mobius.schedule.lanes import Lane, LaneSpan, WaitCause
from mobius.schedule.memory_layout import SUM_BYTES
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import Plan
from mobius.schedule.schedule import Schedule

TRIED_FACTOR = 1.1
NUM_STEPS = 2
"""Number of simulated steps: the first waits for no earlier step, the second is steady."""
SIMULATED_ROUNDS = 4
"""Maximum number of simulated rounds if only a step's seconds are needed; further rounds are assumed to last as long as
the fourth. The third is not yet steady if sums are copied between rounds."""
SIMULATED_MICROBATCHES = 128
"""Maximum number of simulated microbatches per round if only a step's seconds are needed; each further microbatch is
assumed to take as long as the mean of the last 64."""


class Resource(StrEnum):
    """A part of the machine that may limit a step."""

    COMPUTE = "compute"
    PCIE = "PCIe"
    HOST_MEMORY = "host memory"
    CORES = "CPU cores"
    MESSAGES = "messages"
    REPLICAS = "the link between replicas"
    DISKS = "disks"


@dataclass(frozen=True)
class SimulatedSteps:
    """Numbers of a steady step, and the spans of all simulated steps."""

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
        """Share of the step in which compute is idle, as a mean over all ranks."""
        return 1 - sum(self.busy_seconds) / (self.step_seconds * len(self.busy_seconds))

    def worst_wait(self, cause: WaitCause) -> float:
        """Longest wait of any rank for `cause`, in seconds; a run reports the same number."""
        return max(waits[cause] for waits in self.waits)


def simulate_steps(
    schedule: Schedule, costs: Sequence[StageCost], profile: Profile, rules: StepRules, *, num_steps: int = 3
) -> SimulatedSteps:
    """Play `num_steps` steps back to back and describe the last one.

    Loads and offloads of resident stages are left out, so `schedule` may stream all stages.
    """
    return _describe(_play(schedule, costs, profile, rules, num_steps, is_described=True))


def simulated_seconds(
    schedule: Schedule, costs: Sequence[StageCost], profile: Profile, rules: StepRules, *, num_steps: int = NUM_STEPS
) -> float:
    """Return `simulate_steps(...).step_seconds`, in less time because nothing else is described."""
    num_steps += profile.disks is not None  # reads wait for the previous step's writes: one more step
    played = _play(schedule, costs, profile, rules, num_steps, is_described=False)
    ends = [0.0, *(task.end for task in played.step_ends)]
    return ends[-1] - ends[-2]


def predict_step_seconds(plan: Plan, request: PlanRequest, profile: Profile) -> float:
    """Seconds of a steady step of `plan` at the rates of `profile`.

    Seconds of many rounds, or of many microbatches per round, are extrapolated from fewer, because they grow linearly.
    Seconds of disks do not, so with disks the lower bound is used if it is larger.
    """
    seconds = _step_seconds(plan, request.shape, profile, request.rules)
    return seconds if profile.disks is None else max(seconds, predict_min_step_seconds(plan, request, profile))


def predict_pass_seconds(plan: Plan, request: PlanRequest, profile: Profile) -> float:
    """Seconds of forward passes over the rows of a step, of which many follow each other."""
    size = min(plan.microbatches_per_round, SIMULATED_MICROBATCHES)
    costs = stage_costs(plan, request.shape, profile)
    seconds = simulated_seconds(build_unchecked(plan.evaluation(size)), costs, profile, request.rules, num_steps=3)
    return seconds * plan.num_microbatches / size


@lru_cache(maxsize=1024)  # cached: different requests may have equal steps
def _step_seconds(plan: Plan, shape: ModelShape, profile: Profile, rules: StepRules) -> float:
    size = plan.microbatches_per_round
    if size > SIMULATED_MICROBATCHES and plan.num_slices == 1 and plan.num_offloaded_microbatches == 0:
        fewer, half = (
            replace(plan, num_microbatches=plan.num_rounds * number)
            for number in (SIMULATED_MICROBATCHES, SIMULATED_MICROBATCHES // 2)
        )
        seconds = _step_seconds(fewer, shape, profile, rules)
        of_each = (seconds - _step_seconds(half, shape, profile, rules)) / (SIMULATED_MICROBATCHES // 2)
        return seconds + (size - SIMULATED_MICROBATCHES) * of_each
    if (more := plan.num_rounds - SIMULATED_ROUNDS) > 0:
        fewer, shorter = (plan.with_rounds(SIMULATED_ROUNDS - missing) for missing in (0, 1))
        seconds = _step_seconds(fewer, shape, profile, rules)
        return seconds + more * (seconds - _step_seconds(shorter, shape, profile, rules))
    return simulated_seconds(build_unchecked(plan), stage_costs(plan, shape, profile), profile, rules)


def _play(
    schedule: Schedule,
    costs: Sequence[StageCost],
    profile: Profile,
    rules: StepRules,
    num_steps: int,
    *,
    is_described: bool,
) -> StepTasks:
    """Simulate the steps and return their tasks."""
    builder = StepTasks(schedule, costs, profile, rules, is_described=is_described)
    with without_garbage_collection():
        for _ in range(num_steps):
            builder.add_step()
        run(builder.tasks, builder.flows.table)
    return builder


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off: thousands of tasks would start many collections, each through all torch objects.

    It also encloses several simulations in a row. They leave no reference cycles, and a collection between two
    simulations took a tenth of their time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _describe(builder: StepTasks) -> SimulatedSteps:
    ends = (0.0, *(task.end for task in builder.step_ends))
    last = len(ends) - 2
    busy, waits, spans = [], [], []
    named: list[list[LaneSpan]] = [[] for _ in builder.ranks]
    for task, (rank, lane, name, step, peer) in builder.names.items():
        if task.end > task.start or lane is Lane.COMPUTE:
            named[rank].append(LaneSpan(lane, str(name), step, task.start, task.end, peer))
    for rank_spans, state in zip(named, builder.ranks, strict=True):
        rank_waits, rank_busy, before = dict.fromkeys(WaitCause, 0.0), 0.0, 0.0
        for compute in state.computes:
            is_last = compute.step == last
            for cause, since, until in _waits_of(compute, before):
                rank_spans.append(LaneSpan(Lane.WAIT, cause.value, compute.step + 1, since, until))
                rank_waits[cause] += (until - since) * is_last
            before = compute.task.end
            rank_busy += (before - compute.task.start) * is_last
        rank_waits[WaitCause.NEIGHBOURS] += ends[-1] - max(c.task.end for c in state.computes if c.step == last)
        busy.append(rank_busy)
        waits.append(rank_waits)
        spans.append(tuple(sorted(rank_spans, key=lambda span: (span.start, -span.end))))
    return SimulatedSteps(ends[-1] - ends[-2], tuple(busy), tuple(waits), ends[1:], tuple(spans))


def _waits_of(compute: ComputeTask, before: float) -> list[tuple[WaitCause, float, float]]:
    """Causes and times of the waits before a compute task, one after the other, as an action waits."""
    since = max(before, compute.begin.end if compute.begin else 0.0)
    found = []
    for cause, tasks in compute.waits.items():
        until = max((task.end for task in tasks), default=since)
        if until > since:
            found.append((cause, since, until))
            since = until
    return found


def with_faster(profile: Profile, resource: Resource, factor: float) -> Profile:
    """Return the profile of a machine on which one resource is `factor` times as fast."""
    copies = profile.copies
    match resource:
        case Resource.COMPUTE:
            kinds = tuple(kind.times(1 / factor) for kind in profile.layer_kinds)
            attention = profile.attention.times(1 / factor)
            return replace(profile, layer_kinds=kinds, attention=attention, loss=profile.loss / factor)
        case Resource.PCIE:
            return replace(profile, copies=times(copies, factor, "host_to_device", "device_to_host"))
        case Resource.HOST_MEMORY:
            together = min(profile.cpu_adamw_together * factor, profile.cpu_adamw)
            at_once = ("host_to_device_all_gpus", "device_to_host_all_gpus")
            copies = times(copies, factor, *at_once, "host_to_device_duplex", "device_to_host_duplex")
            faster = times(profile, factor, "host_bandwidth", "cpu_adamw_beside_copies", "copies_beside_cpu_adamw")
            return replace(faster, copies=copies, cpu_adamw_together=together)
        case Resource.CORES:
            return times(profile, factor, "cpu_adamw", "cpu_adamw_together")
        case Resource.REPLICAS:
            return replace(
                profile,
                replicas=None if profile.replicas is None else times(profile.replicas, factor, "together", "alone"),
            )
        case Resource.DISKS:
            return replace(profile, disks=None if profile.disks is None else profile.disks.times(factor))
        case Resource.MESSAGES:
            messages = times(profile.messages, factor, "bandwidth")
            return replace(profile, messages=replace(messages, latency=messages.latency / factor))


def find_bottleneck(
    profile: Profile,
    step_seconds: Callable[[Profile], float],
    now: float,
    min_seconds: Callable[[Profile], float] = lambda _: 0.0,
) -> tuple[Resource, float]:
    """Resource that saves most if it is 1.1 times as fast, and the saved share of `now`, the step with `profile`.

    A resource is not tried if `min_seconds`, a lower bound of `step_seconds`, shows that another resource saves more.
    """
    missing = {Resource.REPLICAS: profile.replicas is None, Resource.DISKS: profile.disks is None}
    tried = [each for each in Resource if not missing.get(each)]
    faster = {resource: with_faster(profile, resource, TRIED_FACTOR) for resource in tried}
    bounds = {resource: min_seconds(faster[resource]) for resource in tried}
    seconds: dict[Resource, float] = {}
    for resource in sorted(tried, key=lambda resource: bounds[resource]):
        if bounds[resource] < min(seconds.values(), default=math.inf):
            seconds[resource] = step_seconds(faster[resource])
    best = min(seconds, key=lambda resource: seconds[resource])
    return best, 1 - seconds[best] / now


@dataclass(frozen=True)
class StepTimePrediction(SimulatedSteps):
    """A predicted step, the resource that limits it, and the basis of the prediction."""

    bottleneck: Resource
    gain: float
    """Share of a step that is saved if the bottleneck is 1.1 times as fast."""
    basis: str
    """Text that says whether the rates are measured or estimated, and for which device."""


def predict_step_time(plan: Plan, request: PlanRequest, profile: Profile) -> StepTimePrediction:
    """Predict the steps of `plan`, and find the resource that limits them."""
    costs = stage_costs(plan, request.shape, profile)
    steps = simulate_steps(build_unchecked(plan), costs, profile, request.rules)
    if profile.disks is not None:  # in few steps, buffers hide slow disks: the lower bound may be larger
        least = predict_min_step_seconds(plan, request, profile)
        steps = replace(steps, step_seconds=max(steps.step_seconds, least))
    limit, gain = find_bottleneck(
        profile,
        partial(predict_step_seconds, plan, request),
        steps.step_seconds,
        partial(predict_min_step_seconds, plan, request),
    )
    basis = f"{profile.source} ({profile.basis})"
    if request.packed is not None:
        basis += f", packed rows with attention over {request.attention_length:.0f} tokens on average"
    return StepTimePrediction(**vars(steps), bottleneck=limit, gain=gain, basis=basis)


def predict_min_step_seconds(plan: Plan, request: PlanRequest, profile: Profile) -> float:
    """Lower bound of the seconds of a simulated step of `plan`."""
    costs, rules = stage_costs(plan, request.shape, profile), request.rules
    message = profile.messages.latency + rules.message_bytes / profile.messages.bandwidth if plan.num_ranks > 1 else 0.0
    passes = [_pass_seconds(plan, cost) for cost in costs]
    for stage, cost in enumerate(costs[:-1]):
        passes[stage] += message * (2 if cost.num_saving_layers else 1)  # one message forward, and one back
    ends = [_end_seconds(plan, costs, profile, rules, rank) for rank in range(plan.num_ranks)]
    rounds = 1 if plan.is_depth_first else plan.num_rounds  # depth-first rounds overlap, so they fill and drain once
    compute = [
        _compute_seconds(plan, costs, rank) + max(rounds * sum(passes[:rank]), (rounds - 1) * sum(passes[:rank]) + end)
        for rank, end in enumerate(ends)
    ]
    last = costs[plan.num_stages - 1]
    through_last = (plan.num_microbatches // rounds - plan.num_slices) * (last.forward + last.backward)
    through_all = rounds * (sum(passes) + through_last)
    shared, updates = (
        _shared_seconds(plan, costs, profile, rules),
        _update_seconds(plan, costs, profile, rules, compute),
    )
    before = 0.0
    if rules.begins_with_pass:  # when the step begins, all ranks have ended the pass
        before = max(_forward_pass_seconds(plan, costs, rank) for rank in range(plan.num_ranks)) + profile.step_overhead
    return max(before + max(*compute, through_all), shared, updates) + profile.step_overhead


def _pass_seconds(plan: Plan, cost: StageCost) -> float:
    """Minimum seconds of a stage's forward and backward for any microbatch."""
    first_slice = 1 / plan.num_slices - 1  # attention of the first slice / attention of a mean slice, less 1
    backward = cost.backward + first_slice * cost.backward_attention
    if cost.backward_from_saved is not None:
        backward = min(backward, cost.backward_from_saved[0])
    return cost.forward + first_slice * cost.forward_attention + backward


def _compute_seconds(plan: Plan, costs: Sequence[StageCost], rank: int) -> float:
    """Seconds of all forwards and backwards of a rank."""
    seconds, offloaded = 0.0, plan.num_offloaded_microbatches * plan.num_rounds
    for stage in plan.local_stages(rank):
        cost = costs[stage]
        seconds += plan.num_microbatches * (cost.forward + cost.backward) + cost.quantizing
        if cost.backward_from_saved is not None:
            seconds -= offloaded * max(0.0, cost.backward - cost.backward_from_saved[0])
    return seconds + len(plan.head_microbatches(rank)) * costs[-1].forward


def _forward_pass_seconds(plan: Plan, costs: Sequence[StageCost], rank: int) -> float:
    """Seconds of a rank's compute in a forward pass over the rows of a step."""
    return plan.num_microbatches * sum(costs[stage].forward_pass for stage in plan.local_stages(rank))


def _end_seconds(plan: Plan, costs: Sequence[StageCost], profile: Profile, rules: StepRules, rank: int) -> float:
    """Seconds that a GPU takes to finish its stages' gradients, and to update stages whose states are on the GPU."""
    if rules.memory.num_replicas > 1:
        return 0.0
    own = [costs[stage] for stage in plan.local_stages(rank)]
    updated = sum(cost.parameters for cost in own if cost.updates_on_gpu)
    ended = FINISH_GRADIENTS_BYTES * sum(cost.parameters for cost in own)
    return updated / profile.gpu_adamw + ended / profile.gpu_bandwidth


def _shared_seconds(plan: Plan, costs: Sequence[StageCost], profile: Profile, rules: StepRules) -> float:
    """Seconds of all copies and updates at the rates of the resources that they share in the simulation."""
    shared, rounds, flows = shared_bandwidth(profile, plan.num_ranks), plan.num_rounds, list[Flow]()
    layouts = [] if profile.disks is None else rules.layouts(plan, costs)
    for rank in range(plan.num_ranks):
        streamed = [costs[stage] for stage in plan.streamed_stages(rank)]
        trained = sorted(cost.parameters for cost in streamed if not cost.keeps_trained_on_gpu)
        loaded = sorted(
            rules.memory.shard_size(cost.parameters if cost.loaded is None else cost.loaded) for cost in streamed
        )
        # A round loads stages for forward and for backward, except for stages that may stay in the slots each time.
        travelling = sum(loaded[: len(loaded) - plan.slots[rank]])  # 0 if each stage has a slot
        down = rules.memory.weight * max(sum(loaded), 2 * rounds * travelling)
        up = rules.memory.gradient * sum(map(rules.memory.shard_size, trained))
        # Between rounds unfinished sums are copied to the host and back, except for sums that may stay in buffers.
        waiting = trained[: len(trained) - plan.num_sum_buffers(rank)] if plan.offloads_gradient_sums(rank) else []
        both = SUM_BYTES * (rounds - 1) * sum(waiting)
        for stage in plan.offloaded_activation_stages.intersection(plan.local_stages(rank)):
            whole = plan.num_offloaded_microbatches * rounds
            both += whole * rules.offloaded_bytes(costs[stage], offloads_all=True)
            both += (plan.num_microbatches - whole) * rules.offloaded_bytes(costs[stage], offloads_all=False)
        flows += [shared.load(rank, down + both), shared.offload(rank, up + both)]
        flows.append(shared.update(sum(map(rules.memory.shard_size, trained))))
        if profile.disks is not None:
            own = [stage.disk_bytes(rules.memory, 0) for stage in layouts[rank].stages.values()]
            has_weights = layouts[rank].load_buffers.number > 0
            flows.append(shared.disk_read(sum(each.read for each in own) + down * has_weights))
            flows.append(shared.disk_write(sum(each.written for each in own)))
            flows.append(shared.offload(rank, sum(each.copied for each in own)))
    used: dict[Hashable, float] = {}
    for flow in flows:
        for resource, share in flow.uses.items():
            used[resource] = used.get(resource, 0.0) + share * flow.amount
    return max(amount / max(shared.capacities[resource], 1e-9) for resource, amount in used.items())


def _update_seconds(
    plan: Plan, costs: Sequence[StageCost], profile: Profile, rules: StepRules, compute: Sequence[float]
) -> float:
    """Bound of a step with clipping: the updates of the ranks' first stages, and all compute after them."""
    together = plan.num_ranks * max(profile.cpu_adamw_together, 1e-9)
    updated = [
        [0 if cost.updates_on_gpu else rules.memory.shard_size(cost.parameters) for cost in own]
        for own in (costs[rank : plan.num_stages : plan.num_ranks] for rank in range(plan.num_ranks))
    ]
    seconds = 0.0
    if not rules.memory.waits_for_norm or plan.num_slices > 1:
        return seconds
    # Updates of all ranks' first n stages take at least the time for all parameters of these stages. When these updates
    # end, a rank has done at most the forwards of one round's microbatches through its stages before the n-th.
    until = accumulate(map(sum, zip(*updated, strict=True)))
    forwards = (
        accumulate((cost.forward for cost in costs[rank : plan.num_stages : plan.num_ranks]), initial=0.0)
        for rank in range(plan.num_ranks)
    )
    for parameters, before in zip(until, zip(*forwards, strict=True), strict=False):
        if parameters:
            left = min(whole - plan.microbatches_per_round * own for whole, own in zip(compute, before, strict=True))
            seconds = max(seconds, parameters / together + left)
    return seconds
