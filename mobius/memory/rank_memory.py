"""Memory of one rank's stages, some of which are resident and the others streamed; which are which is handed in."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from mobius.limits import MAX_SUMS, sum_elements
from mobius.memory.adapted import AdaptedStage
from mobius.memory.gradient_sum import GradientSum
from mobius.memory.host_arena import HostArena
from mobius.memory.layout import StageLayout
from mobius.memory.resident import ResidentStage, adds_in_place
from mobius.memory.shared.reductions import Reductions, Shared
from mobius.memory.shares import Replicas, Shares
from mobius.memory.spans import NO_SPANS, Spans
from mobius.memory.stage_memory import StageMemory
from mobius.memory.streamed import SlotPool, StreamedStage
from mobius.memory.update_queue import UpdateQueue


def take_memory(
    layouts: Mapping[int, StageLayout],
    *,
    resident: Collection[int],
    num_slots: int,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    waiting: Collection[int],
    device: torch.device,
    in_rounds: bool = False,
    keeps_trained: bool = False,
    updates: UpdateQueue | None = None,
    replicas: Replicas | None = None,
    tied: Collection[str] = (),
    spans: Spans = NO_SPANS,
) -> tuple[dict[int, StageMemory], HostArena | None]:
    """Zeroed memory of each stage of `layouts`, by ascending stage, and the host's part if any stage is streamed.

    Stages in `resident` stay on `device`, keeping their gradients if they are in `waiting`; the others go through
    `num_slots` slots and are updated in `updates`. A step `in_rounds` leaves sums between them. With `keeps_trained`
    only what is frozen is streamed, and all gradients are kept in fp32. `replicas` share each stage, whose parameters
    in `tied` have a copy in another one. Page-locks the host's part if `device` is a GPU; it is to be closed when
    nothing copies any more. Raises HostMemoryError.
    """
    if keeps_trained:
        gradient_dtype, waiting = torch.float32, layouts
    streamed = {stage: layout for stage, layout in layouts.items() if stage not in resident}
    summed = [
        layout.num_trained * (not keeps_trained)
        for stage, layout in sorted(layouts.items(), reverse=True)
        if stage in streamed or not adds_in_place(gradient_dtype, keeps_gradients=stage in waiting, in_rounds=in_rounds)
    ]
    sums_travel = in_rounds and len(streamed) > 1 and not keeps_trained
    total: GradientSum | None = None
    if summed:
        leave_from_sum = streamed and gradient_dtype.itemsize > dtype.itemsize
        num_buffers = MAX_SUMS if sums_travel or leave_from_sum or replicas is not None else 1
        total = GradientSum(*sum_elements(summed, num_buffers), device=device)
    reductions = None if replicas is None else Reductions(replicas, device=device, spans=spans)

    def shares_of(layout: StageLayout) -> Shares | None:
        return None if replicas is None or not layout.num_trained else Shares.of(layout, replicas, tied=tied)

    def resident_stage(stage: int, layout: StageLayout) -> ResidentStage:
        return ResidentStage(
            stage,
            layout,
            dtype=dtype,
            device=device,
            gradient_dtype=gradient_dtype,
            keeps_gradients=stage in waiting,
            in_rounds=in_rounds,
            total=total,
            shared=Shared.by(shares_of(layout), reductions),
            spans=spans,
        )

    memory: dict[int, StageMemory] = {
        stage: resident_stage(stage, layout) for stage, layout in layouts.items() if stage not in streamed
    }
    arena: HostArena | None = None
    if streamed and total is not None:
        register = device.type == "cuda"
        trained: dict[int, StageLayout] = {}
        if keeps_trained:
            halves = {stage: layout.split() for stage, layout in streamed.items()}
            streamed, trained = ({stage: pair[half] for stage, pair in halves.items()} for half in (0, 1))
        arena = HostArena(
            streamed,
            dtype=dtype,
            register=register,
            gradient_dtype=gradient_dtype,
            keeps_sums=sums_travel,
            shares={stage: own for stage, layout in streamed.items() if (own := shares_of(layout)) is not None},
        )
        length = max(layout.num_elements for layout in streamed.values())
        is_shared = replicas is not None and not keeps_trained
        pool = SlotPool(length, num_slots=num_slots, dtype=dtype, device=device, is_shared=is_shared)
        for stage, state in arena.states.items():
            streamed_stage = StreamedStage(
                stage,
                state,
                pool,
                total,
                host_sums=arena.sums.get(stage),
                updates=updates,
                shared=Shared.by(state.shares, reductions),
                spans=spans,
            )
            memory[stage] = streamed_stage
            if keeps_trained:
                memory[stage] = AdaptedStage(streamed_stage, resident_stage(stage, trained[stage]))
    return dict(sorted(memory.items())), arena
