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
from mobius.memory.resident import ResidentStages
from mobius.memory.spans import NO_SPANS, Spans
from mobius.memory.stage_memory import StageMemory
from mobius.memory.update_queue import UpdateQueue
from mobius.memory.weight_slots import WeightSlots
from mobius.models.blocks import LayerInputs, ModelParts
from mobius.models.families import folder_has_weights
from mobius.models.weights import CheckpointWeights, InitialWeights, WeightSource
from mobius.optim.adamw import AdamWSettings, FlatAdamW
from mobius.optim.grad_scaler import LossScale
from mobius.optim.kernel import load_kernel
from mobius.optim.stepper import Stepper
from mobius.optim.tied import TiedPair
from mobius.planner.budget import (
    CPU_PROCESS_BYTES,
    GIB,
    GPU_PROCESS_BYTES,
    ByteSizes,
    check_host_memory,
)
from mobius.planner.fit import StepTokens, fit_plan
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
    optimizer_threads,
)
from mobius.runtime.distributed_transport import DistributedTransport
from mobius.runtime.executor import Executor, StepBatch
from mobius.runtime.mailbox_setup import NUM_MAILBOXES, Meeting, open_mailboxes
from mobius.runtime.mailboxes import Mailboxes
from mobius.runtime.rehearsal import RehearsalTransport
from mobius.runtime.stage import StageModule, measure_graph_bytes
from mobius.runtime.transport import SingleRankTransport, Transport
from mobius.runtime.waits import WaitClock
from mobius.schedule.build import build_schedule
from mobius.schedule.schedule import Schedule
from mobius.training.auto import Gpu, resolve_auto
from mobius.training.timeline import TraceFacts
from mobius.training.trainer import StepWatch, Trainer

MAX_INCOMING_EDGES = 2
"""From the ranks before and behind."""


@dataclass(frozen=True)
class Blueprint:
    """What is known before any large memory is taken or any rank is spoken to.

    It is the same on all ranks but for `ranks`, `device`, `graph_stages` and the number of slots, which go by what is
    free on the rank's GPU; slots change nothing that another rank sees.
    """

    config: Config
    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    parts: ModelParts
    shape: ModelShape
    plan: Plan
    schedule: Schedule
    graph_stages: frozenset[int]
    """Own stages that keep their activations from forward to backward instead of recomputing them."""

    @property
    def message_shape(self) -> tuple[int, int, int]:
        """Shape [B, L, H] of every activation and activation gradient between stages."""
        return _message_shape(self.config, self.shape)


def _message_shape(config: Config, shape: ModelShape) -> tuple[int, int, int]:
    return (config.pipeline.microbatch_size, config.data.seq_length, shape.hidden_size)


def draw_blueprint(config: Config, ranks: Ranks, model_config: PretrainedConfig) -> Blueprint:
    """Plan the run and check that it fits into GPU and host memory.

    Raises PlanError, GpuMemoryError or HostMemoryError, each with its arithmetic.
    """
    pipeline = config.pipeline
    if pipeline.copy_messages:
        separate_device_queues()
    device = choose_device(pipeline.device, ranks)
    check_dtype(config.model.dtype, device)
    gpu_bytes = cap_gpu_memory(device, pipeline.gpu_memory_limit)
    wants_graphs = pipeline.compile is Compile.ON or (pipeline.compile is Compile.AUTO and device.type == "cuda")
    parts = ModelParts(model_config, device, compiled=wants_graphs)
    shape = parts.shape()
    resolved = resolve_auto(config, shape, num_ranks=ranks.num_ranks, gpu=_gpu(device))
    config, pipeline = resolved.config, resolved.config.pipeline
    plan = make_plan(
        shape,
        num_ranks=ranks.num_ranks,
        num_stages=pipeline.stages,
        num_microbatches=pipeline.num_microbatches,
        num_slots=pipeline.num_slots if pipeline.use_offload else None,
        spans=resolved.spans,
    )
    dtype = TORCH_DTYPES[config.model.dtype]
    sizes = ByteSizes.of(config.model.dtype, has_fp32_gradients=pipeline.fp32_gradients)
    message = _message_shape(config, shape)
    fit = partial(
        fit_plan,
        plan,
        shape,
        sizes,
        rank=ranks.rank,
        tokens=StepTokens(
            step=pipeline.batch_size * config.data.seq_length,
            microbatch=pipeline.microbatch_size * config.data.seq_length,
            loss_chunk=pipeline.loss_chunk_tokens,
        ),
        gpu_bytes=gpu_bytes,
        recompute=pipeline.recompute,
        reserved_bytes=MAX_INCOMING_EDGES * NUM_MAILBOXES * math.prod(message) * dtype.itemsize,
    )
    fitted = fit()  # by guess: what cannot fit is refused before anything is compiled
    if pipeline.use_offload or device.type == "cpu":
        limit = pipeline.host_memory_limit
        check_host_memory(
            plan.spans,
            shape,
            bytes_per_parameter=sizes.host if pipeline.use_offload else sizes.resident,
            process_bytes=CPU_PROCESS_BYTES if device.type == "cpu" else GPU_PROCESS_BYTES,
            num_ranks=ranks.num_ranks,
            available_bytes=available_host_bytes() if limit is None else int(limit * GIB),
        )
    if device.type == "cuda" and pipeline.recompute is not Recompute.FULL:
        fitted = fit(graph_bytes=measure_graph_bytes(parts, shape=message, dtype=dtype, device=device))
    plan = fitted.plan
    schedule = build_schedule(ranks.num_ranks, plan.stages_per_rank, plan.num_microbatches, plan.num_slots)
    return Blueprint(config, ranks, device, dtype, parts, shape, plan, schedule, fitted.graph_stages)


def _gpu(device: torch.device) -> Gpu | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.name, properties.total_memory)


def connect(blueprint: Blueprint, spans: Spans = NO_SPANS) -> Transport:
    """Meet the other ranks; collective."""
    ranks = blueprint.ranks
    if ranks.num_ranks == 1:
        return SingleRankTransport()
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
    arena: HostArena | None = None
    updates: UpdateQueue | None = None
    memory: StageMemory
    if blueprint.plan.num_slots is None:
        memory = ResidentStages(layouts, dtype=blueprint.dtype, device=device)
    else:
        gradient_dtype = torch.float32 if config.pipeline.fp32_gradients else None
        is_cuda = device.type == "cuda"
        arena = HostArena(layouts, dtype=blueprint.dtype, register=is_cuda, gradient_dtype=gradient_dtype)
        updates = UpdateQueue() if config.pipeline.overlap_optimizer else None
        memory = WeightSlots(
            arena.states, num_slots=blueprint.plan.num_slots, device=device, updates=updates, spans=spans
        )
    source = source or _weight_source(blueprint, model_folder)
    _fill(memory, stages, source, show_progress=blueprint.ranks.is_first)
    return RankState(stages, memory, arena, updates)


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
    """Put the trainer together from finished parts; without the C kernel, torch updates streamed stages."""
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
    has_kernel = has_kernel and state.arena is not None
    kernel = load_kernel(cache_folder(), num_threads=optimizer_threads()) if has_kernel else None
    stepper = Stepper(
        FlatAdamW(settings, kernel),
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
