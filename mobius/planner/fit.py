"""Fits a plan into GPU memory: refuses what cannot fit, and uses the rest of the memory to make a step shorter.

Three uses share the memory of a rank:

    resident stages   the first of the rank: no loads, no offloads, and no update on the CPU to wait for
    activations       the last of the rank: backward need not run their forward again, a quarter of their compute
    a third slot      loads a stage while the gradients of another are offloaded

If activations may be offloaded, each use offloads those of the fewest stages with which it fits.

Saved activations need their weights on the GPU from forward to backward. Weights of resident stages are there, and
weights of the last `num_slots` streamed stages stay in their slots.

    rank 0 of 2, five stages, stage 0 resident, two slots, the last two stages save their activations:

    stages                 F0 F2 F4 F6 F8   B8 B6 B4 B2 B0
    weights of 6 and 8 stay         ===========
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache, partial

from mobius.config.config import ActivationOffloading, Recompute
from mobius.errors import GpuMemoryError, PlanError
from mobius.planner.memory_estimates import (
    TILE_TOKENS,
    USABLE_MEMORY_FRACTION,
    GpuMemoryEstimate,
    Remedy,
    activation_bytes,
    check_gpu_memory,
    describe_experts,
    estimate_gpu_memory,
    estimate_gpu_memory_of_ranks,
    estimate_host_memory,
    estimated_layer,
    largest_gpu_estimate,
    state_bytes,
    tile_tokens,
)
from mobius.planner.memory_policy import (
    MemoryPolicy,
    choose_within_host_memory,
    closed_form_score,
    fits_host,
    lightest,
    policy_by_score,
)
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.request import PlanRequest
from mobius.schedule.plan import MemoryUse, Plan, RecomputeLevel
from mobius.units import format_bytes

PREFETCH_SLOTS = 3
"""A third slot loads a stage while the gradients of another are offloaded. It pays if a stage computes no longer than
this copy takes."""
SMALLEST_CHUNK = 128
MIN_SLICE_TOKENS = 4096
"""Fewest tokens of a slice: fewer do not keep a GPU busy."""
SEQUENCE_STEP = 64
SEQUENCE_TRIES = 64
"""Approximate number of shorter sequences that a refusal tries; each takes milliseconds."""


def fit_plan(request: PlanRequest, *, layer: LayerBytes | None = None, policy: MemoryPolicy | None = None) -> Plan:
    """Check that the plan of `request` fits, and use the rest of the memory as `policy` chooses.

    The default policy is the closed form at default rates. All ranks are assumed to have as much memory as this one;
    resident stages and slots of one rank do not affect other ranks. `layer` gives the bytes of one layer and
    microbatch; without it stages save no activations unless asked to.

    Raises PlanError for more resident stages than a rank has, and GpuMemoryError if the request does not fit.
    """
    plan, per_rank, wanted = request.plan, request.plan.stages_per_rank, request.num_resident
    if wanted is not None and wanted > per_rank:
        raise PlanError(
            f"--resident_stages {wanted}: each rank has {per_rank} stage(s). Use {per_rank} or less, or raise "
            "--num_stages."
        )
    if request.gpu_bytes is None:
        return plan.with_same_use(_least(request, layer))
    _refuse_what_cannot_fit(request, layer, request.gpu_bytes)
    fitting = _fitting_of_ranks(request, layer, request.gpu_bytes)
    policy = policy or policy_by_score(closed_form_score(request))
    return plan.with_memory_uses(choose_within_host_memory(policy, request, fitting))


def fits_gpus(request: PlanRequest, layer: LayerBytes | None) -> bool:
    """Whether the least use of memory that is requested fits the fullest rank; arguments as in `fit_plan`."""
    available = request.gpu_bytes
    return available is None or _least_need(request, layer).total <= available


@lru_cache(maxsize=1024)  # called again once the numbers of rounds are known
def least_host_bytes(request: PlanRequest) -> float:
    """Return the least host memory of all plans of `request` that fit the GPUs, by estimates; infinite if none fits.

    Much faster than `fit_plan`, because stages save no activations unless asked to.
    """
    layer, available = estimated_layer(request), request.gpu_bytes
    if available is None or not fits_gpus(request, layer):
        return math.inf
    least = lightest(request, _fitting_of_ranks(request, layer, available, may_save=False))
    return estimate_host_memory(request, request.plan.with_memory_uses(least)).total


def may_keep_products(request: PlanRequest) -> bool:
    """Whether stages may save matrix products alone: if requested, or if auto may choose.

    Auto does not choose it for eager layers, whose many elementwise kernels have no estimate.
    """
    is_open = request.recompute is Recompute.AUTO and request.compiles and request.num_slices == 1
    return is_open or request.recompute is Recompute.ELEMENTWISE


def max_saving_attention(request: PlanRequest, *, layer: LayerBytes | None, policy: MemoryPolicy) -> int:
    """Return the most stages of each rank that can save attention's results; arguments as in `fit_plan`."""
    most = request.plan.stages_per_rank

    def fits(number: int) -> bool:
        asked = request.trying(num_saving_attention=number)
        try:
            return fits_host(request, fit_plan(asked, layer=layer, policy=policy))
        except GpuMemoryError:
            return False

    return most if fits(most) else bisect_left(range(1, most), True, key=lambda number: not fits(number))


