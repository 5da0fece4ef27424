"""A lower bound of a step's seconds, in a hundredth of a simulation's time: only plans that may win are simulated.

A step takes as long as each of these alone, and the bound is the largest:

    compute    of a rank, and in each round the way of its first microbatch to it and of its last gradient to stage 0,
               after the last of which it may finish gradients and update resident stages meanwhile;
               in each round the way of a microbatch through all stages, and of all others through the last one
    copies     and updates of all streamed stages, at the rates of the links, the CPUs, the host's memory and disks
    updates    with clipping, of a rank's first stages, and all that computes after them: forward waits for them
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate

from mobius.planner.event_simulation import Flow, shared_bandwidth
from mobius.planner.profile import Profile
from mobius.planner.request import PlanRequest
from mobius.planner.stage_costs import StageCost, StepRules, stage_costs
from mobius.planner.state_bytes import SUM_BYTES
from mobius.planner.step_tasks import FINISH_GRADIENTS_BYTES
from mobius.schedule.plan import Plan


def predict_min_step_seconds(plan: Plan, request: PlanRequest, profile: Profile) -> float:
    """Seconds that no simulated step of `plan` falls below."""
    costs, rules = stage_costs(plan, request.shape, profile), request.rules
    message = profile.messages.latency + rules.message_bytes / profile.messages.bandwidth if plan.num_ranks > 1 else 0.0
    passes = [_pass_seconds(plan, cost) for cost in costs]
    for stage, cost in enumerate(costs[:-1]):
        passes[stage] += message * (2 if cost.num_saving_layers else 1)  # to the next stage, and back for a backward
    ends = [_end_seconds(plan, costs, profile, rules, rank) for rank in range(plan.num_ranks)]
    rounds = 1 if plan.is_depth_first else plan.accumulation_rounds  # depth-first rounds overlap
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
    return max(*compute, through_all, shared, updates) + profile.step_overhead


def _pass_seconds(plan: Plan, cost: StageCost) -> float:
    """Seconds of a stage's forward and backward, at least, of any microbatch."""
    first_slice = 1 / plan.num_slices - 1  # its attention, relative to that of an average slice
    backward = cost.backward + first_slice * cost.backward_attention
    if cost.backward_from_saved is not None:
        backward = min(backward, cost.backward_from_saved[0])
    return cost.forward + first_slice * cost.forward_attention + backward


def _compute_seconds(plan: Plan, costs: Sequence[StageCost], rank: int) -> float:
    """Seconds of all forwards and backwards of a rank."""
    seconds, offloaded = 0.0, plan.num_offloaded_microbatches * plan.accumulation_rounds
    for stage in plan.local_stages(rank):
        cost = costs[stage]
        seconds += plan.num_microbatches * (cost.forward + cost.backward) + cost.quantizing
        if cost.backward_from_saved is not None:
            seconds -= offloaded * max(0.0, cost.backward - cost.backward_from_saved[0])
    return seconds + len(plan.head_microbatches(rank)) * costs[-1].forward


def _end_seconds(plan: Plan, costs: Sequence[StageCost], profile: Profile, rules: StepRules, rank: int) -> float:
    """Seconds that a GPU takes to end the gradients of its stages, and to update those that it updates."""
    if rules.sizes.num_replicas > 1:
        return 0.0
    own = [costs[stage] for stage in plan.local_stages(rank)]
    updated = sum(cost.parameters for cost in own if cost.updates_on_gpu)
    ended = FINISH_GRADIENTS_BYTES * sum(cost.parameters for cost in own)
    return updated / profile.gpu_adamw + ended / profile.gpu_bandwidth


def _shared_seconds(plan: Plan, costs: Sequence[StageCost], profile: Profile, rules: StepRules) -> float:
    """Seconds of all copies and updates at the rates of whatever they share, as the simulation shares it out."""
    shared, rounds, flows = shared_bandwidth(profile, plan.num_ranks), plan.accumulation_rounds, list[Flow]()
    for rank in range(plan.num_ranks):
        streamed = [costs[stage] for stage in plan.streamed_stages(rank)]
        trained = sorted(cost.parameters for cost in streamed if not cost.keeps_trained_on_gpu)
        loaded = sorted(
            rules.sizes.shard_size(cost.parameters if cost.loaded is None else cost.loaded) for cost in streamed
        )
        # A round loads for forward and for backward but what may stay in the slots at either turn.
        travelling = sum(loaded[: len(loaded) - plan.slots[rank]])  # nothing with a slot for each
        down = rules.sizes.weight * max(sum(loaded), 2 * rounds * travelling)
        up = rules.sizes.gradient * sum(map(rules.sizes.shard_size, trained))
        # Between rounds unfinished sums leave and come but what may stay in the buffers.
        waiting = trained[: len(trained) - plan.num_sum_buffers(rank)] if plan.offloads_gradient_sums(rank) else []
        both = SUM_BYTES * (rounds - 1) * sum(waiting)
        for stage in plan.offloaded_activation_stages.intersection(plan.local_stages(rank)):
            whole = plan.num_offloaded_microbatches * rounds
            both += whole * rules.offloaded_bytes(costs[stage], offloads_all=True)
            both += (plan.num_microbatches - whole) * rules.offloaded_bytes(costs[stage], offloads_all=False)
        flows += [shared.load(rank, down + both), shared.offload(rank, up + both)]
        flows.append(shared.update(sum(map(rules.sizes.shard_size, trained))))
        if profile.disks is not None:
            sizes, read, written = rules.sizes, 0, 0
            for cost in costs[rank :: plan.num_ranks]:
                own, is_streamed = (cost.parameters, cost.trained_in_layers), not cost.updates_on_gpu
                read += is_streamed * sizes.on_disks(*own)
                written += sizes.written(*own, is_streamed=is_streamed)
                flows.append(shared.offload(rank, 0 if is_streamed else sizes.written(*own, is_streamed=False)))
            flows += [shared.disk_read(read), shared.disk_write(written)]
    used: dict[Hashable, float] = {}
    for flow in flows:
        for resource, share in flow.uses.items():
            used[resource] = used.get(resource, 0.0) + share * flow.amount
    return max(amount / max(shared.capacities[resource], 1e-9) for resource, amount in used.items())


def _update_seconds(
    plan: Plan, costs: Sequence[StageCost], profile: Profile, rules: StepRules, compute: Sequence[float]
) -> float:
    """With clipping, seconds of the updates of the ranks' first stages and of all that computes after them."""
    together = plan.num_ranks * max(profile.cpu_adamw_together, 1e-9)
    updated = [
        [0 if cost.updates_on_gpu else rules.sizes.shard_size(cost.parameters) for cost in own]
        for own in (costs[rank : plan.num_stages : plan.num_ranks] for rank in range(plan.num_ranks))
    ]
    seconds = 0.0
    if not rules.clips or plan.num_slices > 1:
        return seconds
    # All ranks have updated their stages up to a place no sooner than all these parameters take; for the last of them
    # the forwards of a round's microbatches through the stages before that place are over.
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
