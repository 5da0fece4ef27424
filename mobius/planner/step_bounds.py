"""A lower bound of a step's seconds, in a hundredth of a simulation's time: only plans that may win are simulated.

A step takes as long as each of these alone, and the bound is the largest:

    compute    of a rank, and in each round the way of its first microbatch to it and of its last gradient to stage 0,
               after the last of which it may finish gradients and update resident stages meanwhile;
               in each round the way of a microbatch through all stages, and of all others through the last one
    copies     of a rank in one direction at its link's rate, and of all ranks at what they are given together
    disks      all optimizer states that are on them, read or written
    updates    of all streamed stages on the CPUs; with clipping, forward waits for those of its stage and below
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mobius.planner.profile import Profile
from mobius.planner.stage_costs import StageCost, StepRules
from mobius.planner.step_tasks import FINISH_GRADIENTS_BYTES
from mobius.schedule.plan import Plan


def min_step_seconds(plan: Plan, costs: Sequence[StageCost], profile: Profile, rules: StepRules) -> float:
    """Seconds that no simulated step of `plan` falls below; arguments as of `simulate_steps`."""
    passes = [_pass_seconds(plan, cost) for cost in costs]
    ends = [_end_seconds(plan, costs, profile, rules, rank) for rank in range(plan.num_ranks)]
    rounds = 1 if plan.is_depth_first else plan.accumulation_rounds  # depth-first rounds overlap
    compute = [
        _compute_seconds(plan, costs, rank) + max(rounds * sum(passes[:rank]), (rounds - 1) * sum(passes[:rank]) + end)
        for rank, end in enumerate(ends)
    ]
    last = costs[-1]
    through_last = (plan.num_microbatches // rounds - plan.num_slices) * (last.forward + last.backward)
    through_all = rounds * (sum(passes) + through_last)
    copies, updates = _copy_seconds(plan, costs, profile, rules), _update_seconds(plan, costs, profile, rules, compute)
    disks = _disk_seconds(plan, costs, profile, rules)
    return max(*compute, through_all, copies, updates, disks) + profile.step_overhead


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
        seconds += plan.num_microbatches * (cost.forward + cost.backward)
        if cost.backward_from_saved is not None:
            seconds -= offloaded * max(0.0, cost.backward - cost.backward_from_saved[0])
    return seconds


def _end_seconds(plan: Plan, costs: Sequence[StageCost], profile: Profile, rules: StepRules, rank: int) -> float:
    """Seconds that a GPU takes to end the gradients of its stages, and to update those that it updates."""
    if rules.sizes.num_replicas > 1:
        return 0.0
    own = [costs[stage] for stage in plan.local_stages(rank)]
    updated = sum(cost.parameters for cost in own if cost.updates_on_gpu)
    ended = FINISH_GRADIENTS_BYTES * sum(cost.parameters for cost in own)
    return updated / profile.gpu_adamw + ended / profile.gpu_bandwidth


def _copy_seconds(plan: Plan, costs: Sequence[StageCost], profile: Profile, rules: StepRules) -> float:
    """Seconds of the copies in the fuller direction, of one rank or of all together."""
    copies, rounds = profile.copies, plan.accumulation_rounds
    down, up = [0] * plan.num_ranks, [0] * plan.num_ranks
    for rank in range(plan.num_ranks):
        streamed = [costs[stage] for stage in plan.streamed_stages(rank)]
        loaded = sorted(
            rules.sizes.shard_size(cost.parameters if cost.loaded is None else cost.loaded) for cost in streamed
        )
        # A round loads for forward and for backward but what may stay in the slots at either turn.
        travelling = sum(loaded[: len(loaded) - plan.slots[rank]])  # nothing with a slot for each
        down[rank] = rules.sizes.weight * max(sum(loaded), 2 * rounds * travelling)
        trained = [cost.parameters for cost in streamed if not cost.keeps_trained_on_gpu]
        up[rank] = rules.sizes.gradient * sum(map(rules.sizes.shard_size, trained))
        for stage in plan.offloaded_activation_stages.intersection(plan.local_stages(rank)):
            whole = plan.num_offloaded_microbatches * rounds
            saved = whole * rules.offloaded_bytes(costs[stage], offloads_all=True)
            saved += (plan.num_microbatches - whole) * rules.offloaded_bytes(costs[stage], offloads_all=False)
            down[rank], up[rank] = down[rank] + saved, up[rank] + saved
    return max(
        max(down) / copies.host_to_device,
        max(up) / copies.device_to_host,
        sum(down) / (plan.num_ranks * copies.host_to_device_all_gpus),
        sum(up) / (plan.num_ranks * copies.device_to_host_all_gpus),
    )


def _disk_seconds(plan: Plan, costs: Sequence[StageCost], profile: Profile, rules: StepRules) -> float:
    """Seconds of reading or writing all states that are on disks."""
    if profile.disks is None:
        return 0.0
    updated = [cost for cost in costs if not cost.updates_on_gpu]
    num_bytes = sum(rules.sizes.optimizer(cost.parameters, cost.trained_in_layers) for cost in updated)
    return num_bytes / min(profile.disks.read, profile.disks.write)


def _update_seconds(
    plan: Plan, costs: Sequence[StageCost], profile: Profile, rules: StepRules, compute: Sequence[float]
) -> float:
    """Seconds of all updates on CPUs; with clipping also of what computes after those of a rank's first stages."""
    together = plan.num_ranks * max(profile.cpu_adamw_together, 1e-9)
    updated = [
        [0 if cost.updates_on_gpu else rules.sizes.shard_size(cost.parameters) for cost in own]
        for own in (costs[rank :: plan.num_ranks] for rank in range(plan.num_ranks))
    ]
    seconds = sum(map(sum, updated)) / together
    if not rules.clips or plan.num_slices > 1:
        return seconds
    # All ranks have updated their stages up to a place no sooner than all these parameters take; for the last of them
    # the forwards of a round's microbatches through the stages before that place are over.
    until = accumulate(map(sum, zip(*updated, strict=True)))
    size = min(plan.num_microbatches, plan.microbatches_per_round + (2 * plan.num_ranks if plan.is_depth_first else 0))
    for place, parameters in enumerate(until):
        before = [
            size * sum(cost.forward for cost in costs[rank : place * plan.num_ranks : plan.num_ranks])
            for rank in range(plan.num_ranks)
        ]
        if parameters:
            left = min(whole - own for whole, own in zip(compute, before, strict=True))
            seconds = max(seconds, parameters / together + left)
    return seconds
