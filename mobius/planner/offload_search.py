"""Chooses of how many microbatches stages that recompute send all that products need home, so that these run once.

    forward      F0 F1 F2 F3 F4 ...      its products take longer to the host than it computes: on an RTX 4090 1.3
    to host      S1       S4    ...      times as long for a layer of 7B, on an H200 2.8 times
    backward                             fetches them under the backward before

So a part of the microbatches is sent, spread over the round, and the others are recomputed. The part is looked for by
simulation, which knows the weights' and gradients' copies on the same links and what copies take of the host's memory.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from mobius.config.config import ActivationOffloading, Recompute
from mobius.errors import GpuMemoryError
from mobius.planner.fit import fit_plan, may_keep_products
from mobius.planner.memory_estimates import USABLE_MEMORY_FRACTION, estimate_gpu_memory_of_ranks, estimate_host_memory
from mobius.planner.memory_policy import fits_host, policy_by_simulation
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.profile import Profile
from mobius.planner.request import PlanRequest
from mobius.planner.step_prediction import predict_step_seconds
from mobius.schedule.plan import Plan

MOST_IF_UNKNOWN = 2
"""Times the host memory of a plan without products at home that one with them may take where nobody has said how much
there is."""
WORTH = 0.01
"""Share of a step that products at home must gain: they take host memory, and its bandwidth from others."""


def with_offloaded_microbatches(
    request: PlanRequest, best: Plan, *, layer: LayerBytes | None, profile: Profile
) -> Plan:
    """`best`, or the fastest plan with products of some microbatches on the host where it is faster by `WORTH`.

    Its stages that do not keep activations stash them, all of each rank but the model's last. `layer` as in `fit_plan`.
    """
    if not _may_send(request, layer) or len(best.saved_activation_stages) >= best.num_stages - 1:
        return best
    stashing = request.with_pipeline(activation_offloading=ActivationOffloading.ON)
    size = best.microbatches_per_round
    number = _hidden(request, profile)
    try:
        plan = fit_plan(
            replace(stashing, num_offloaded_microbatches=number), layer=layer, policy=policy_by_simulation(profile)
        )
    except GpuMemoryError:
        return best

    def fits(number: int) -> bool:
        tried = replace(plan, num_offloaded_microbatches=number)
        return _fits_host(request, tried, best) and _fits_gpu(request, tried, layer)

    most = bisect_right(range(1, size + 1), 0, key=lambda number: 0 if fits(number) else 1)
    seconds: dict[int, float] = {0: predict_step_seconds(best, request, profile) * (1 - WORTH)}

    def of(number: int) -> float:
        if number not in seconds:
            seconds[number] = predict_step_seconds(replace(plan, num_offloaded_microbatches=number), request, profile)
        return seconds[number]

    number, step = min(number, most), max(1, size // 8)
    while number > 0:
        nearby = [n for n in (number - step, number + step) if 0 < n <= most and of(n) < of(number)]
        if nearby:
            number = min(nearby, key=of)
        elif step > 1:
            step //= 2
        else:
            break
    return best if number == 0 or of(number) >= seconds[0] else replace(plan, num_offloaded_microbatches=number)


def _may_send(request: PlanRequest, layer: LayerBytes | None) -> bool:
    """Whether it is left to the planner, and layers can be told of."""
    is_open = (
        request.recompute is Recompute.AUTO and may_keep_products(request) and not request.num_offloaded_microbatches
    )
    may_stash = request.config.pipeline.activation_offloading is not ActivationOffloading.OFF
    return (
        is_open
        and may_stash
        and layer is not None
        and layer.saved_products is not None
        and request.gpu_bytes is not None
    )


def _hidden(request: PlanRequest, profile: Profile) -> int:
    """Microbatches of a round whose products leave while all of its forwards compute, nothing else being copied."""
    size, kinds = request.plan.microbatches_per_round, profile.layer_kinds
    forward = sum(kind.forward for kind in kinds) / len(kinds)
    copies = request.product_bytes / profile.copies.device_to_host_duplex
    return max(1, min(size, int(size * forward / copies)))


def _fits_host(request: PlanRequest, plan: Plan, best: Plan) -> bool:
    if request.host_bytes is None:
        return estimate_host_memory(request, plan).total <= MOST_IF_UNKNOWN * estimate_host_memory(request, best).total
    return fits_host(request, plan)


def _fits_gpu(request: PlanRequest, plan: Plan, layer: LayerBytes | None) -> bool:
    assert request.gpu_bytes is not None
    usable = int(request.gpu_bytes * USABLE_MEMORY_FRACTION) - request.mailbox_bytes
    return all(need.total <= usable for need in estimate_gpu_memory_of_ranks(request, plan, layer))
