"""The composition root: turns a configuration into the parts of a run; the only place that knows everybody."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PretrainedConfig

from mobius.config import Compile, Config, Dtype, Recompute
from mobius.data.batches import Batch, Batches
from mobius.memory.available import available_host_bytes
from mobius.memory.host_arena import HostArena
from mobius.memory.layout import StageLayout
from mobius.memory.mixed import take_memory
from mobius.memory.spans import NO_SPANS, Spans
from mobius.memory.stage_memory import StageMemory
from mobius.memory.update_queue import UpdateQueue
from mobius.models.blocks import LayerInputs, ModelParts
from mobius.models.families import folder_has_weights
from mobius.models.weights import CheckpointWeights, InitialWeights, WeightSource
from mobius.optim.adamw import AdamWSettings, FlatAdamW
from mobius.optim.fused_update import FusedUpdate
from mobius.optim.grad_scaler import LossScale
from mobius.optim.kernel import load_kernel
from mobius.optim.stepper import Stepper
from mobius.optim.tied import TiedPair
from mobius.planner.budget import (
    CPU_PROCESS_BYTES,
    GIB,
    GPU_PROCESS_BYTES,
    ByteSizes,
    StepTokens,
    check_host_memory,
    host_need,
    waiting_stages,
)
from mobius.planner.fit import FitRequest, FittedPlan, fit_plan
from mobius.planner.plan import Plan, make_plan
from mobius.planner.shape import ModelShape
from mobius.ranks import Ranks, allows_peer_copies, cache_folder, separate_device_queues
from mobius.runtime.cuda_copies import CudaCopyEngine
from mobius.runtime.devices import (
    TORCH_DTYPES,
    MemoryMeter,
    cap_gpu_memory,
    check_dtype,
    choose_device,
    has_gpus,
    optimizer_threads,
)
from mobius.runtime.distributed_transport import DistributedTransport
from mobius.runtime.executor import Executor, StepBatch
from mobius.runtime.mailbox_setup import NUM_MAILBOXES, Meeting, open_mailboxes
from mobius.runtime.mailboxes import Mailboxes
from mobius.runtime.rehearsal import RehearsalTransport
from mobius.runtime.stage import StageModule, measure_graph_bytes
from mobius.runtime.store_meeting import meet_at_store
from mobius.runtime.transport import SingleRankTransport, Transport
from mobius.runtime.waits import WaitClock
from mobius.schedule.build import build_schedule
from mobius.schedule.schedule import Schedule
from mobius.training.placement import order_devices, send_by_host_if_broken
from mobius.training.timeline import TraceFacts
from mobius.training.trainer import StepWatch, Trainer

MAX_INCOMING_EDGES = 2
"""From the ranks before and behind."""


@dataclass(frozen=True)
class Blueprint:
    """What is known before any large memory is taken or any rank is spoken to.

    It is the same on all ranks but for `ranks`, `device`, `graph_stages`, the resident stages and the number of slots,
    which go by what is free on the rank's GPU. Of other ranks the plan tells what they do if their GPUs have as much
    memory as this one's; compute and messages are the same whatever they do.
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

    @property
    def message_shape(self) -> tuple[int, int, int]:
        """Shape [B, L, H] of every activation and activation gradient between stages."""
        return _message_shape(self.config, self.shape)


def _message_shape(config: Config, shape: ModelShape) -> tuple[int, int, int]:
    return (config.pipeline.microbatch_size, config.data.seq_length, shape.hidden_size)


