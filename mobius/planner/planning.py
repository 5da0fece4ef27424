"""Plans of a run, each made with more facts: a draft, then plans with the data's rows, measured rates, a rehearsal.

A plan that does not fit GPUs, host or disks is refused with the arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mobius.config.config import Config, Dtype
from mobius.distributed.node_checks import smallest_of_all
from mobius.distributed.rank_context import RankContext
from mobius.errors import GpuMemoryError, PlanError
from mobius.hardware.devices import TORCH_DTYPES
from mobius.hardware.host_memory import own_host_bytes
from mobius.models.blocks import ModelParts
from mobius.models.family_support import checked_families, unpackable_reason, unsliceable_reason
from mobius.models.router_loss import refuse_slices
from mobius.planner.disk_use import check_disks, with_room_for_steps
from mobius.planner.fit import DoesNotFitError, may_save_products
from mobius.planner.layer_bench import MicrobatchShape, measure_layer_bytes
from mobius.planner.memory_estimates import estimate_host_memory, tile_tokens
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.plan_file import ModelDigest, SavedPlan, check_saved_plan
from mobius.planner.profile import Profile
from mobius.planner.remedies import check_host_memory, gpu_refusal
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import Effort, PlanResult, solve
from mobius.planner.this_machine import host_bytes_per_pipeline, with_product_share
from mobius.schedule.build import build_schedule
from mobius.schedule.packed_rows import PackedRows


def draft_plan(
    config: Config,
    parts: ModelParts,
    machine: Machine,
    context: RankContext,
    *,
    saved: SavedPlan | None = None,
    packed: PackedRows | None = None,
) -> PlanResult:
    """Check that a run can fit, before data are read and layers are compiled; the plan is a guess.

    Collective if `context` has a rendezvous. A `saved` plan (`--plan`) is only checked; `config` must already have the
    numbers of this plan. `packed` are the facts about packed rows, if they are already known.

    Raises PlanError, GpuMemoryError or HostMemoryError, each with its arithmetic.
    """
    shape, met = parts.shape(), context.widest_rendezvous

    def agree(number: int) -> int:
        return number if met is None else smallest_of_all(met, number)

    machine = with_room_for_steps(machine, config, shape, is_possible=parts.stores_in_order, agree=agree)
    if saved is not None:
        digest = ModelDigest.of(shape, config.model.dtype)
        numbers = {"num_ranks": machine.num_ranks, "num_replicas": machine.num_replicas}
        check_saved_plan(saved, Path(config.planning.plan or ""), model=digest, **numbers)
    given, request = None if saved is None else saved.plan, PlanRequest.of(config, shape, machine, packed)
    # estimates need the speed of this GPU; fp32 has no estimates
    if given is None and not request.candidate.is_known and config.model.dtype is not Dtype.FP32:
        request = replace(request, machine=with_product_share(machine, context, TORCH_DTYPES[config.model.dtype]))
    return _solve(request, parts, given=given, effort=Effort.NOTHING)


def parts_for_rows(
    draft: PlanResult, config: Config, parts: ModelParts, device: torch.device, *, packed: bool
) -> ModelParts:
    """Return the model's parts for packed or sliced rows. Raises PlanError if the model cannot run such rows."""
    request = draft.request
    on_gpu = device.type == "cuda"
    is_sliced = request.num_slices > 1
    if is_sliced and (reason := unsliceable_reason(parts.config, on_gpu=on_gpu, packed=packed)) is not None:
        raise PlanError(f"--num_slices {request.num_slices}: {reason}")
    if config.pipeline.num_tile_tokens and (reason := checked_families().untileable_reason(parts.config.model_type)):
        raise PlanError(
            f"--tile_tokens {config.pipeline.tile_tokens}: layers of the family {parts.config.model_type!r} cannot run "
            f"in tiles ({reason}). Use off."
        )
    if parts.router_loss is not None:
        refuse_slices(request.num_slices)
    if packed and (reason := unpackable_reason(parts.config, on_gpu=on_gpu)) is not None:
        raise PlanError(f"--packing {config.data.packing}: {reason}.")
    if not packed and request.num_slices == 1:
        return parts
    dtype = TORCH_DTYPES[config.model.dtype]  # with `packed_dtype`, no masks are created
    return ModelParts.of(config, parts.config, device, compiled=request.compiles, packed_dtype=dtype)