def levels_to_try(request: PlanRequest, layer: LayerBytes | None) -> tuple[RecomputeLevel, ...]:
    """Return the recompute levels to plan with, the fastest first; one if it is given or products are not known."""
    is_known = layer is not None and layer.saved_products is not None
    is_open = request.recompute is Recompute.AUTO and may_keep_products(request)
    return tuple(RecomputeLevel) if is_open and is_known else (request.plan.recompute_level,)


def numbers_of_rounds(request: PlanRequest) -> list[int]:
    """Return the fewest gradient accumulation rounds that fit with the least use of memory, by estimates; may be empty.

    If fewer rounds fit with offloaded activations, which are optional, that number comes first.
    """
    if request.gpu_bytes is None:
        return [1]
    choices = [ActivationOffloading.OFF, ActivationOffloading.ON]
    asked = request.config.pipeline.activation_offloading
    if asked is not ActivationOffloading.AUTO or request.recompute.saves_activations:
        choices = [asked]
    fewest = [_fewest_rounds(request.with_pipeline(activation_offloading=choice)) for choice in choices]
    most = request.plan.num_chunks
    fitting = [number for number in fewest if number is not None]
    return sorted({number for number in fitting if number <= (fewest[0] or most)})


def _fewest_rounds(request: PlanRequest) -> int | None:
    """Return the fewest rounds that fit; None if no number does."""
    available = request.gpu_bytes
    assert available is not None
    for number in divisors(request.plan.num_chunks):
        tried = request.trying(accumulation_rounds=number)
        layer = estimated_layer(tried)
        need = _least_need(tried, layer)
        if need.total > int(available * USABLE_MEMORY_FRACTION) - tried.mailbox_bytes:
            continue
        use = _least(tried, layer)
        if (
            use.num_offloading_activations == 0
            or _all_fit_host(tried, use)
            or fits_host(tried, fit_plan(tried, layer=layer))
        ):
            return number
    return None


