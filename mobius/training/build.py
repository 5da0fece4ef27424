"""The composition root: turns a configuration into the parts of a run; the only place that knows everybody."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from mobius.config.config import Dtype
from mobius.data.batches import Batch, Batches
from mobius.limits import max_sends_under_way
from mobius.machine.devices import (
    MemoryMeter,
    optimizer_threads,
)
from mobius.machine.peer_check import send_by_host_if_broken
from mobius.memory.host_arena import HostArena
from mobius.memory.layout import StageLayout
from mobius.memory.rank_memory import take_memory
from mobius.memory.spans import NO_SPANS, Spans
from mobius.memory.stage_memory import StageMemory
from mobius.messages.cuda_copies import CudaCopyEngine
from mobius.messages.distributed import DistributedTransport
from mobius.messages.mailboxes import Mailboxes, open_mailboxes
from mobius.messages.rehearsal import RehearsalTransport
from mobius.messages.transport import SingleRankTransport, Transport
from mobius.models.blocks import LayerInputs
from mobius.models.weights import CheckpointWeights, InitialWeights, WeightSource, folder_has_weights
from mobius.optim.adamw import AdamWSettings, FlatAdamW
from mobius.optim.fused_update import FusedUpdate
from mobius.optim.grad_scaler import LossScale
from mobius.optim.kernel import load_kernel
from mobius.optim.stepper import Stepper
from mobius.optim.tied import TiedPair
from mobius.optim.update_queue import UpdateQueue
from mobius.output.recordings import StepWatch
from mobius.output.trace import TraceFacts
from mobius.planning.blueprint import Blueprint
from mobius.ranks import allows_peer_copies, cache_folder
from mobius.runtime.executor import Executor, StepBatch
from mobius.runtime.stage import StageModule
from mobius.runtime.waits import WaitClock
from mobius.training.trainer import Trainer


def connect(blueprint: Blueprint, spans: Spans = NO_SPANS) -> Transport:
    """Meet the other ranks; collective."""
    ranks = blueprint.place.ranks
    if ranks.num_ranks == 1:
        return SingleRankTransport()
    if blueprint.place.meeting is not None:
        send_by_host_if_broken(
            blueprint.place.meeting,
            lambda: CudaCopyEngine(blueprint.place.device, allows_peers=True),
            device=blueprint.place.device,
            order=blueprint.place.device_order,
        )
    has_copies = blueprint.config.pipeline.copy_messages and blueprint.place.device.type == "cuda"
    return DistributedTransport(
        rank=ranks.rank,
        num_ranks=ranks.num_ranks,
        device=blueprint.place.device,
        shape=blueprint.message_shape,
        dtype=blueprint.dtype,
        spans=spans,
        mailboxes=partial(_mailboxes, blueprint) if has_copies else None,
        # On a CPU the host does the work and is never ahead of it.
        max_sends=max_sends_under_way(blueprint.plan.num_microbatches)
        if blueprint.place.device.type == "cuda"
        else None,
    )


def _mailboxes(blueprint: Blueprint) -> Mailboxes | None:
    """Mailboxes for messages by copy engines, or None where they do not work; collective."""
    device, meeting = blueprint.place.device, blueprint.place.meeting
    assert meeting is not None  # several ranks on GPUs have met
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
    memory: Mapping[int, StageMemory]
    layer_inputs: LayerInputs
    arena: HostArena | None

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
    config, parts, device = blueprint.config, blueprint.parts, blueprint.place.device
    chunk = config.pipeline.loss_chunk_tokens
    stages = {
        stage: StageModule(parts, blueprint.plan.cuts[stage], loss_chunk_tokens=chunk)
        for stage in blueprint.plan.stages_of(blueprint.place.ranks.rank)
    }
    layouts = {stage: StageLayout.of(module.shapes) for stage, module in stages.items()}
    memory, arena = take_memory(
        layouts,
        resident=blueprint.plan.resident,
        num_slots=blueprint.plan.slots[blueprint.place.ranks.rank],
        dtype=blueprint.dtype,
        gradient_dtype=torch.float32 if config.pipeline.fp32_gradients else blueprint.dtype,
        waiting=blueprint.answer.request.waiting,
        device=device,
        updates=UpdateQueue() if config.pipeline.overlap_optimizer else None,
        spans=spans,
    )
    source = source or _weight_source(blueprint, model_folder)
    _fill(memory, stages, source, show_progress=blueprint.place.ranks.is_first)
    return RankState(stages, memory, LayerInputs(parts, device=device, dtype=blueprint.dtype), arena)


def _weight_source(blueprint: Blueprint, model_folder: Path) -> WeightSource:
    parts = blueprint.parts
    if not folder_has_weights(model_folder):
        return InitialWeights(parts, seed=blueprint.config.optim.seed)
    return CheckpointWeights(model_folder, parts.stored_names, dtype=blueprint.dtype)


def _fill(
    memory: Mapping[int, StageMemory],
    stages: Mapping[int, StageModule],
    source: WeightSource,
    *,
    show_progress: bool,
) -> None:
    names = [(stage, name, shape) for stage, module in stages.items() for name, shape in module.shapes.items()]
    # None: no bar where the output is not a terminal.
    disable = None if show_progress else True
    for stage, name, shape in tqdm(names, desc="loading weights", unit="tensor", leave=False, disable=disable):
        memory[stage].state.set_parameter(name, source.read(name, shape))


def rehearse(blueprint: Blueprint, state: RankState) -> None:
    """Play one step of this rank alone on made-up data, so that the first real one finds kernels and memory ready.

    Leaves weights and optimizer as they are; the gradients it makes are overwritten by the first step's.
    """
    config, device = blueprint.config, blueprint.place.device
    transport = RehearsalTransport(
        rank=blueprint.place.ranks.rank,
        num_ranks=blueprint.place.ranks.num_ranks,
        device=device,
        shape=blueprint.message_shape,
        dtype=blueprint.dtype,
        max_sends=max_sends_under_way(blueprint.plan.num_microbatches),
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
        layer_inputs=state.layer_inputs,
        transport=transport,
        clock=clock,
        device=blueprint.place.device,
        unsealed_names=unsealed_names,
        graph_stages=blueprint.plan.kept,
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
    clock = WaitClock(blueprint.place.device)
    tied = (
        TiedPair(*parts.tied_names, embedding_stage=0, head_stage=plan.num_stages - 1, num_ranks=plan.num_ranks)
        if parts.tied_names
        else None
    )
    executor = _executor(blueprint, state, transport, clock, tied.names if tied else frozenset(), spans)
    optim = config.optim
    settings = AdamWSettings(optim.adam_beta1, optim.adam_beta2, optim.adam_epsilon, optim.weight_decay)
    has_kernel = has_kernel and (state.arena is not None or blueprint.place.device.type == "cpu")
    kernel = (
        load_kernel(cache_folder(), num_threads=optimizer_threads(blueprint.place.ranks.num_ranks))
        if has_kernel
        else None
    )
    adamw = FlatAdamW(settings, kernel, FusedUpdate())
    adamw.warm_up(memory.state for memory in state.memory.values())
    stepper = Stepper(
        adamw,
        memory=state.memory,
        transport=transport,
        clock=clock,
        loss_scale=LossScale(is_dynamic=config.model.dtype is Dtype.FP16),
        num_stages=plan.num_stages,
        max_grad_norm=optim.max_grad_norm,
        tied=tied,
    )
    return Trainer(
        config.optim,
        executor=executor,
        stepper=stepper,
        batches=_step_batches(batches, pin=blueprint.place.device.type == "cuda"),
        transport=transport,
        clock=clock,
        meter=MemoryMeter(blueprint.place.device),
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
        device=MemoryMeter(blueprint.place.device).device_name,
    )
