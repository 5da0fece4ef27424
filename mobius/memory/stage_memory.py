"""What the executor asks of a rank's memory, whether stages are streamed or resident."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from mobius.memory.stage_state import StageState


class StageMemory(Protocol):
    """Weights and gradients of this rank's stages on the compute device, and the states the optimizer updates."""

    @property
    def states(self) -> Mapping[int, StageState]:
        """Stage -> its training state, on the host or on the GPU."""

    def load(self, stage: int) -> None:
        """Start bringing `stage`'s weights to the device; returns at once."""

    def wait_until_updated(self, stage: int) -> None:
        """Make the host wait until the optimizer has updated `stage`."""

    def weights(self, stage: int) -> dict[str, Tensor]:
        """Parameter views on the device; the compute stream waits until they are there."""

    def gradients(self, stage: int) -> dict[str, Tensor]:
        """fp32 accumulators on the device, zero at the first call of a step."""

    def seal_gradients(self, stage: int, *, excluded: frozenset[str]) -> Tensor:
        """End accumulation: bring the gradients into the form they leave in.

        Returns their squared norm without the parameters in `excluded` (fp32 scalar on the device, not synchronized).
        """

    def offload(self, stage: int) -> None:
        """Free `stage`'s place on the device; sealed gradients start on their way home. Returns at once."""

    def wait_for_gradients(self, stage: int) -> None:
        """Make the host wait until `states[stage].gradients` is complete."""
