"""Memory of one rank's stages; the caller says which are resident and which are streamed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from mobius.distributed.replicas import ReplicaGroup
from mobius.distributed.shards import Shards
from mobius.engine.gradient_sums import GradientAccumulator, GradientSums
from mobius.engine.host_arena import HostArena
from mobius.engine.optimizer_states import DeviceStates, DiskStates, HostStates
from mobius.engine.quantized_weights import num_scales_of
from mobius.engine.reductions import Reductions, StageSharding
from mobius.engine.slot_files import SlotFiles
from mobius.engine.stage_memory import StageMemory
from mobius.engine.stage_state import StageState, num_owned
from mobius.engine.stage_weights import AdapterWeights, ResidentWeights, SlotWeights, WeightSlotPool
from mobius.engine.state_files import Key, StateBuffers, StateFiles, gradient_key, weights_key
from mobius.engine.update_queue import UpdateQueue
from mobius.engine.weight_loads import WeightLoads
from mobius.hardware.spans import NO_SPANS, Spans
from mobius.limits import MIN_GRADIENT_SUMS, gradient_sum_elements, num_load_buffers
from mobius.models.layout import StageLayout


def allocate_memory(
    layouts: Mapping[int, StageLayout],
    *,
    resident: Collection[int],
    num_slots: int,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    deferred_updates: Collection[int],
    device: torch.device,
    num_sum_buffers: int = 1,
    has_partial_sums: bool = False,
    keeps_trained_on_gpu: bool = False,
    updates: UpdateQueue | None = None,
    replicas: ReplicaGroup | None = None,
    tied: Collection[str] = (),
    spans: Spans = NO_SPANS,
) -> tuple[dict[int, StageMemory], HostArena | None]:
    """Allocate zeroed memory for each stage of `layouts`, in stage order; return the host arena if any is streamed.

    Stages in `resident` stay on `device` and store their gradients if they are in `deferred_updates`. Streamed stages
    use `num_slots` slots and are updated through `updates`, by default without a thread. `has_partial_sums`: several
    stages have unfinished sums at a time; those of streamed stages are in `num_sum_buffers` buffers, and on the host if
    these are fewer. With `keeps_trained_on_gpu`, only frozen weights are streamed and all gradients are stored in fp32.
    `replicas` share each stage; parameters in `tied` have a copy in another stage. Page-locks the arena if `device` is
    a GPU; close it after the last copy. Raises HostMemoryError.
    """
    if keeps_trained_on_gpu:
        gradient_dtype, deferred_updates = torch.float32, layouts
    streamed = {stage: layout for stage, layout in layouts.items() if stage not in resident}
    on_host = {} if keeps_trained_on_gpu else streamed
    # A resident stage that stores its gradients in the fp32 of accumulation needs no shared sum.
    offloads_sums = has_partial_sums and len(on_host) > num_sum_buffers
    accumulates_in_place = {
        stage
        for stage in layouts
        if (has_partial_sums and (stage not in on_host or not offloads_sums))
        or (stage not in on_host and stage in deferred_updates and gradient_dtype == torch.float32)
    }
    summed = [
        layouts[stage].num_trained for stage in sorted(layouts, reverse=True) if stage not in accumulates_in_place
    ]
    leaves_in_fp32 = len(on_host) > 0 and gradient_dtype.itemsize > dtype.itemsize
    num_buffers = max(
        num_sum_buffers if offloads_sums else 1, MIN_GRADIENT_SUMS if leaves_in_fp32 or replicas is not None else 1
    )
    sizes = gradient_sum_elements(summed, num_buffers) if summed else ()
    allocator = _StageAllocator(
        dtype=dtype,
        gradient_dtype=gradient_dtype,
        deferred_updates=deferred_updates,
        accumulates_in_place=accumulates_in_place,
        device=device,
        accumulator=GradientAccumulator(*sizes, device=device),
        reductions=None if replicas is None else Reductions(replicas, device=device),
        tied=tied,
        updates=updates or UpdateQueue(has_thread=False),
        spans=spans,
    )
    memory = {stage: allocator.device_stage(stage, layouts[stage]) for stage in layouts if stage not in streamed}
    arena: HostArena | None = None
    if on_host:
        arena, pool, buffers = allocator.host_arena(on_host, num_slots=num_slots, keeps_sums=offloads_sums)
        memory |= {stage: allocator.host_stage(stage, arena, pool, buffers) for stage in on_host}
    elif streamed:
        halves = {stage: layout.split() for stage, layout in streamed.items()}
        frozen = {stage: layout for stage, (layout, _) in halves.items()}
        arena, pool, _ = allocator.host_arena(frozen, num_slots=num_slots)
        for stage, (_, trained) in halves.items():
            memory[stage] = allocator.device_stage(stage, trained, allocator.slot(stage, arena, pool))
    return dict(sorted(memory.items())), arena


@dataclass(frozen=True, kw_only=True)
class _StageAllocator:
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    deferred_updates: Collection[int]
    accumulates_in_place: Collection[int]
    device: torch.device
    accumulator: GradientAccumulator
    reductions: Reductions | None
    tied: Collection[str]
    updates: UpdateQueue
    spans: Spans

    def device_stage(self, stage: int, layout: StageLayout, frozen: SlotWeights | None = None) -> StageMemory:
        """Return a stage whose trained part stays on the device; `frozen` weights are loaded."""
        is_in_place, keeps_gradients = stage in self.accumulates_in_place, stage in self.deferred_updates
        sharding = self._sharding(layout)
        shards = None if sharding is None else sharding.shards
        sums = GradientSums(stage, layout, self._accumulator_of(stage, layout), sharding=sharding, spans=self.spans)
        has_target = shards is not None or (keeps_gradients and not is_in_place)
        gradients = sums.finished.values[: layout.num_trained]
        if has_target:
            gradients = torch.zeros(num_owned(layout, shards), dtype=self.gradient_dtype, device=self.device)
        state = StageState.on_device(layout, self.device, self.dtype, gradients, shards)
        trained = ResidentWeights(stage, state)
        weights = trained if frozen is None else AdapterWeights(frozen, trained)
        states = DeviceStates(
            stage,
            state,
            weights,
            gradient_dtype=self.gradient_dtype,
            has_target=has_target,
            keeps_gradients=keeps_gradients,
            sharding=sharding,
            spans=self.spans,
        )
        return StageMemory(stage, weights, sums, states)

    def host_arena(
        self, layouts: Mapping[int, StageLayout], *, num_slots: int, keeps_sums: bool = False
    ) -> tuple[HostArena, WeightSlotPool, StateBuffers | None]:
        """Return the host memory of `layouts`, slots for their weights, and buffers of states that are on disks."""
        sharding, places = {stage: self._sharding(layout) for stage, layout in layouts.items()}, self.updates.places
        shards = {stage: own.shards for stage, own in sharding.items() if own is not None}
        on_disks = layouts.keys() - places.in_memory if places.folders else set[int]()
        # Stages whose gradients arrive in the buffers of states on disks; some then wait on the disks.
        arriving, waiting = set[int](), set[int]()
        if self.updates.has_thread and not keeps_sums:
            trained = {stage for stage in on_disks if layouts[stage].num_trained}
            if places.has_gradients:
                tied = {stage for stage, layout in layouts.items() if not layout.offsets.keys().isdisjoint(self.tied)}
                waiting = trained & {*self.deferred_updates} - tied
            arriving = trained - {*self.deferred_updates} | waiting
        arena = HostArena(
            layouts,
            dtype=self.dtype,
            register=self.device.type == "cuda",
            gradient_dtype=self.gradient_dtype,
            keeps_sums=keeps_sums,
            shards=shards,
            has_weights=not places.has_weights,
            without_gradients=arriving,
            without_parts=on_disks,
        )
        buffers, loads = None, None
        if on_disks:
            try:
                buffers, loads = self._buffers_on_disks(arena, on_disks, arriving, waiting)
            except BaseException:
                arena.close()
                raise
        sizes = [layout.num_elements for layout in layouts.values()]
        if num_slots < len(sizes):
            sizes = [max(sizes)] * num_slots
        num_scales = max(map(num_scales_of, layouts.values()))
        pool = WeightSlotPool(
            sizes, dtype=self.dtype, device=self.device, num_scales=num_scales, is_shared=len(shards) > 0, loads=loads
        )
        return arena, pool, buffers

    def _buffers_on_disks(
        self, arena: HostArena, stages: Collection[int], arriving: Collection[int], waiting: Collection[int]
    ) -> tuple[StateBuffers, WeightLoads | None]:
        """Make the files of `stages`, and the buffers that their states pass through; the arena closes them.

        Gradients of the stages that are `arriving` come in these buffers; some are `waiting` on the disks.
        """
        places, states = self.updates.places, {stage: arena.states[stage] for stage in sorted(stages)}
        part_bytes = {stage: state.part_bytes for stage, state in states.items()}
        weight_bytes = {weights_key(stage): state.weights.nbytes for stage, state in states.items()}
        gradient_bytes = {stage: arena.states[stage].gradients.nbytes for stage in arriving}
        waiting_bytes = {gradient_key(stage): gradient_bytes[stage] for stage in sorted(waiting)}
        on_disks = dict[Key, int](part_bytes.items())
        if places.slots is not None or places.has_weights:
            on_disks |= weight_bytes
        gradient_files = None
        if places.slots is None:
            files = StateFiles(places.folders, on_disks | waiting_bytes, shares=places.shares)
        else:
            files = SlotFiles(on_disks, place=places.slots, shares=places.shares)
        arena.state_files = files
        arena.keep(0, files.close)
        if waiting and places.slots is not None:
            both = files.reads, files.writes
            gradient_files = StateFiles(places.folders, waiting_bytes, shares=places.shares, traffic=both)
            arena.keep(0, gradient_files.close)
        largest = max(weight_bytes.values()) if places.has_weights else 0
        buffers = StateBuffers(
            files,
            max(part_bytes.values()),
            len(part_bytes),
            gradient_bytes=max(gradient_bytes.values(), default=0),
            weight_bytes=largest,
            gradient_files=gradient_files,
            waiting=waiting,
            num_buffers=places.num_buffers,
            allocate=arena.map_bytes,
        )
        arena.keep(buffers.num_bytes, lambda: None)
        if not largest:
            return buffers, None
        number = num_load_buffers(places.num_buffers, len(part_bytes))
        loads = WeightLoads(files, largest, number, allocate=arena.map_bytes, prepare=self.updates.prepare)
        arena.keep(loads.num_bytes, loads.close)
        return buffers, loads

    def slot(self, stage: int, arena: HostArena, pool: WeightSlotPool) -> SlotWeights:
        """Return the weights of a stage in `arena`, to be loaded."""
        state = arena.states[stage]
        sharding = self._sharding(state.layout)
        return SlotWeights(stage, state, pool, self.updates, sharding=sharding, spans=self.spans)

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
            spans=self.spans,
        )
        in_memory = self.updates.places.in_memory
        kind = HostStates if buffers is None or stage in in_memory else partial(DiskStates, buffers=buffers)
        states = kind(
            stage,
            state,
            slot,
            self.updates,
            device=self.device,
            to_host=pool.to_host,
            outbox=None if self.gradient_dtype.itemsize > self.dtype.itemsize else slot.give_up,
            spans=self.spans,
        )
        return StageMemory(stage, slot, sums, states)

    def _accumulator_of(self, stage: int, layout: StageLayout) -> GradientAccumulator:
        is_own = stage in self.accumulates_in_place
        return GradientAccumulator(layout.num_trained, device=self.device) if is_own else self.accumulator

    def _sharding(self, layout: StageLayout) -> StageSharding | None:
        if self.reductions is None or not layout.num_trained:
            return None
        replicas = self.reductions.replicas
        shards = Shards.of(layout, replicas.index, replicas.num_replicas, tied=self.tied)
        return StageSharding(shards, self.reductions)
