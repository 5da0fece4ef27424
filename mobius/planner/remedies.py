"""Changes with which a run fits whose least use of GPU memory does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mobius.config.config import ActivationOffloading, Recompute
from mobius.errors import GpuMemoryError
from mobius.planner.fit import MIN_SLICE_TOKENS, DoesNotFitError, divisors, least_gpu_estimate, least_host_bytes
from mobius.planner.memory_estimates import (
    TILE_TOKENS,
    Remedy,
    check_gpu_memory,
    describe_experts,
    tile_tokens,
)
from mobius.planner.request import PlanRequest
from mobius.units import format_bytes

SMALLEST_CHUNK = 128
SEQUENCE_STEP = 64
SEQUENCE_TRIES = 64
"""Approximate number of shorter sequences that a refusal tries; each takes milliseconds."""


def gpu_refusal(error: DoesNotFitError) -> GpuMemoryError:
    """Return the error with its arithmetic and what to change."""
    request, layer = error.request, error.layer
    need, available = least_gpu_estimate(request, layer), request.gpu_bytes or 0
    wanted, is_offloading = request.num_resident or 0, request.config.pipeline.use_offload
    for fewer in range(wanted - 1, -1, -1) if is_offloading else ():
        lower = request.with_pipeline(resident_stages=str(fewer))
        if (total := least_gpu_estimate(lower, layer).total) <= available:
            return GpuMemoryError(
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
        return least_gpu_estimate(changed, layer if is_same else None).total

    try:
        check_gpu_memory(
            least_gpu_estimate(lowest, layer),
            available_bytes=available,
            is_offloading=is_offloading,
            remedies=find_remedies(lowest, bytes_of, available),
            largest=describe_experts(request) if is_offloading else "",
        )
    except GpuMemoryError as refused:
        return refused
    return error


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
