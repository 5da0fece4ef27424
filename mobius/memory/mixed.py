"""A rank's memory in which some stages are resident and the others streamed; each call goes to the one that has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from mobius.memory.resident import ResidentStages
from mobius.memory.stage_memory import Departure, StageMemory
from mobius.memory.stage_state import StageState
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
