"""Fits a plan into GPU memory: refuses a request that cannot fit, and lists the ways to use the remaining memory.

Several uses share the memory of a rank:

    resident stages   the rank's first stages: they need no loads, no offloads and no updates on the CPU
    activations       saved in the rank's last stages: backward does not repeat their forward, a quarter of the compute
    slots             a third slot loads a stage while another is offloaded; with a slot per stage, each loads once
    sum buffers       with one per streamed stage, unfinished gradient sums are not copied between rounds

All ranks follow the same pattern if their memory allows, because the slowest rank determines the step. Within a
pattern, a rank saves the activations of as many stages as fit: all activations of the last stages, and products of the
stages before them. If activations may be offloaded, the rank offloads them in as few stages as it needs to fit, or in
all stages that save no activations.

A stage that saves activations needs its weights on the GPU from forward to backward. Resident stages always have their
weights there, and the last `num_slots` streamed stages keep weights in their slots.

    rank 0 of 2, five stages, stage 0 resident, two slots, the last two stages save their activations:

    stages                 F0 F2 F4 F6 F8   B8 B6 B4 B2 B0
    weights of 6 and 8 stay         ===========
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product

from mobius.config.config import ActivationOffloading, Recompute
from mobius.errors import GpuMemoryError, PlanError
from mobius.limits import FEWEST_STATE_BUFFERS
from mobius.planner.memory_estimates import (
    USABLE_MEMORY_FRACTION,
    GpuMemoryEstimate,
    activation_bytes,
    estimate_gpu_memory_of_ranks,
    estimate_host_memory,
    estimated_layer,
    largest_gpu_estimate,
    microbatch_bytes,
    state_bytes,
)
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.rates import reference_profile
from mobius.planner.request import PlanRequest
from mobius.planner.step_prediction import predict_min_step_seconds
from mobius.schedule.plan import MemoryUse, Plan
from mobius.units import format_bytes

PREFETCH_SLOTS = 3
"""Number of slots with which a stage can be loaded while the gradients of another stage are offloaded. The third slot
pays off if this offload takes at least as long as the compute of a stage."""
MOST_RESIDENT_TRIED = 12
"""Approximate maximum number of counts of resident stages that are tried; they are evenly spread."""
MIN_SLICE_TOKENS = 4096
"""Minimum tokens of a slice: fewer do not keep a GPU busy."""


class DoesNotFitError(GpuMemoryError):
    """Error: even the smallest use of GPU memory that a request allows does not fit; `remedies.py` finds changes."""

    def __init__(self, request: PlanRequest, layer: LayerBytes | None) -> None:
        """Describe the need of `request`; `layer` as in `fit_plan`."""
        self.request, self.layer = request, layer
        _, need = _least_use(request, layer)
        super().__init__(
            f"rank {need.rank} needs {format_bytes(need.total)} of GPU memory ({need.describe()}), "
            f"{format_bytes(request.gpu_bytes or 0)} is available."
        )


class MemoryFit:
    """Finds the ways in which ranks can use their memory, for a request with chosen stages and microbatches."""

    def __init__(self, request: PlanRequest, layer: LayerBytes | None, *, may_save: bool = True) -> None:
        """Take `layer` as in `fit_plan`; without it or `may_save`, stages save activations only if options ask."""
        self.request, self.layer = request, layer
        self._usable = _usable_bytes(request)
        self._least, _ = _least_use(request, layer)
        # Sliced sequences are recomputed, because each later slice would change keys and values of saved activations.
        is_open = may_save and layer is not None and request.recompute is Recompute.AUTO and request.num_slices == 1
        self._most_saving = request.plan.stages_per_rank if is_open else self._least.num_saving_activations
        is_known = layer is not None and layer.saved_products is not None
        self._may_save_products = is_open and is_known and may_save_products(request)
        saving = range(request.plan.stages_per_rank + 1)
        self._offload_numbers = [_offload_numbers(request, number) for number in saving]
        self._microbatch = microbatch_bytes(request, layer)
        self._state_bytes = _state_bytes(_of_states(request))
        self._activation_bytes = cache(self._count_activation_bytes)
        self._saving_plan = cache(request.plan.with_same_use)

    def plans(self, *, is_quick: bool = False) -> Iterator[Plan]:
        """Yield a plan for each pattern that fits on every rank; `is_quick` tries few patterns."""
        yield from dict.fromkeys(filter(None, map(self._plan, self._patterns(is_quick=is_quick))))

    def _patterns(self, *, is_quick: bool) -> Iterator[MemoryUse]:
        """Yield the memory uses that every rank should follow as closely as its memory allows.

        A pattern leaves open which stages save activations. It offloads the activations of all of a rank's stages, or
        of no stage. With as many slots or sum buffers as stages, each streamed stage has a separate slot or buffer.
        """
        plan, every, least = self.request.plan, self.request.plan.stages_per_rank, self._least.num_resident
        residents = range(least, 1 + (every if self.request.num_resident is None else least))
        step = len(residents) - 1 if is_quick else -(-len(residents) // MOST_RESIDENT_TRIED)
        slots = {plan.num_slots or 0, max(PREFETCH_SLOTS, plan.num_slots or 0)}
        if is_quick:
            slots = {min(slots)}
        if plan.is_depth_first:
            slots = {every}
        elif plan.num_slots == 1:
            slots = {1}
        else:
            slots.add(every)
        sum_buffers = [0, every] if plan.has_partial_sums else [0]
        asked = self.request.config.pipeline.activation_offloading
        offloading = {ActivationOffloading.AUTO: [0, every], ActivationOffloading.ON: [every]}.get(asked, [0])
        for resident in sorted({*residents[:: max(1, step)], residents[-1]}):
            for number, buffers, offloaded in product(sorted(slots), sum_buffers, offloading):
                may_mix = plan.is_depth_first or not plan.has_partial_sums or not is_quick
                if may_mix or (number == every) == (buffers == every):
                    yield MemoryUse(resident, 0, number, offloaded, buffers)

    def _plan(self, pattern: MemoryUse) -> Plan | None:
        first = self.request.first_alike
        uses = {rank: self._use(rank, pattern) for rank in {*first}}
        fitting = [use for rank in first if (use := uses[rank]) is not None]
        return self.request.plan.with_memory_uses(fitting) if len(fitting) == len(first) else None

    def _use(self, rank: int, pattern: MemoryUse) -> MemoryUse | None:
        """Return the memory use of `rank` in `pattern`, with fewer resident stages if necessary; None if none fits."""
        for resident in range(pattern.num_resident, self._least.num_resident - 1, -1):
            if (found := self._fill(rank, pattern, resident)) is not None:
                return found
        return None

    def _fill(self, rank: int, pattern: MemoryUse, resident: int) -> MemoryUse | None:
        """Return the use with `resident` resident stages, and with as many stages that save activations as fit.

        All other stages offload activations if `pattern` does, else as few as necessary. Returns None if nothing fits.
        """
        least, most = self._least.num_saving_activations, self._most_saving
        if self.request.plan.num_slots == 1 and resident < self.request.plan.stages_per_rank - 1:
            most = min(most, 1)  # without prefetch only the last streamed stage stays in its slot
        saves_products = self._may_save_products or self.request.recompute is Recompute.ELEMENTWISE
        offloads, buffers = pattern.num_offloading_activations > 0, pattern.num_sum_buffers

        def offloading(number: int) -> int:
            return self._offload_numbers[number][-1 if offloads else 0]

        def fits(number: int, products: int, offloaded: int) -> bool:
            states = self._state_bytes(rank, resident, max(pattern.num_slots, number), buffers)
            return states + self._activation_bytes(rank, number, products, offloaded) <= self._usable

        number, products, offloaded = least, least * saves_products, offloading(least)
        if fits(number, products, offloaded):
            number += bisect_left(
                range(least + 1, most + 1), True, key=lambda n: not fits(n, n * saves_products, offloading(n))
            )
            products, offloaded = number * saves_products, offloading(number)
            if self._may_save_products:
                products = bisect_left(range(number), True, key=lambda each: fits(number, each, offloaded))
        else:
            numbers = self._offload_numbers[least]
            if offloads or not fits(number, products, numbers[-1]):
                return None
            offloaded = numbers[bisect_left(numbers, True, key=lambda each: fits(number, products, each))]
        return MemoryUse(resident, number, max(pattern.num_slots, number), offloaded, buffers, products)

    def _count_activation_bytes(self, rank: int, saving: int, products: int, offloading: int) -> int:
        plan = self._saving_plan(MemoryUse(0, saving, self.request.plan.stages_per_rank, offloading, 0, products))
        return sum(activation_bytes(self.request, plan, rank, self._microbatch).values())


@lru_cache(maxsize=64)
def _state_bytes(request: PlanRequest) -> Callable[[int, int, int, int], int]:
    """Return a function that sums a rank's `state_bytes`. It takes rank, resident stages, slots and sum buffers.

    Bytes are counted once for all requests with the same stages and order.
    """

    @cache
    def count(rank: int, num_resident: int, num_slots: int, num_sum_buffers: int) -> int:
        use = MemoryUse(num_resident, 0, num_slots, num_sum_buffers=num_sum_buffers)
        return sum(state_bytes(request, request.plan.with_same_use(use), rank).values())

    return count


def _of_states(request: PlanRequest) -> PlanRequest:
    """Replace numbers that do not affect `state_bytes` by fixed values; return `request` itself if it has slices."""
    if request.num_slices > 1:
        return request
    rounds = 2 if request.candidate.has_partial_sums else 1
    request = request.with_pipeline(activation_offloading=ActivationOffloading.OFF)
    return request.trying(num_chunks=1, num_rounds=rounds, num_offloaded_microbatches=0)


def fit_plan(request: PlanRequest, *, layer: LayerBytes | None = None) -> Plan:
    """Check that the plan of `request` fits, and choose the use of memory with the lowest bound of the step time.

    All ranks are assumed to have as much memory as this rank; resident stages and slots of one rank do not affect other
    ranks. `layer` gives the bytes of one layer and microbatch; without it, stages save activations only if options ask
    for it. For an unknown device, rates of another machine are used, because only the proportions of rates matter.

    Raises PlanError for more resident stages than a rank has, ScheduleError for numbers that the compute order does not
    allow, and GpuMemoryError if the request does not fit.
    """
    plans = fitting_plans(request, layer)
    if len(plans) == 1:
        return plans[0]
    rates = reference_profile(request)
    return min(plans, key=lambda plan: (predict_min_step_seconds(plan, request, rates), -len(plan.resident)))


def fitting_plans(request: PlanRequest, layer: LayerBytes | None, *, is_quick: bool = False) -> list[Plan]:
    """Return a plan for each use of memory that fits; arguments and errors as in `fit_plan`.

    If every plan needs more memory than the host has, returns only the plan that needs the least host memory.
    """
    plan, per_rank, wanted = request.plan, request.plan.stages_per_rank, request.num_resident
    if wanted is not None and wanted > per_rank:
        raise PlanError(
            f"--resident_stages {wanted}: each rank has {per_rank} stage(s). Use {per_rank} or less, or raise "
            "--num_stages."
        )
    plan.check_numbers()
    if not fits_gpus(request, layer):
        raise DoesNotFitError(request, layer)
    plans = _plans_on_gpus(request, layer, is_quick=is_quick)
    fitting = [plan for plan in plans if fits_host(request, plan)]
    return fitting or [min(plans, key=lambda plan: estimate_host_memory(request, plan).total)]


def _plans_on_gpus(
    request: PlanRequest, layer: LayerBytes | None, *, is_quick: bool = False, may_save: bool = True
) -> list[Plan]:
    """Return a plan for each use of GPU memory that fits; on CPUs, or if none fits, only the plan of the least use."""
    fit = None if request.gpu_bytes is None else MemoryFit(request, layer, may_save=may_save)
    plans = [] if fit is None else [*fit.plans(is_quick=is_quick)]
    return plans or [request.plan.with_same_use(_least_use(request, layer)[0])]


def fits_host(request: PlanRequest, plan: Plan) -> bool:
    """Whether the host has enough memory for a plan; True if its memory is not known."""
    return request.host_bytes is None or estimate_host_memory(request, plan).total <= request.host_bytes


def fits_gpus(request: PlanRequest, layer: LayerBytes | None, *, with_margin: bool = False) -> bool:
    """Whether the smallest use of memory that the request allows fits on the fullest rank; arguments as in `fit_plan`.

    `with_margin` also keeps the margin that automatic plans keep for errors of estimates.
    """
    if request.gpu_bytes is None:
        return True
    available = _usable_bytes(request) if with_margin else request.gpu_bytes
    return _least_use(request, layer)[1].total <= available


def _usable_bytes(request: PlanRequest) -> int:
    """Return the GPU memory of a rank that automatic plans may fill."""
    assert request.gpu_bytes is not None, "a GPU has a limit"
    return int(request.gpu_bytes * USABLE_MEMORY_FRACTION) - request.mailbox_bytes


@lru_cache(maxsize=1024)  # cached: called again once the numbers of rounds are known
def least_host_bytes(request: PlanRequest) -> float:
    """Return the least estimated host memory of all plans of `request` that fit the GPUs; infinite if none fits.

    This function is much faster than `fit_plan`, because stages save activations only if options ask for it.
    """
    request = replace(request, num_state_buffers=FEWEST_STATE_BUFFERS)
    layer = estimated_layer(request)
    if not fits_gpus(request, layer):
        return math.inf
    plans = _plans_on_gpus(request, layer, may_save=False)
    return min(estimate_host_memory(request, plan).total for plan in plans)


def may_save_products(request: PlanRequest) -> bool:
    """Whether stages may save only matrix products: the options ask for it, or auto may choose it.

    Auto does not choose it for eager layers, because the time of their many elementwise kernels is not estimated.
    """
    is_open = request.recompute is Recompute.AUTO and request.compiles and request.num_slices == 1
    return is_open or request.recompute is Recompute.ELEMENTWISE


def max_saving_attention(request: PlanRequest, *, layer: LayerBytes | None) -> int:
    """Return the maximum number of stages per rank that can save attention's results; arguments as in `fit_plan`."""

    def does_not_fit(number: int) -> bool:
        plans = MemoryFit(request.trying(num_saving_attention=number), layer).plans(is_quick=True)
        return not any(fits_host(request, plan) for plan in plans)

    return bisect_left(range(1, request.plan.stages_per_rank + 1), True, key=does_not_fit)


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def check_given_plan(request: PlanRequest, plan: Plan, *, layer: LayerBytes | None = None) -> None:
    """Raise GpuMemoryError, with the arithmetic, if a given plan does not fit on every rank."""
    need = largest_gpu_estimate(estimate_gpu_memory_of_ranks(request, plan, layer))
    if request.gpu_bytes is not None and need.total > request.gpu_bytes:
        raise GpuMemoryError(
            f"--plan: rank {need.rank} needs {format_bytes(need.total)} of GPU memory ({need.describe()}), "
            f"{format_bytes(request.gpu_bytes)} is available. Make a plan for this memory (--dry_run "
            "--gpu_memory_limit), or leave --plan out."
        )


