"""Draws a run before any large memory is taken: device, model, plan, schedule; checks that all of it fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from mobius.config.config import Compile, Config, Dtype
from mobius.limits import INCOMING_EDGES, NUM_MAILBOXES
from mobius.machine.available import available_host_bytes, own_host_bytes
from mobius.machine.device_order import order_devices
from mobius.machine.devices import TORCH_DTYPES, cap_gpu_memory, check_dtype, choose_device, has_gpus
from mobius.messages.meeting import Meeting, meet_at_store
from mobius.models.blocks import ModelParts
from mobius.plan.budget import (
    ByteSizes,
    HostNeed,
    StepTokens,
    check_host_memory,
    host_need,
    waiting_stages,
)
from mobius.plan.fit import FittedPlan, fit_as_given, fit_plan, need_bytes
from mobius.plan.fit_request import FitRequest
from mobius.plan.forecast import Forecast, forecast
from mobius.plan.memory_use import StepModel, by_simulation
from mobius.plan.plan import Plan, make_plan
from mobius.plan.plan_file import ModelDigest, SavedPlan, check_saved_plan
from mobius.plan.preference import Candidate
from mobius.plan.profile import Profile
from mobius.plan.shape import ModelShape
from mobius.plan.working_set import LayerBytes
from mobius.planning.auto import Gpu, estimate_of, measures_at_start, resolve_auto, step_rules, usual_process_bytes
from mobius.ranks import Ranks, separate_device_queues
from mobius.runtime.stage import measure_layer_bytes
from mobius.schedule.build import build_schedule
from mobius.schedule.schedule import Schedule
from mobius.units import GIB


@dataclass(frozen=True)
class Blueprint:
    """What is known before any large memory is taken or any rank is spoken to.

    It is the same on all ranks but for `ranks`, `device`, and what goes by the memory that is free on the rank's GPU:
    `graph_stages`, the resident stages, the number of slots, and what is predicted from those. Of other ranks the plan
    tells what they do if their GPUs have as much memory as this one's; compute and messages are the same whatever they
    do.
    """

    config: Config
    ranks: Ranks
    device: torch.device
    device_order: tuple[int, ...] | None
    """The index of every rank's GPU; None: no GPUs, or only one rank."""
    meeting: Meeting | None
    """Where ranks with GPUs can meet before they have communicators."""
    dtype: torch.dtype
    parts: ModelParts
    shape: ModelShape
    plan: Plan
    schedule: Schedule
    graph_stages: frozenset[int]
    """Own stages that keep their activations from forward to backward instead of recomputing them."""
    waiting: frozenset[int]
    """Stages whose gradients are kept until all of the step's are known; the others are updated behind their backward.
    """
    asked: Config
    """What was asked for: `config` with what was auto."""
    gpu_bytes: int | None
    uses: tuple[Candidate, ...]
    """What every rank does with its memory, as far as this one knows."""
    need_bytes: tuple[int, ...]
    """GPU memory of every rank by the planner's arithmetic, as far as this one knows."""
    host: HostNeed
    """The host's memory of all ranks, if their processes are as large as this one."""
    forecast: Forecast | None
    """None where nothing is known of the device's speed."""
    profile: Profile | None
    """What the plan goes by, as far as anything is known of the device's speed."""
    layer_bytes: LayerBytes | None
    """Of one microbatch, as measured on the GPU; None on a CPU."""

    others_graph_stages: frozenset[int] = frozenset()
    """The same as `graph_stages` of the other ranks, if their GPUs have as much memory as this one's."""

    @property
    def compiles(self) -> bool:
        """Whether layers and loss run as compiled graphs."""
        return _compiles(self.config, self.device)

    @property
    def message_shape(self) -> tuple[int, int, int]:
        """Shape [B, L, H] of every activation and activation gradient between stages."""
        return _message_shape(self.config, self.shape)