def plan_rows(
    draft: PlanResult, config: Config, parts: ModelParts, device: torch.device, *, packed: PackedRows | None = None
) -> PlanResult:
    """Plan a drafted run after its data are known; `packed` are the facts about packed rows, equal on all ranks.

    `config` differs from the draft's only in the number of steps. On a GPU a layer's memory is measured. Errors as in
    `draft_plan`.
    """
    request = PlanRequest.of(config, draft.request.shape, draft.request.machine, packed)
    return _plan_again(draft, request, parts, device)


def replan(result: PlanResult, parts: ModelParts, device: torch.device, profile: Profile) -> PlanResult:
    """Plan again with a measured profile and the same microbatches; errors as in `draft_plan`."""
    return _plan_again(result, _open_again(result), parts, device, profile=profile, layer=result.layer)


def replan_with_reserve(result: PlanResult, parts: ModelParts, device: torch.device, reserve_bytes: int) -> PlanResult:
    """Plan again with `reserve_bytes` of GPU memory left free; microbatches change only if nothing else fits.

    Other microbatches are tried only if there is one rank, because messages between ranks have the shape of a
    microbatch. Errors as in `draft_plan`.
    """
    request, asked = replace(_open_again(result), reserve_bytes=reserve_bytes), result.request.config.pipeline
    try:
        return _plan_again(result, request, parts, device, profile=result.profile, layer=result.layer, is_last=True)
    except GpuMemoryError:
        if asked.num_chunks is not None or request.machine.num_ranks * request.machine.num_replicas > 1:
            raise
    request = request.trying(num_chunks=None, num_slices=asked.num_slices)
    return _plan_again(result, request, parts, device, is_last=True)


def _open_again(result: PlanResult) -> PlanRequest:
    """Request with stages, rounds and buffers as the user gave them, and with the chosen microbatches."""
    request = result.request
    whole = PlanRequest.of(request.config, request.shape, request.machine)
    asked, request = whole.candidate, replace(request, num_state_buffers=whole.num_state_buffers)
    return request.trying(num_stages=asked.num_stages, num_rounds=asked.num_rounds, order=asked.order)


def _plan_again(
    before: PlanResult,
    request: PlanRequest,
    parts: ModelParts,
    device: torch.device,
    *,
    profile: Profile | None = None,
    layer: LayerBytes | None = None,
    is_last: bool = False,
) -> PlanResult:
    """Plan for `device` with measurements on it: a profile, and the bytes of a layer with the same microbatches.

    On GPUs, a layer's bytes are measured if `layer` is None, or if the tiles differ from the tiles of `before`. If more
    is measured later, the run is planned again, so only the last plan is simulated.
    """
    given = before.plan if before.is_given else None

    def measured_layer(request: PlanRequest) -> LayerBytes:
        if layer is not None and tile_tokens(request) == tile_tokens(before.request):
            return layer
        shape, with_products = MicrobatchShape.of(request), may_save_products(request)
        return measure_layer_bytes(parts, shape, device=device, with_products=with_products)

    on_gpu = device.type == "cuda"
    is_measured_next = on_gpu and not is_last and (request.measures_layers or request.measures_host)
    is_preliminary = is_measured_next and profile is None and given is None
    result = _solve(
        request,
        parts,
        layer=measured_layer if on_gpu else None,
        profile=profile,
        given=given,
        effort=Effort.NUMBERS if is_preliminary else Effort.ALL,
    )
    if not (is_preliminary or is_last):  # is_last: the files already exist and take their space
        check_disks(result, is_here=True)
    return result


def _solve(request: PlanRequest, parts: ModelParts, **facts: Any) -> PlanResult:
    """Plan as `solve` does, and check the plan's schedule; errors say what to change.

    Raises HostMemoryError if the host has too little memory, and ScheduleError.
    """
    try:
        result = solve(request, **facts)
    except DoesNotFitError as error:
        raise gpu_refusal(error, parts.config) from None
    request, plan = result.request, result.plan
    # Estimate again: this process may have grown while a layer was measured.
    result = replace(result, host_estimate=estimate_host_memory(request, plan, own_bytes=own_host_bytes()))
    if request.machine.on_cpu or plan.num_slots is not None or plan.offloaded_activation_stages:
        check_host_memory(result, host_bytes_per_pipeline(request.config, request.machine), parts.config)
    build_schedule(plan)
    return result
