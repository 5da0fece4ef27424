"""Memory of one rank's stages; the caller says which are resident and which are streamed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from mobius.distributed.shards import ReplicaGroup, Shards
from mobius.engine.adapter_stage import AdapterStage
from mobius.engine.gradient_accumulator import GradientAccumulator
from mobius.engine.host_arena import HostArena
from mobius.engine.reductions import Reductions, StageSharding
from mobius.engine.resident import ResidentStage, accumulates_in_place
from mobius.engine.stage_memory import StageMemory
from mobius.engine.streamed import StreamedStage, WeightSlotPool
from mobius.engine.update_queue import UpdateQueue
from mobius.hardware.spans import NO_SPANS, Spans
from mobius.limits import MAX_GRADIENT_SUMS, gradient_sum_elements
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
    has_accumulation_rounds: bool = False,
    keeps_trained_on_gpu: bool = False,
    updates: UpdateQueue | None = None,
    replicas: ReplicaGroup | None = None,
    tied: Collection[str] = (),
    spans: Spans = NO_SPANS,
) -> tuple[dict[int, StageMemory], HostArena | None]:
    """Allocate zeroed memory for each stage of `layouts`, in stage order; return the host arena if any is streamed.

    Stages in `resident` stay on `device` and store their gradients if they are in `deferred_updates`. Streamed stages
    use `num_slots` slots and are updated through `updates`. With `has_accumulation_rounds`, sums persist between
    rounds. With `keeps_trained_on_gpu`, only frozen weights are streamed and all gradients are stored in fp32.
    `replicas` share each stage; parameters in `tied` have a copy in another stage. Page-locks the arena if `device` is
    a GPU; close it after the last copy. Raises HostMemoryError.
    """
    if keeps_trained_on_gpu:
        gradient_dtype, deferred_updates = torch.float32, layouts
    streamed = {stage: layout for stage, layout in layouts.items() if stage not in resident}
    summed = [
        layout.num_trained * (not keeps_trained_on_gpu)
        for stage, layout in sorted(layouts.items(), reverse=True)
        if stage in streamed
        or not accumulates_in_place(
            gradient_dtype, keeps_gradients=stage in deferred_updates, has_accumulation_rounds=has_accumulation_rounds
        )
    ]
    offloads_gradient_sums = has_accumulation_rounds and len(streamed) > 1 and not keeps_trained_on_gpu
    accumulator: GradientAccumulator | None = None
    if summed:
        leave_from_sum = streamed and gradient_dtype.itemsize > dtype.itemsize
        num_buffers = MAX_GRADIENT_SUMS if offloads_gradient_sums or leave_from_sum or replicas is not None else 1
        accumulator = GradientAccumulator(*gradient_sum_elements(summed, num_buffers), device=device)
    reductions = None if replicas is None else Reductions(replicas, device=device, spans=spans)

    def shares_of(layout: StageLayout) -> Shards | None:
        return None if replicas is None or not layout.num_trained else Shards.of(layout, replicas, tied=tied)

    def resident_stage(stage: int, layout: StageLayout) -> ResidentStage:
        return ResidentStage(
            stage,
            layout,
            dtype=dtype,
            device=device,
            gradient_dtype=gradient_dtype,
            keeps_gradients=stage in deferred_updates,
            has_accumulation_rounds=has_accumulation_rounds,
            accumulator=accumulator,
            sharding=StageSharding.by(shares_of(layout), reductions),
            spans=spans,
        )

    memory: dict[int, StageMemory] = {
        stage: resident_stage(stage, layout) for stage, layout in layouts.items() if stage not in streamed
    }
    arena: HostArena | None = None
    if streamed and accumulator is not None:
        register = device.type == "cuda"
        trained: dict[int, StageLayout] = {}
        if keeps_trained_on_gpu:
            halves = {stage: layout.split() for stage, layout in streamed.items()}
            streamed, trained = ({stage: pair[half] for stage, pair in halves.items()} for half in (0, 1))
        arena = HostArena(
            streamed,
            dtype=dtype,
            register=register,
            gradient_dtype=gradient_dtype,
            keeps_sums=offloads_gradient_sums,
            shards={stage: own for stage, layout in streamed.items() if (own := shares_of(layout)) is not None},
        )
        length = max(layout.num_elements for layout in streamed.values())
        is_shared = replicas is not None and not keeps_trained_on_gpu
        pool = WeightSlotPool(length, num_slots=num_slots, dtype=dtype, device=device, is_shared=is_shared)
        for stage, state in arena.states.items():
            streamed_stage = StreamedStage(
                stage,
                state,
                pool,
                accumulator,
                host_sums=arena.sums.get(stage),
                updates=updates,
                sharding=StageSharding.by(state.shards, reductions),
                spans=spans,
            )
            memory[stage] = streamed_stage
            if keeps_trained_on_gpu:
                memory[stage] = AdapterStage(streamed_stage, resident_stage(stage, trained[stage]))
    return dict(sorted(memory.items())), arena