def _message_shape(config: Config, shape: ModelShape) -> tuple[int, int, int]:
    return (config.pipeline.microbatch_size, config.data.seq_length, shape.hidden_size)


def draw_blueprint(
    config: Config, ranks: Ranks, model_config: PretrainedConfig, *, saved: SavedPlan | None = None
) -> Blueprint:
    """Plan the run and check that it fits into GPU and host memory; collective if ranks have GPUs.

    With `saved` (`--plan`) nothing is chosen, only checked; `config` must have taken its numbers.

    Raises PlanError, GpuMemoryError or HostMemoryError, each with its arithmetic.
    """
    pipeline = config.pipeline
    if pipeline.copy_messages:
        separate_device_queues()
    meeting = meet_at_store(ranks) if ranks.num_ranks > 1 and has_gpus(pipeline.device, ranks) else None
    device_order = order_devices(config, meeting) if meeting is not None else None
    device = choose_device(pipeline.device, ranks, device_order)
    check_dtype(config.model.dtype, device)
    gpu_bytes = cap_gpu_memory(device, pipeline.gpu_memory_limit)
    parts = ModelParts(model_config, device, compiled=_compiles(config, device))
    if saved is not None:
        digest = ModelDigest.of(parts.shape(), config.model.dtype)
        check_saved_plan(saved, Path(config.planning.plan or ""), model=digest, num_ranks=ranks.num_ranks)
    will_be_redrawn = device.type == "cuda" and saved is None and measures_at_start(config)
    return _draw(
        config, ranks, device, device_order, meeting, gpu_bytes, parts, saved=saved, is_preliminary=will_be_redrawn
    )


def redraw(blueprint: Blueprint, profile: Profile) -> Blueprint:
    """Plan again by what was measured, with the same microbatches; errors as `draw_blueprint`."""
    asked, chosen = blueprint.asked, blueprint.config.pipeline
    config = replace(asked, pipeline=replace(asked.pipeline, num_chunks=chosen.num_microbatches))
    b = blueprint
    return _draw(
        config,
        b.ranks,
        b.device,
        b.device_order,
        b.meeting,
        b.gpu_bytes,
        b.parts,
        profile=profile,
        layer_bytes=b.layer_bytes,
    )