def draw_blueprint(config: Config, ranks: Ranks, model_config: PretrainedConfig) -> Blueprint:
    """Plan the run and check that it fits into GPU and host memory; collective if ranks have GPUs.

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
    parts = ModelParts(model_config, device, compiled=_wants_graphs(config, device))
    shape = parts.shape()
    plan = make_plan(
        shape,
        num_ranks=ranks.num_ranks,
        num_stages=pipeline.num_stages,
        num_microbatches=pipeline.num_microbatches,
        num_slots=pipeline.num_slots if pipeline.use_offload else None,
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
        reserved_bytes=MAX_INCOMING_EDGES * NUM_MAILBOXES * math.prod(message) * dtype.itemsize,
    )
    # By guess: what cannot fit is refused before anything is compiled.
    fitted = _fit(request, config, ranks, device, graph_bytes=None)
    if device.type == "cuda" and pipeline.recompute is not Recompute.FULL:
        measured = measure_graph_bytes(parts, shape=message, dtype=dtype, device=device)
        fitted = _fit(request, config, ranks, device, graph_bytes=measured)
    plan = fitted.plan
    schedule = build_schedule(
        ranks.num_ranks, plan.stages_per_rank, plan.num_microbatches, plan.num_slots, plan.resident
    )
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
    )


def _fit(
    request: FitRequest, config: Config, ranks: Ranks, device: torch.device, *, graph_bytes: int | None
) -> FittedPlan:
    """Fit the plan into GPU memory, and check that what it leaves to the host fits there."""
    fitted = fit_plan(request, rank=ranks.rank, graph_bytes=graph_bytes)
    on_cpu, limit = device.type == "cpu", config.pipeline.host_memory_limit
    if on_cpu or fitted.plan.num_slots is not None:
        need = host_need(
            fitted.plan,
            request.shape,
            request.sizes,
            process_bytes=CPU_PROCESS_BYTES if on_cpu else GPU_PROCESS_BYTES,
            waiting=request.waiting,
            on_cpu=on_cpu,
        )
        check_host_memory(need, available_bytes=available_host_bytes() if limit is None else int(limit * GIB))
    return fitted


def _wants_graphs(config: Config, device: torch.device) -> bool:
    wanted = config.pipeline.compile
    return wanted is Compile.ON or (wanted is Compile.AUTO and device.type == "cuda")


def connect(blueprint: Blueprint, spans: Spans = NO_SPANS) -> Transport:
    """Meet the other ranks; collective."""
    ranks = blueprint.ranks
    if ranks.num_ranks == 1:
        return SingleRankTransport()
    if blueprint.meeting is not None:
        send_by_host_if_broken(
            blueprint.meeting,
            lambda: CudaCopyEngine(blueprint.device, allows_peers=True),
            device=blueprint.device,
            order=blueprint.device_order,
        )
    has_copies = blueprint.config.pipeline.copy_messages and blueprint.device.type == "cuda"
    return DistributedTransport(
        rank=ranks.rank,
        num_ranks=ranks.num_ranks,
        device=blueprint.device,
        shape=blueprint.message_shape,
        dtype=blueprint.dtype,
        spans=spans,
        mailboxes=partial(_mailboxes, blueprint) if has_copies else None,
    )


def _mailboxes(blueprint: Blueprint, meeting: Meeting) -> Mailboxes | None:
    """Mailboxes for messages by copy engines, or None where they do not work; collective."""
    device = blueprint.device
    return open_mailboxes(
        meeting,
        lambda: CudaCopyEngine(device, allows_peers=allows_peer_copies()),
        device=device,
        message_bytes=math.prod(blueprint.message_shape) * blueprint.dtype.itemsize,
    )


@dataclass(frozen=True)
class RankState:
    """This rank's stages: their code, and the memory that holds their training state."""

    stages: Mapping[int, StageModule]
    memory: StageMemory
    arena: HostArena | None
    updates: UpdateQueue | None

    def close(self) -> None:
        """Give page-locked memory back; nothing may be copying any more."""
        if self.arena is not None:
            self.arena.close()


def load_state(
    blueprint: Blueprint, model_folder: Path, *, source: WeightSource | None = None, spans: Spans = NO_SPANS
) -> RankState:
    """Allocate this rank's stages and fill them, tensor by tensor; no rank reads another's stages.

    `source` gives the values instead of `model_folder` (a benchmark's are random).
    """
    config, parts, device = blueprint.config, blueprint.parts, blueprint.device
    inputs = LayerInputs(parts, device=device, dtype=blueprint.dtype)
    chunk = config.pipeline.loss_chunk_tokens
    stages = {
        stage: StageModule(parts, blueprint.plan.spans[stage], inputs, loss_chunk_tokens=chunk)
        for stage in blueprint.plan.stages_of(blueprint.ranks.rank)
    }
    layouts = {stage: StageLayout.of(module.shapes) for stage, module in stages.items()}
    updates = UpdateQueue() if config.pipeline.overlap_optimizer else None
    memory, arena = take_memory(
        layouts,
        resident=blueprint.plan.resident,
        num_slots=blueprint.plan.slots_of(blueprint.ranks.rank),
        dtype=blueprint.dtype,
        gradient_dtype=torch.float32 if config.pipeline.fp32_gradients else blueprint.dtype,
        waiting=blueprint.waiting,
        device=device,
        updates=updates,
        spans=spans,
    )
    source = source or _weight_source(blueprint, model_folder)
    _fill(memory, stages, source, show_progress=blueprint.ranks.is_first)
    return RankState(stages, memory, arena, updates if arena is not None else None)


def _weight_source(blueprint: Blueprint, model_folder: Path) -> WeightSource:
    parts = blueprint.parts
    if not folder_has_weights(model_folder):
        return InitialWeights(parts, seed=blueprint.config.optim.seed)
    return CheckpointWeights(model_folder, parts.stored_names)