def divisors(number: int) -> list[int]:
    """Return the divisors, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def check_given_plan(request: PlanRequest, plan: Plan, *, layer: LayerBytes | None = None) -> None:
    """Raise GpuMemoryError, with the arithmetic, if a plan made elsewhere does not fit on every rank."""
    need = largest_gpu_estimate(estimate_gpu_memory_of_ranks(request, plan, layer))
    if request.gpu_bytes is not None and need.total > request.gpu_bytes:
        raise GpuMemoryError(
            f"--plan: rank {need.rank} needs {format_bytes(need.total)} of GPU memory ({need.describe()}), "
            f"{format_bytes(request.gpu_bytes)} is available. Make a plan for this memory (--dry_run "
            "--gpu_memory_limit), or leave --plan out."
        )


def _least(request: PlanRequest, layer: LayerBytes | None) -> MemoryUse:
    """Return the requested use that takes the least GPU memory."""
    per_rank, num_resident = request.plan.stages_per_rank, request.num_resident or 0
    num_saving_activations = per_rank if request.recompute.saves_activations else 0
    use = MemoryUse(num_resident, num_saving_activations, min(request.plan.num_slots or 0, per_rank - num_resident))
    numbers = _offload_numbers(request, num_saving_activations)
    if request.gpu_bytes is None or len(numbers) == 1:
        return replace(use, num_offloading_activations=numbers[0])
    # With few microbatches, copies in flight take more than activations that stay on the GPU.
    uses = [replace(use, num_offloading_activations=number) for number in (numbers[0], numbers[-1])]
    return min(uses, key=lambda each: _fullest_need(request, each, layer).total)


def _offload_numbers(request: PlanRequest, num_saving_activations: int) -> range:
    """Return the numbers of stages of a rank that may offload activations if the last ones save theirs."""
    asked, most = request.config.pipeline.activation_offloading, request.plan.stages_per_rank - num_saving_activations
    if asked is ActivationOffloading.AUTO:
        return range(most + 1)
    return range(most, most + 1) if asked is ActivationOffloading.ON else range(1)


def _uses(request: PlanRequest, *, may_save: bool) -> Iterator[MemoryUse]:
    """All uses of a rank's memory that the options allow, whether they fit or not; none offloads activations.

    Without `may_save` stages save no more activations than requested.
    """
    plan, least, per_rank = request.plan, _least(request, None), request.plan.stages_per_rank
    # Slices are recomputed: keys and values in their activations would change with each later slice.
    may_save = may_save and request.recompute is Recompute.AUTO and plan.num_slices == 1
    most_resident = per_rank if request.num_resident is None else least.num_resident
    most_saving = per_rank if may_save else least.num_saving_activations
    for num_resident in range(least.num_resident, most_resident + 1):
        num_streamed = per_rank - num_resident
        for num_saving in range(least.num_saving_activations, most_saving + 1):
            in_slots = min(num_saving, num_streamed)
            if num_streamed == 0:
                slots = {0}
            elif plan.num_slots == 1:  # without prefetch only the last streamed stage stays
                slots = {1} if in_slots <= 1 else set()
            else:
                slots = {min(max(number, in_slots), num_streamed) for number in (PREFETCH_SLOTS, plan.num_slots or 0)}
            yield from (MemoryUse(num_resident, num_saving, number) for number in slots)


def _fitting_of_ranks(
    request: PlanRequest, layer: LayerBytes | None, gpu_bytes: int, *, may_save: bool = True
) -> list[list[MemoryUse]]:
    found = {rank: _fitting(request, rank, layer, gpu_bytes, may_save=may_save) for rank in {*request.first_alike}}
    return [found[rank] for rank in request.first_alike]


def _fitting(
    request: PlanRequest, rank: int, layer: LayerBytes | None, gpu_bytes: int, *, may_save: bool
) -> list[MemoryUse]:
    """Return the uses that fit, each with as few offloading stages as possible; the least use if none fits.

    Without `may_save` stages save no more activations than requested.
    """
    usable = int(gpu_bytes * USABLE_MEMORY_FRACTION) - request.mailbox_bytes

    @cache
    def states_take(num_resident: int) -> tuple[int, int]:
        """Bytes without slots, and of each slot."""
        one, two = (
            sum(state_bytes(request, request.plan.with_same_use(MemoryUse(num_resident, 0, slots)), rank).values())
            for slots in (1, 2)
        )
        return 2 * one - two, two - one

    @cache
    def rest_takes(num_saving_activations: int, num_offloading_activations: int) -> int:
        use = MemoryUse(0, num_saving_activations, request.plan.num_slots or 0, num_offloading_activations)
        return sum(activation_bytes(request, request.plan.with_same_use(use), rank, layer).values())

    fitting = []
    for use in _uses(request, may_save=may_save and layer is not None):
        without_slots, slot = states_take(use.num_resident)
        rest = usable - without_slots - use.num_slots * slot
        numbers = _offload_numbers(request, use.num_saving_activations)
        fewest = _fewest_within(rest, numbers, partial(rest_takes, use.num_saving_activations))
        if fewest is not None and (
            fewest == numbers[0] or _all_fit_host(request, replace(use, num_offloading_activations=fewest))
        ):
            fitting.append(replace(use, num_offloading_activations=fewest))
    return fitting or [_least(request, layer)]


def _fewest_within(limit: int, numbers: range, takes: Callable[[int], int]) -> int | None:
    """Return the smallest of `numbers` that takes at most `limit`; from the second on, larger numbers take less."""
    if takes(numbers[0]) <= limit:
        return numbers[0]
    if takes(numbers[-1]) > limit:
        return None
    return numbers[bisect_left(numbers, True, lo=1, hi=len(numbers) - 1, key=lambda number: takes(number) <= limit)]


def _all_fit_host(request: PlanRequest, use: MemoryUse) -> bool:
    """Whether the host has the memory if all ranks do this."""
    return fits_host(request, request.plan.with_same_use(use))


def _fullest_need(request: PlanRequest, use: MemoryUse, layer: LayerBytes | None) -> GpuMemoryEstimate:
    plan, ranks = request.plan.with_same_use(use), sorted({*request.first_alike})
    return largest_gpu_estimate(estimate_gpu_memory(request, plan, rank=rank, layer=layer) for rank in ranks)


def _least_need(request: PlanRequest, layer: LayerBytes | None) -> GpuMemoryEstimate:
    return _fullest_need(request, _least(request, layer), layer)


def _refuse_what_cannot_fit(request: PlanRequest, layer: LayerBytes | None, available: int) -> None:
    """Raise GpuMemoryError, the same on all ranks, if the least use that is requested does not fit the fullest rank."""
    wanted, is_offloading = request.num_resident or 0, request.config.pipeline.use_offload
    need = _least_need(request, layer)
    if need.total <= available:
        return
    for fewer in range(wanted - 1, -1, -1) if is_offloading else ():
        if (total := _least_need(request.with_pipeline(resident_stages=str(fewer)), layer).total) <= available:
            raise GpuMemoryError(
                f"--resident_stages {wanted}: rank {need.rank} needs {format_bytes(need.total)} of GPU memory "
                f"({need.describe()}), {format_bytes(available)} is available. At most --resident_stages {fewer} fits, "
                f"which needs {format_bytes(total)}; auto chooses by what is free."
            )
    # No resident stages were requested, or they are not the reason.
    lowest = request.with_pipeline(resident_stages="0") if is_offloading else request

    def bytes_of(changed: PlanRequest) -> int:
        # A layer was measured for these microbatches and tiles only.
        is_same = changed.microbatch_tokens == request.microbatch_tokens
        is_same = is_same and tile_tokens(changed) == tile_tokens(request)
        return _least_need(changed, layer if is_same else None).total

    check_gpu_memory(
        _least_need(lowest, layer),
        available_bytes=available,
        is_offloading=is_offloading,
        remedies=find_remedies(lowest, bytes_of, available),
        largest=describe_experts(request) if is_offloading else "",
    )


def find_remedies(request: PlanRequest, need: Callable[[PlanRequest], int], available_bytes: int) -> list[Remedy]:
    """Return the smallest change of each kind that fits, those first that cost training least.

    `need` gives the bytes of the fullest rank for a changed request.
    """
    remedies = dict[str, Remedy]()
    for options, changed in (*_other_memory_options(request), *_other_numbers(request)):
        kind = options.split()[0]
        if kind in remedies or (num_bytes := need(changed)) > available_bytes:
            continue
        if changed.host_bytes is None or least_host_bytes(changed) <= changed.host_bytes:
            remedies[kind] = Remedy(options, num_bytes)
    return list(remedies.values())


def _other_memory_options(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Options with which the same microbatches need less GPU memory, as the user types them; small changes first."""
    pipeline, length = request.config.pipeline, request.config.data.seq_length
    recomputes, tokens = not request.recompute.saves_activations, request.microbatch_tokens
    for number in TILE_TOKENS if recomputes and request.shape.is_tileable else ():
        if number < (tile_tokens(request) or tokens):
            yield f"--tile_tokens {number}", request.with_pipeline(tile_tokens=str(number))
    if recomputes and pipeline.activation_offloading is ActivationOffloading.OFF:
        on = request.with_pipeline(activation_offloading=ActivationOffloading.ON)
        yield "--activation_offloading on", on
    slices = range(request.num_slices + 1, length // MIN_SLICE_TOKENS + 1)
    for number in slices if recomputes and request.shape.is_sliceable else ():
        if length % number == 0:
            yield f"--num_slices {number}", request.trying(num_slices=number)
    for number in divisors(request.plan.num_chunks):
        if number > request.plan.accumulation_rounds:
            yield f"--num_rounds {number}", request.trying(accumulation_rounds=number)
    if request.recompute is Recompute.NONE:
        yield "--recompute elementwise", request.with_pipeline(recompute=Recompute.ELEMENTWISE)
    if not recomputes or request.recompute is Recompute.LINEAR:
        yield "--recompute full", request.with_pipeline(recompute=Recompute.FULL)
    chunk = min(pipeline.loss_chunk_tokens, tokens) // 2
    while chunk >= SMALLEST_CHUNK:
        yield f"--loss_chunk_tokens {chunk}", request.with_pipeline(loss_chunk_tokens=chunk)
        chunk //= 2


def _other_numbers(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Smaller stages, microbatches and sequences, and streaming, as the user types them; small changes first."""
    pipeline, plan, length = request.config.pipeline, request.plan, request.config.data.seq_length
    if pipeline.use_offload:  # a larger number makes stages smaller, of which a few are on the GPU at a time
        for number in range(plan.num_stages + plan.num_ranks, request.shape.num_layers + 1, plan.num_ranks):
            yield f"--num_stages {number}", request.trying(num_stages=number)
    for number in range(plan.num_chunks + 1, request.rows + 1):
        if request.rows % number == 0:
            yield f"--num_chunks {number}", request.trying(num_chunks=number)
    if not pipeline.use_offload:
        streamed = request.with_pipeline(use_offload=True, resident_stages="0", recompute=Recompute.AUTO)
        yield "--use_offload --recompute auto", streamed
    yield from request.with_more_nodes()
    step = max(1, length // SEQUENCE_TRIES // SEQUENCE_STEP) * SEQUENCE_STEP
    for shorter in range((length - 1) // step * step, 0, -step):
        yield f"--seq_length {shorter}", request.with_seq_length(shorter)