def _draw(
    asked: Config,
    ranks: Ranks,
    device: torch.device,
    device_order: tuple[int, ...] | None,
    meeting: Meeting | None,
    gpu_bytes: int | None,
    parts: ModelParts,
    *,
    profile: Profile | None = None,
    saved: SavedPlan | None = None,
    layer_bytes: LayerBytes | None = None,
    is_preliminary: bool = False,
) -> Blueprint:
    """Plan for a device; `profile` and `layer_bytes` are what was measured on it.

    What is preliminary goes by a closed form: the simulation comes with what is measured.
    """
    shape, gpu = parts.shape(), _gpu(device)
    resolved = resolve_auto(asked, shape, num_ranks=ranks.num_ranks, gpu=gpu, measured=profile)
    config, pipeline = resolved.config, resolved.config.pipeline
    profile = profile or estimate_of(config, shape, num_ranks=ranks.num_ranks, gpu=gpu)
    model = None if profile is None or is_preliminary else StepModel(profile, step_rules(config, shape))
    plan = make_plan(
        shape,
        num_ranks=ranks.num_ranks,
        num_stages=pipeline.stages,
        num_microbatches=pipeline.num_microbatches,
        num_slots=pipeline.num_slots if pipeline.use_offload else None,
        spans=resolved.spans if saved is None else saved.plan.spans,
    )
    dtype = TORCH_DTYPES[config.model.dtype]
    message = _message_shape(config, shape)
    request = FitRequest(
        plan,
        shape,
        ByteSizes.of(config.model.dtype, has_fp32_gradients=pipeline.fp32_gradients),
        tokens=StepTokens(
            step=pipeline.batch_size * config.data.seq_length,
            microbatch=pipeline.microbatch_size * config.data.seq_length,
            loss_chunk=pipeline.loss_chunk_tokens,
            batch_size=pipeline.batch_size,
        ),
        gpu_bytes=gpu_bytes,
        recompute=pipeline.recompute,
        num_resident=plan.stages_per_rank if pipeline.resident_stages == "all" else pipeline.num_resident_stages,
        waiting=waiting_stages(
            plan.num_stages,
            clips=config.optim.max_grad_norm > 0,
            scales_loss=config.model.dtype is Dtype.FP16,
            is_tied=parts.is_tied,
        ),
        reserved_bytes=INCOMING_EDGES * NUM_MAILBOXES * math.prod(message) * dtype.itemsize,
        compiled=_compiles(config, device),
    )
    # By guess: what cannot fit is refused before anything is compiled.
    measured = layer_bytes
    fitted = _fit(request, ranks, saved=saved, measured=measured)
    host = _count_host(request, fitted.plan, asked, device)
    if device.type == "cuda":
        measured = measured or measure_layer_bytes(parts, shape=message, dtype=dtype, device=device)
        fitted = _fit(request, ranks, saved=saved, measured=measured, model=model)
        host = _count_host(request, fitted.plan, asked, device)
    graph_bytes, peak_bytes = (measured.graph, measured.peak) if measured is not None else (None, None)
    plan = fitted.plan
    schedule = build_schedule(ranks.num_ranks, plan.stages_per_rank, plan.num_microbatches, plan.slots, plan.resident)
    return Blueprint(
        config,
        ranks,
        device,
        device_order,
        meeting,
        dtype,
        parts,
        shape,
        plan,
        schedule,
        fitted.graph_stages,
        request.waiting,
        asked,
        gpu_bytes,
        fitted.uses,
        need_bytes(request, fitted, graph_bytes=graph_bytes, peak_bytes=peak_bytes),
        host,
        None if model is None else forecast(plan, fitted.uses, shape, model),
        profile,
        measured,
        fitted.others_graph_stages,
    )


def _fit(
    request: FitRequest,
    ranks: Ranks,
    *,
    saved: SavedPlan | None,
    measured: LayerBytes | None,
    model: StepModel | None = None,
) -> FittedPlan:
    """Fit the plan into GPU memory; what is best is found by simulation with `model`, without one by a closed form."""
    if saved is not None:
        return fit_as_given(request, FittedPlan(saved.plan, saved.graph_stages), rank=ranks.rank, measured=measured)
    graph_bytes, peak_bytes = (measured.graph, measured.peak) if measured is not None else (None, None)
    choose = None if model is None else by_simulation(model)
    return fit_plan(request, rank=ranks.rank, graph_bytes=graph_bytes, peak_bytes=peak_bytes, choose=choose)


def _count_host(request: FitRequest, plan: Plan, asked: Config, device: torch.device) -> HostNeed:
    """The host's memory; raises HostMemoryError if there is less and the plan needs it for stages."""
    pipeline, on_cpu = asked.pipeline, device.type == "cpu"
    need = host_need(
        plan,
        request.shape,
        request.sizes,
        # A process that has run something else before has more.
        process_bytes=max(usual_process_bytes(asked, plan, on_cpu=on_cpu), 0 if on_cpu else own_host_bytes()),
        waiting=request.waiting,
        on_cpu=on_cpu,
    )
    if on_cpu or plan.num_slots is not None:
        limit = pipeline.host_memory_limit
        check_host_memory(need, available_bytes=available_host_bytes() if limit is None else int(limit * GIB))
    return need


def _compiles(config: Config, device: torch.device) -> bool:
    wanted = config.pipeline.compile
    return wanted is Compile.ON or (wanted is Compile.AUTO and device.type == "cuda")


def _gpu(device: torch.device) -> Gpu | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.name, properties.total_memory)
