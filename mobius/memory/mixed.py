"""A rank's memory in which some stages are resident and the others streamed; each call goes to the one that has it.

Which stages are which is handed in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from mobius.memory.gradient_sum import GradientSum
from mobius.memory.host_arena import HostArena
from mobius.memory.layout import StageLayout
from mobius.memory.resident import ResidentStages
from mobius.memory.spans import NO_SPANS, Spans
from mobius.memory.stage_memory import Departure, StageMemory
from mobius.memory.stage_state import StageState
from mobius.memory.update_queue import UpdateQueue
from mobius.memory.weight_slots import WeightSlots


class _Joined(Mapping[int, StageState]):
    """Both parts' states by ascending stage; live, as a resident stage's are."""

    def __init__(self, *parts: Mapping[int, StageState]) -> None:
        self._parts = {stage: part for part in parts for stage in part}

    def __getitem__(self, stage: int) -> StageState:
        return self._parts[stage][stage]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._parts))

    def __len__(self) -> int:
        return len(self._parts)


class MixedStages:
    """Owns nothing; both parts should add gradients up in one GradientSum."""

    def __init__(self, resident: ResidentStages, streamed: WeightSlots) -> None:
        self._states = _Joined(resident.states, streamed.states)
        self._parts: dict[int, StageMemory] = {
            **dict.fromkeys(resident.states, resident),
            **dict.fromkeys(streamed.states, streamed),
        }

    @property
    def states(self) -> Mapping[int, StageState]:
        return self._states

    def is_resident(self, stage: int) -> bool:
        return self._parts[stage].is_resident(stage)

    def keeps_gradients(self, stage: int) -> bool:
        return self._parts[stage].keeps_gradients(stage)

    def load(self, stage: int) -> None:
        self._parts[stage].load(stage)

    def offload(self, stage: int) -> Departure | None:
        return self._parts[stage].offload(stage)

    def wait_until_updated(self, stage: int) -> None:
        self._parts[stage].wait_until_updated(stage)

    def is_ready(self, stage: int) -> bool:
        return self._parts[stage].is_ready(stage)

    def weights(self, stage: int) -> dict[str, Tensor]:
        return self._parts[stage].weights(stage)

    def gradients(self, stage: int) -> dict[str, Tensor]:
        return self._parts[stage].gradients(stage)

    def seal_gradients(self, stage: int, *, excluded: frozenset[str]) -> Tensor:
        return self._parts[stage].seal_gradients(stage, excluded=excluded)

    def wait_for_gradients(self, stage: int) -> None:
        self._parts[stage].wait_for_gradients(stage)

    def have_gradients_arrived(self, stage: int) -> bool:
        return self._parts[stage].have_gradients_arrived(stage)


def take_memory(
    layouts: Mapping[int, StageLayout],
    *,
    resident: Collection[int],
    num_slots: int,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    waiting: Collection[int],
    device: torch.device,
    updates: UpdateQueue | None = None,
    spans: Spans = NO_SPANS,
) -> tuple[StageMemory, HostArena | None]:
    """Zeroed memory for the stages of `layouts`, and the host's part of it if any stage is streamed.

    Those in `resident` stay on `device`, keeping their gradients if they are in `waiting`; the others go through
    `num_slots` slots. Page-locks the host's part if `device` is a GPU. Raises HostMemoryError.
    """
    staying = {stage: layout for stage, layout in layouts.items() if stage in resident}
    streamed = {stage: layout for stage, layout in layouts.items() if stage not in resident}
    waits = frozenset(waiting) & staying.keys()
    total: GradientSum | None = None
    if streamed:
        longest = max(layout.num_elements for layout in layouts.values())
        total = GradientSum(longest, device=device, num_buffers=2 if gradient_dtype.itemsize > dtype.itemsize else 1)
    stages = ResidentStages(
        staying, dtype=dtype, device=device, waiting=waits, gradient_dtype=gradient_dtype, gradient_sum=total
    )
    if not streamed:
        return stages, None
    arena = HostArena(streamed, dtype=dtype, register=device.type == "cuda", gradient_dtype=gradient_dtype)
    slots = WeightSlots(
        arena.states, num_slots=num_slots, device=device, gradient_sum=total, updates=updates, spans=spans
    )
    return (MixedStages(stages, slots) if staying else slots), arena
