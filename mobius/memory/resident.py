"""Stages whose whole state stays on the compute device: no slots, no copies."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mobius.errors import ScheduleError
from mobius.memory.layout import StageLayout
from mobius.memory.norms import squared_norm
from mobius.memory.stage_memory import Departure
from mobius.memory.stage_state import StageState


class ResidentStages:
    """Owns weights, fp32 gradients, master and moments of this rank's stages on one device."""

    def __init__(self, layouts: Mapping[int, StageLayout], *, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self._states = {stage: _allocate(layout, dtype, device) for stage, layout in layouts.items()}
        self._weights = {stage: state.layout.views(state.weights) for stage, state in self._states.items()}
        self._gradients = {stage: state.layout.views(state.gradients) for stage, state in self._states.items()}
        self._accumulating: set[int] = set()

    @property
    def states(self) -> Mapping[int, StageState]:
        return self._states

    def load(self, stage: int) -> None:
        raise ScheduleError(f"stage {stage} is resident and cannot be loaded")

    def offload(self, stage: int) -> Departure | None:
        raise ScheduleError(f"stage {stage} is resident and cannot be offloaded")

    def wait_until_updated(self, stage: int) -> None:
        """Nothing to wait for: updates and compute follow one another on the device."""

    def weights(self, stage: int) -> dict[str, Tensor]:
        return self._weights[stage]

    def gradients(self, stage: int) -> dict[str, Tensor]:
        """fp32 views; cleared at the first call after the last sealing."""
        if stage not in self._accumulating:
            self._accumulating.add(stage)
            self._states[stage].gradients.zero_()
        return self._gradients[stage]

    def seal_gradients(self, stage: int, *, excluded: frozenset[str]) -> Tensor:
        """End accumulation; the gradients stay where they are, in fp32."""
        views = self.gradients(stage)
        self._accumulating.discard(stage)
        return squared_norm((view for name, view in views.items() if name not in excluded), self._device)

    def wait_for_gradients(self, stage: int) -> None:
        """Nothing to wait for: the optimizer runs on the same device, behind backward."""

    def have_gradients_arrived(self, stage: int) -> bool:
        """They never leave."""
        return True


def _allocate(layout: StageLayout, dtype: torch.dtype, device: torch.device) -> StageState:
    def zeros(kind: torch.dtype) -> Tensor:
        return torch.zeros(layout.num_elements, dtype=kind, device=device)

    weights = zeros(dtype)
    master = weights if dtype == torch.float32 else zeros(torch.float32)
    return StageState(layout, weights, zeros(torch.float32), master, zeros(torch.float32), zeros(torch.float32))
