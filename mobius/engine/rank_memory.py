"""Allocates the memory of one rank's stages by the rank's memory layout (schedule/memory_layout.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from mobius.distributed.replicas import ReplicaGroup
from mobius.distributed.shards import Shards
from mobius.engine.decoded_weights import WeightDecoder, num_decoded
from mobius.engine.gradient_sums import GradientAccumulator, GradientSums
from mobius.engine.host_arena import HostArena
from mobius.engine.optimizer_states import DeviceStates, DiskStates, HostStates
from mobius.engine.quantized_weights import num_scales_of
from mobius.engine.reductions import Reductions, StageSharding
from mobius.engine.slot_files import DiskFolders, SlotFiles
from mobius.engine.stage_memory import StageMemory
from mobius.engine.stage_state import StageState, num_owned
from mobius.engine.stage_weights import FrozenAndTrainedWeights, ResidentWeights, SlotWeights, WeightSlotPool
from mobius.engine.state_files import Key, StateBuffers, StateFiles, gradient_key, weights_key
from mobius.engine.update_queue import UpdateQueue
from mobius.engine.weight_loads import WeightLoads
from mobius.hardware.devices import use_device
from mobius.hardware.spans import NO_SPANS, Spans
from mobius.models.layout import StageLayout
from mobius.schedule.memory_layout import Part, RankLayout, Residence, StageSizes


def stage_sizes(
    layouts: Mapping[int, StageLayout],
    *,
    replicas: ReplicaGroup | None = None,
    tied: Collection[str] = (),
    adapters: Collection[int] = (),
) -> dict[int, StageSizes]:
    """Return the sizes of each stage in elements; `adapters`: streamed stages whose trained part stays on the GPU."""
    sizes = dict[int, StageSizes]()
    for stage, layout in layouts.items():
        trained = layout.split()[1] if stage in adapters else layout
        shards = _shards(trained, replicas, tied)
        owned, reduced = (num_owned(trained, shards, end) for end in (trained.num_trained, trained.num_reduced))
        codes = sum(torch.Size(layout.offsets[name][1]).numel() for name in layout.quantized)
        sizes[stage] = StageSizes(
            layout.num_units,
            layout.num_trained,
            owned,
            reduced,
            num_scales_of(layout),
            codes,
            trained_units=layout.num_trained_units,
            in_fp32=owned - num_owned(trained, shards, trained.first_in_fp32),
            decoded=num_decoded(layout),
        )
    return sizes


def _shards(layout: StageLayout, replicas: ReplicaGroup | None, tied: Collection[str]) -> Shards | None:
    if replicas is None or not layout.num_trained:
        return None
    return Shards.of(layout, replicas.index, replicas.num_replicas, tied=tied)


def allocate_memory(
    layouts: Mapping[int, StageLayout],
    rank_layout: RankLayout,
    *,
    dtype: torch.dtype,
    device: torch.device,
    updates: UpdateQueue | None = None,
    disks: DiskFolders | None = None,
    replicas: ReplicaGroup | None = None,
    tied: Collection[str] = (),
    spans: Spans = NO_SPANS,
) -> tuple[dict[int, StageMemory], HostArena | None]:
    """Allocate zeroed memory by `rank_layout` for the parameters of `layouts`; return it in stage order.

    Also returns the host arena, or None if no stage is streamed. Streamed stages are updated through `updates`, by
    default without a thread. `disks`: folders for the parts that the layout places on disks. `replicas` share each
    stage; parameters in `tied` have a copy in another stage. If `device` is a GPU, the arena is page-locked; close it
    after the last copy. Raises HostMemoryError.
    """
    allocator = _StageAllocator(
        rank_layout,
        dtype=dtype,
        device=device,
        accumulator=GradientAccumulator(*rank_layout.sum_buffers, device=device),
        reductions=None if replicas is None else Reductions(replicas, device=device),
        tied=tied,
        updates=updates or UpdateQueue(has_thread=False),
        disks=disks or DiskFolders(()),
        decoder=WeightDecoder(decoded, dtype=dtype, device=device) if (decoded := rank_layout.decoded) else None,
        spans=spans,
    )
    kinds = {stage: regions.residence for stage, regions in rank_layout.stages.items()}
    halves = {stage: layouts[stage].split() for stage, kind in kinds.items() if kind is Residence.ADAPTERS}
    loaded = {stage: halves[stage][0] if stage in halves else layouts[stage] for stage in kinds}
    loaded = {stage: layout for stage, layout in loaded.items() if kinds[stage] is not Residence.RESIDENT}
    memory = dict[int, StageMemory]()
    for stage in (stage for stage, kind in kinds.items() if kind is Residence.RESIDENT):
        memory[stage] = allocator.device_stage(stage, layouts[stage])
    arena: HostArena | None = None
    if loaded:
        arena, pool, buffers = allocator.host_arena(loaded)
        for stage in loaded:
            memory[stage] = (
                allocator.device_stage(stage, halves[stage][1], allocator.slot(stage, arena, pool))
                if stage in halves
                else allocator.host_stage(stage, arena, pool, buffers)
            )
    return dict(sorted(memory.items())), arena


@dataclass(frozen=True, kw_only=True)
class _StageAllocator:
    rank_layout: RankLayout = field(kw_only=False)
    dtype: torch.dtype
    device: torch.device
    accumulator: GradientAccumulator
    reductions: Reductions | None
    tied: Collection[str]
    updates: UpdateQueue
    disks: DiskFolders
    decoder: WeightDecoder | None
    spans: Spans

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Format of finished gradients."""
        return torch.float32 if self.rank_layout.rules.gradient > self.dtype.itemsize else self.dtype

    def device_stage(self, stage: int, layout: StageLayout, frozen: SlotWeights | None = None) -> StageMemory:
        """Return a stage whose trained part stays on the device; its `frozen` weights, if any, are streamed."""
        regions, sharding = self.rank_layout.stages[stage], self._sharding(layout)
        shards = None if sharding is None else sharding.shards
        sums = GradientSums(
            stage,
            layout,
            self._accumulator_of(stage, layout),
            sharding=sharding,
            tied=self.tied,
            spans=self.spans,
        )
        has_target = regions.place_of(Part.GRADIENTS) is not None
        gradients = sums.finished.values[: layout.num_trained]
        if has_target:
            gradients = torch.zeros(num_owned(layout, shards), dtype=self.gradient_dtype, device=self.device)
        state = StageState.on_device(layout, self.device, self.dtype, gradients, shards)
        trained = ResidentWeights(stage, state, self.decoder if layout.coded_names else None)
        weights = trained if frozen is None else FrozenAndTrainedWeights(frozen, trained)
        states = DeviceStates(
            stage,
            state,
            weights,
            gradient_dtype=self.gradient_dtype,
            has_target=has_target,
            keeps_gradients=regions.keeps_gradients,
            sharding=sharding,
            spans=self.spans,
        )
        return StageMemory(regions, weights, sums, states)

    def host_arena(self, layouts: Mapping[int, StageLayout]) -> tuple[HostArena, WeightSlotPool, StateBuffers | None]:
        """Return the host memory of `layouts`, slots for their weights, and buffers for states on disks."""
        sharding = {stage: self._sharding(layout) for stage, layout in layouts.items()}
        shards = {stage: own.shards for stage, own in sharding.items() if own is not None}
        arena = HostArena(
            layouts,
            regions=self.rank_layout.stages,
            dtype=self.dtype,
            register=self.device.type == "cuda",
            gradient_dtype=self.gradient_dtype,
            shards=shards,
        )
        buffers, loads = None, None
        if self.rank_layout.state_buffers.number:
            try:
                buffers, loads = self._buffers_on_disks(arena)
            except BaseException:
                arena.close()
                raise
        pool = WeightSlotPool(
            self.rank_layout.slots,
            dtype=self.dtype,
            device=self.device,
            num_scales=self.rank_layout.slot_scales,
            is_shared=len(shards) > 0,
            loads=loads,
        )
        return arena, pool, buffers

    def _buffers_on_disks(self, arena: HostArena) -> tuple[StateBuffers, WeightLoads | None]:
        """Create the files of the stages on disks, and the host buffers for their bytes; the arena closes both."""
        layout, disks = self.rank_layout, self.disks
        stages = [stage for stage in arena.states if layout.stages[stage].is_on_disks]
        on_disks = dict[Key, int]({stage: arena.states[stage].part_bytes for stage in stages})
        if disks.slots is not None or layout.load_buffers.number:
            on_disks |= {weights_key(stage): arena.states[stage].weights.nbytes for stage in stages}
        waiting = {
            gradient_key(stage): arena.states[stage].gradients.nbytes
            for stage in stages
            if layout.stages[stage].gradients_wait_on_disks
        }
        if disks.slots is None:
            files = StateFiles(disks.folders, on_disks | waiting, shares=disks.shares)
        else:
            files = SlotFiles(on_disks, place=disks.slots, shares=disks.shares)
        arena.state_files = files
        arena.keep(files.close)
        gradient_files = None
        if waiting and disks.slots is not None:
            both = files.reads, files.writes
            gradient_files = StateFiles(disks.folders, waiting, shares=disks.shares, traffic=both)
            arena.keep(gradient_files.close)
        buffers = StateBuffers(
            files,
            layout.state_buffers,
            gradient_files=gradient_files,
            waiting=[stage for stage in stages if layout.stages[stage].gradients_wait_on_disks],
            allocate=arena.map_bytes,
        )
        if not layout.load_buffers.number:
            return buffers, None
        prepare = partial(use_device, self.device)
        loads = WeightLoads(files, layout.load_buffers, allocate=arena.map_bytes, prepare=prepare)
        arena.keep(loads.close)
        return buffers, loads

    def slot(self, stage: int, arena: HostArena, pool: WeightSlotPool) -> SlotWeights:
        """Return the weights of a stage that are in `arena` and are loaded into slots of `pool`."""
        state = arena.states[stage]
        sharding = self._sharding(state.layout)
        decoder = self.decoder if state.layout.coded_names else None
        return SlotWeights(stage, state, pool, self.updates, sharding=sharding, decoder=decoder, spans=self.spans)

    def host_stage(
        self, stage: int, arena: HostArena, pool: WeightSlotPool, buffers: StateBuffers | None
    ) -> StageMemory:
        """Return a streamed stage."""
        state, slot = arena.states[stage], self.slot(stage, arena, pool)
        sums = GradientSums(
            stage,
            state.layout,
            self._accumulator_of(stage, state.layout),
            sharding=self._sharding(state.layout),
            host=arena.sums.get(stage),
            to_host=pool.to_host,
            to_device=pool.sums_to_device,
            tied=self.tied,
            spans=self.spans,
        )
        regions = self.rank_layout.stages[stage]
        kind: Callable[..., HostStates] = HostStates
        if buffers is not None and regions.is_on_disks:
            kind = partial(DiskStates, buffers)
        states = kind(
            regions,
            state,
            slot,
            self.updates,
            device=self.device,
            to_host=pool.to_host,
            outbox=None if self.gradient_dtype.itemsize > self.dtype.itemsize else slot.give_up,
            spans=self.spans,
        )
        return StageMemory(regions, slot, sums, states)

    def _accumulator_of(self, stage: int, layout: StageLayout) -> GradientAccumulator:
        is_own = self.rank_layout.stages[stage].adds_up_in_place
        return GradientAccumulator(layout.num_trained, device=self.device) if is_own else self.accumulator

    def _sharding(self, layout: StageLayout) -> StageSharding | None:
        if self.reductions is None:
            return None
        shards = _shards(layout, self.reductions.replicas, self.tied)
        return None if shards is None else StageSharding(shards, shards.of_weights(layout), self.reductions)