def _fill(memory: StageMemory, stages: Mapping[int, StageModule], source: WeightSource, *, show_progress: bool) -> None:
    names = [(stage, name, shape) for stage, module in stages.items() for name, shape in module.shapes.items()]
    # None: no bar where the output is not a terminal.
    disable = None if show_progress else True
    for stage, name, shape in tqdm(names, desc="loading weights", unit="tensor", leave=False, disable=disable):
        memory.states[stage].set_parameter(name, source.read(name, shape))


def rehearse(blueprint: Blueprint, state: RankState) -> None:
    """Play one step of this rank alone on made-up data, so that the first real one finds kernels and memory ready.

    Leaves weights and optimizer as they are; the gradients it makes are overwritten by the first step's.
    """
    config, device = blueprint.config, blueprint.device
    transport = RehearsalTransport(
        rank=blueprint.ranks.rank,
        num_ranks=blueprint.ranks.num_ranks,
        device=device,
        shape=blueprint.message_shape,
        dtype=blueprint.dtype,
    )
    tokens = torch.zeros(config.pipeline.batch_size, config.data.seq_length, dtype=torch.int64)
    _executor(blueprint, state, transport, WaitClock(device), frozenset()).run(
        StepBatch(tokens, tokens, num_targets=tokens.numel(), num_tokens=tokens.numel())
    )
    MemoryMeter(device).synchronize()


def _executor(
    blueprint: Blueprint,
    state: RankState,
    transport: Transport,
    clock: WaitClock,
    unsealed_names: frozenset[str],
    spans: Spans = NO_SPANS,
) -> Executor:
    return Executor(
        blueprint.schedule,
        stages=state.stages,
        memory=state.memory,
        transport=transport,
        clock=clock,
        device=blueprint.device,
        unsealed_names=unsealed_names,
        graph_stages=blueprint.graph_stages,
        spans=spans,
    )


def assemble(
    blueprint: Blueprint,
    state: RankState,
    transport: Transport,
    batches: Batches,
    *,
    spans: Spans = NO_SPANS,
    watches: Sequence[StepWatch] = (),
    has_kernel: bool = True,
) -> Trainer:
    """Put the trainer together from finished parts; without the C kernel, torch updates what is in host memory."""
    config, parts, plan = blueprint.config, blueprint.parts, blueprint.plan
    clock = WaitClock(blueprint.device)
    tied = (
        TiedPair(*parts.tied_names, embedding_stage=0, head_stage=plan.num_stages - 1, num_ranks=plan.num_ranks)
        if parts.tied_names
        else None
    )
    executor = _executor(blueprint, state, transport, clock, tied.names if tied else frozenset(), spans)
    optim = config.optim
    settings = AdamWSettings(optim.adam_beta1, optim.adam_beta2, optim.adam_epsilon, optim.weight_decay)
    has_kernel = has_kernel and (state.arena is not None or blueprint.device.type == "cpu")
    kernel = load_kernel(cache_folder(), num_threads=optimizer_threads()) if has_kernel else None
    adamw = FlatAdamW(settings, kernel, FusedUpdate() if _wants_graphs(config, blueprint.device) else None)
    adamw.warm_up(state.memory.states.values())
    stepper = Stepper(
        adamw,
        memory=state.memory,
        transport=transport,
        clock=clock,
        loss_scale=LossScale(is_dynamic=config.model.dtype is Dtype.FP16),
        num_stages=plan.num_stages,
        max_grad_norm=optim.max_grad_norm,
        tied=tied,
        updates=state.updates,
        spans=spans,
    )
    return Trainer(
        config.optim,
        executor=executor,
        stepper=stepper,
        batches=_step_batches(batches, pin=blueprint.device.type == "cuda"),
        transport=transport,
        clock=clock,
        meter=MemoryMeter(blueprint.device),
        watches=watches,
    )


def _step_batches(batches: Batches, *, pin: bool) -> Iterator[StepBatch]:
    """The endless batches as tensors, page-locked if they go to a GPU."""
    for batch in batches:
        yield _to_step_batch(batch, pin=pin)


def _to_step_batch(batch: Batch, *, pin: bool) -> StepBatch:
    input_ids, labels = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)
    if pin:
        input_ids, labels = input_ids.pin_memory(), labels.pin_memory()
    return StepBatch(input_ids, labels, batch.num_targets, batch.num_tokens)


def trace_facts(blueprint: Blueprint) -> TraceFacts:
    """What the head of a trace tells of the run."""
    plan = blueprint.plan
    return TraceFacts(
        num_ranks=plan.num_ranks,
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        num_slots=plan.num_slots,
        device=MemoryMeter(blueprint.device).device_name,
    )
