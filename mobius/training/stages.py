"""Stages of one rank: modules, memory of the training state, and the executor that runs the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from tqdm import tqdm

from mobius.distributed.replicas import ReplicaGroup
from mobius.distributed.transport import ActivationTransport
from mobius.engine.executor import Executor, PlayedStage
from mobius.engine.host_arena import HostArena, PinnedActivationBuffer
from mobius.engine.pipelined_router_loss import RouterMessages, router_messages
from mobius.engine.rank_memory import allocate_memory, stage_sizes
from mobius.engine.saved_activations import ALIGNMENT, pinned_buffer_bytes
from mobius.engine.sliced_layers import SlicedLayers, SliceMemory
from mobius.engine.slot_files import DiskFolders
from mobius.engine.spread_head import SpreadHead
from mobius.engine.stage import StageModule
from mobius.engine.stage_memory import StageMemory
from mobius.engine.stage_messages import StageMessages
from mobius.engine.stage_state import StageState
from mobius.engine.update_queue import UpdateQueue
from mobius.engine.waits import Observers, WaitClock
from mobius.hardware.spans import NO_SPANS, Spans
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.models.router_loss import refuse_slices
from mobius.models.weights import MAX_READERS, WeightSource, read_ahead, reads_of
from mobius.objectives.cross_entropy import SUPERVISED
from mobius.objectives.objective import Objective
from mobius.schedule.activation_offloading import num_host_regions
from mobius.schedule.memory_layout import MemoryRules, Part, Place, RankLayout, lay_out_rank
from mobius.schedule.partition import StageCut
from mobius.schedule.plan import Plan
from mobius.schedule.schedule import Schedule


@dataclass(frozen=True)
class OffloadedActivations:
    """Sizes of the activations that a layer offloads for a microbatch."""

    message_shape: tuple[int, int, int]
    """Shape [B, L, H] of a layer's input."""
    product_bytes: int = 0
    """Bytes that a layer offloads for a microbatch if the products of its matrices are offloaded, too."""


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """Formats and options of the stages; equal on all ranks."""

    dtype: torch.dtype
    rules: MemoryRules
    loss_chunk_tokens: int
    offloaded: OffloadedActivations | None = None
    """None only if no activations are offloaded."""
    tile_tokens: int | None = None
    """Number of tokens of a tile, as in `StageModule`."""
    reduced_format: str = ""
    """Format of optimizer states, as in `StageModule.layout`."""
    objective: Objective = SUPERVISED