@lru_cache(maxsize=1024)  # cached: every step of a search calls it
def _least_use(request: PlanRequest, layer: LayerBytes | None) -> tuple[MemoryUse, GpuMemoryEstimate]:
    """Return the use with the least GPU memory that the request allows, and the estimate of the fullest rank."""
    per_rank, num_resident = request.plan.stages_per_rank, request.num_resident or 0
    num_saving_activations = per_rank if request.recompute.saves_activations else 0
    streamed = per_rank - num_resident
    slots = max(request.plan.num_slots or 0, num_saving_activations, streamed if request.plan.is_depth_first else 0)
    products = num_saving_activations if request.recompute is Recompute.ELEMENTWISE else 0
    use = MemoryUse(num_resident, num_saving_activations, min(slots, streamed), num_saving_products=products)
    numbers = _offload_numbers(request, num_saving_activations)
    # Try the fewest and the most: with few microbatches, copies in flight take more memory than activations on the GPU.
    fewest_and_most = dict.fromkeys(numbers[:1] if request.gpu_bytes is None else (numbers[0], numbers[-1]))
    uses = [replace(use, num_offloading_activations=number) for number in fewest_and_most]
    plans, ranks = [request.plan.with_same_use(each) for each in uses], sorted({*request.first_alike})
    needs = [largest_gpu_estimate(estimate_gpu_memory_of_ranks(request, plan, layer, ranks)) for plan in plans]
    return min(zip(uses, needs, strict=True), key=lambda each: each[1].total)


def _offload_numbers(request: PlanRequest, num_saving_activations: int) -> range:
    """Return the possible numbers of a rank's stages that offload activations, if its last stages save activations."""
    asked, most = request.config.pipeline.activation_offloading, request.plan.stages_per_rank - num_saving_activations
    if asked is ActivationOffloading.AUTO:
        return range(most + 1)
    return range(most, most + 1) if asked is ActivationOffloading.ON else range(1)
