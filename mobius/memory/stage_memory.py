"""What the executor asks of a rank's memory, whether stages are streamed or resident."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mobius.memory.stage_state import StageState
from mobius.memory.streams import Event


@dataclass(frozen=True)
class Departure:
    """A stage's gradients on their way to the host, with their squared norm (fp32 scalar on the host)."""

    arrival: Event
    square: Tensor

    def has_arrived(self) -> bool:
        """Whether all are in host memory; nobody waits."""
        return self.arrival.query()

    def wait(self) -> float:
        """Make the host wait until they have arrived; returns their squared norm, as `seal_gradients` computed it."""
        self.arrival.synchronize()  # sync: once per stage and step, off the compute path
        return float(self.square)


class StageMemory(Protocol):
    """Weights and gradients of this rank's stages on the compute device, and the states the optimizer updates."""

    @property
    def states(self) -> Mapping[int, StageState]:
        """Stage -> its training state, on the host or on the GPU."""

    def is_resident(self, stage: int) -> bool:
        """Whether `stage` stays on the device and is updated there, or is loaded and updated on the host."""

    def keeps_gradients(self, stage: int) -> bool:
        """Whether `states[stage].gradients` stays until the stage's next backward.

        If not, the stage must be updated before another one's backward begins.
        """

    def load(self, stage: int) -> None:
        """Start bringing `stage`'s weights to the device; returns at once."""

    def wait_until_updated(self, stage: int) -> None:
        """Make the host wait until the optimizer has updated `stage`."""

    def is_ready(self, stage: int) -> bool:
        """Whether `wait_until_updated` and `weights` let nobody wait, because they did before or nothing changed."""

    def weights(self, stage: int) -> dict[str, Tensor]:
        """Parameter views on the device; the compute stream waits until they are there."""

    def gradients(self, stage: int) -> dict[str, Tensor]:
        """fp32 accumulators on the device, zero at the first call of a step."""

    def seal_gradients(self, stage: int, *, excluded: frozenset[str]) -> Tensor:
        """End accumulation: bring the gradients into the form they leave in.

        Returns their squared norm without the parameters in `excluded` (fp32 scalar on the device, not synchronized).
        """

    def offload(self, stage: int) -> Departure | None:
        """Free `stage`'s place on the device; returns at once.

        Sealed gradients start on their way home and can be waited for.
        """

    def wait_for_gradients(self, stage: int) -> None:
        """Make the host wait until `states[stage].gradients` is complete."""

    def have_gradients_arrived(self, stage: int) -> bool:
        """Whether `wait_for_gradients` would return at once."""