@dataclass(frozen=True, kw_only=True)
class RankStages:
    """Stages of one rank: for each stage a module without storage, and the memory of its parameters."""

    plan: Plan
    device: torch.device
    modules: Mapping[int, StageModule]
    rank_layout: RankLayout
    memory: Mapping[int, StageMemory]
    layer_inputs: LayerArgumentsBuilder
    routers: RouterMessages
    """Message format with router sums and the router auxiliary loss, for models that have this loss."""
    arena: HostArena | None
    """Host memory of streamed stages; None if no stage is streamed."""
    sliced_layers: Mapping[int, SlicedLayers] | None = None
    """Layers of each stage in the form that runs slices; None if microbatches are complete sequences."""
    activation_buffer: PinnedActivationBuffer | None = None
    """Pinned host memory for offloaded activations; None if no activations are offloaded."""
    spread_head: SpreadHead | None = None
    """Norm and head, if all ranks share them."""
    objective: Objective = SUPERVISED

    @classmethod
    def allocate(
        cls,
        parts: ModelParts,
        plan: Plan,
        rank: int,
        options: StageOptions,
        *,
        device: torch.device,
        updates: UpdateQueue | None = None,
        disks: DiskFolders | None = None,
        replicas: ReplicaGroup | None = None,
        spans: Spans = NO_SPANS,
    ) -> RankStages:
        """Allocate the stages of `rank` for `plan` in zeroed memory, by the memory rules in `options`.

        `replicas` share the stages. Raises HostMemoryError and CheckpointError as `allocate_memory` does, and PlanError
        if the plan slices sequences of a model with a router auxiliary loss.
        """
        if parts.router_loss is not None:
            refuse_slices(plan.num_slices)
        modules = {
            stage: StageModule(
                parts,
                plan.cuts[stage],
                loss_chunk_tokens=options.loss_chunk_tokens,
                tile_tokens=options.tile_tokens,
                keep_graphs=stage in plan.saved_activation_stages,
                recompute_level=plan.level_of(stage),
            )
            for stage in plan.local_stages(rank)
        }
        layouts = {stage: module.layout(options.dtype, options.reduced_format) for stage, module in modules.items()}
        tied, rules = parts.trained_tied_names or (), options.rules
        adapters = plan.streamed_stages(rank) if rules.keeps_trained_on_gpu else ()
        sizes = stage_sizes(layouts, replicas=replicas, tied=tied, adapters=adapters)
        rank_layout = lay_out_rank(sizes, plan.rank_use(rank), rules, num_stages=plan.num_stages)
        memory, arena = allocate_memory(
            layouts,
            rank_layout,
            dtype=options.dtype,
            device=device,
            updates=updates,
            disks=disks,
            replicas=replicas,
            tied=tied,
            spans=spans,
        )
        return cls(
            plan=plan,
            device=device,
            modules=modules,
            rank_layout=rank_layout,
            memory=memory,
            layer_inputs=LayerArgumentsBuilder(parts, device=device, dtype=options.dtype),
            arena=arena,
            sliced_layers=_sliced_layers(parts, plan, modules, options) if plan.num_slices > 1 else None,
            activation_buffer=_activation_buffer(parts, plan, modules, options, device),
            routers=router_messages(parts.router_loss),
            spread_head=_spread_head(parts, plan, rank, options, device) if plan.spreads_head else None,
            objective=options.objective,
        )

    def mapped_bytes(self) -> dict[str, int]:
        """Return the bytes of mapped host memory by purpose."""
        layout, activations = self.rank_layout, self.activation_buffer
        return {
            "weights": layout.num_bytes(Place.HOST, Part.WEIGHTS),
            "gradients": layout.num_bytes(Place.HOST, Part.GRADIENTS, Part.SUMS),
            "optimizer states": layout.num_bytes(Place.HOST, Part.STATES),
            "buffers of states and weights on disks": layout.state_buffers.total + layout.load_buffers.total,
            "offloaded activations": 0 if activations is None else activations.num_bytes,
        }

    def load_weights(
        self,
        source: WeightSource,
        *,
        only_frozen: bool = False,
        show_progress: bool = False,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Load all parameters, or only the frozen ones, from `source`, tensor by tensor.

        `show_progress` shows a bar on a terminal. `progress` is called for each tensor.
        """
        named = [
            (stage, name, reads_of(source, name, shape))
            for stage, module in self.modules.items()
            for name, shape in module.shapes.items()
            if not only_frozen or name in module.frozen
        ]
        owners = [(stage, name, read) for stage, name, reads in named for read in reads]
        values = read_ahead((read for *_, read in owners), num_threads=min(MAX_READERS, torch.get_num_threads()))
        opened = dict[int, StageState]()
        with tqdm(
            total=len(named),
            desc="loading weights",
            unit="tensor",
            leave=False,
            disable=None if show_progress else True,
        ) as bar:
            for (stage, name, read), value in zip(owners, values, strict=True):
                if read.offset == 0:
                    bar.update()
                    progress()
                own = self.memory[stage]
                state = own.weights.state if name in self.modules[stage].frozen else own.state
                has_more_bits = value.dtype != state.weights.dtype  # the master weight keeps the further bits
                on_disks = own.regions.has_on_disks
                if on_disks(Part.WEIGHTS) or (on_disks(Part.STATES) and has_more_bits):
                    if stage not in opened:
                        self._store(opened)
                        opened[stage] = own.states.state_to_fill()
                    state = opened[stage]
                state.set_parameter(name, value, offset=read.offset)
        self._store(opened)

    def _store(self, opened: dict[int, StageState]) -> None:
        """Write the `opened` states of stages to their disks, and empty `opened`."""
        while opened:
            stage, state = opened.popitem()
            self.memory[stage].states.store(state)

    def executor(
        self,
        schedule: Schedule,
        transport: ActivationTransport,
        observers: Observers | None = None,
    ) -> Executor:
        """Return an executor of this rank's actions in `schedule`, which must belong to the plan of the stages."""
        messages = StageMessages(schedule, transport, observers or Observers(WaitClock(self.device)), self.routers)
        head = self.spread_head if schedule.spec.spreads_head else None
        layers = self.sliced_layers if self.sliced_layers is not None and schedule.spec.num_slices > 1 else self.modules
        stages = {
            stage: PlayedStage(module, layers[stage], self.memory[stage]) for stage, module in self.modules.items()
        }
        return Executor(
            schedule,
            stages=stages,
            layer_inputs=self.layer_inputs,
            messages=messages,
            objective=self.objective,
            device=self.device,
            head=None if head is None else head.share(schedule, messages),
            activation_buffer=self.activation_buffer,
        )

    def close(self) -> None:
        """Release page-locked memory; no copies may be in flight."""
        if self.arena is not None:
            self.arena.close()
        if self.activation_buffer is not None:
            self.activation_buffer.close()


def _activation_buffer(
    parts: ModelParts, plan: Plan, stages: Iterable[int], options: StageOptions, device: torch.device
) -> PinnedActivationBuffer | None:
    """Return the host memory for offloaded activations of `stages`; None if none of them offloads activations."""
    offloading, offloaded = sorted(plan.offloaded_activation_stages.intersection(stages)), options.offloaded
    if not offloading:
        return None
    assert offloaded is not None, "the options have the shape of offloaded activations"
    whole = -(-offloaded.product_bytes // ALIGNMENT) * ALIGNMENT
    region_bytes = dict[int, list[int]]()
    for stage in offloading:
        saves_attention = stage in plan.saved_attention_stages
        alone = _offloaded_bytes(parts, offloaded.message_shape, options.dtype, saves_attention=saves_attention)
        num_layers = len(plan.cuts[stage].backward_layers(parts.first_trained_layer))
        region_bytes[stage] = [
            num_layers * (max(whole, alone) if plan.offloads_all(stage, place) else alone)
            for place in range(num_host_regions(stage, plan))
        ]
    return PinnedActivationBuffer(region_bytes, register=device.type == "cuda")


def _sliced_layers(
    parts: ModelParts, plan: Plan, stages: Iterable[int], options: StageOptions
) -> dict[int, SlicedLayers]:
    """Return the layers of `stages` in the form that runs slices of sequences."""
    memory = SliceMemory()
    return {
        stage: SlicedLayers(
            parts,
            plan.cuts[stage],
            memory,
            tile_tokens=options.tile_tokens,
            saves_attention=stage in plan.saved_attention_stages,
        )
        for stage in stages
    }


def _spread_head(parts: ModelParts, plan: Plan, rank: int, options: StageOptions, device: torch.device) -> SpreadHead:
    """Return norm and head of `rank`, for a head that all ranks share."""
    end = len(parts.layers)
    module = StageModule(
        parts,
        StageCut(plan.num_stages, end, end, is_first=False, is_last=True),
        loss_chunk_tokens=options.loss_chunk_tokens,
    )
    is_owner = rank == plan.rank_of(plan.num_stages - 1)
    return SpreadHead(module, width=parts.config.hidden_size, dtype=options.dtype, device=device, is_owner=is_owner)


def _offloaded_bytes(
    parts: ModelParts, message_shape: tuple[int, int, int], dtype: torch.dtype, *, saves_attention: bool
) -> int:
    """Return the bytes that a layer offloads for a microbatch: its input and, optionally, attention's result."""
    batch, tokens, _ = message_shape
    saved: list[tuple[tuple[int, ...], torch.dtype]] = [(message_shape, dtype)]
    if saves_attention:
        shape = parts.shape()
        saved.append(((batch, tokens, shape.attention_width), dtype))
        saved.append(((batch, shape.num_heads or 0, tokens), torch.float32))
    return pinned_buffer_bytes(*saved)
