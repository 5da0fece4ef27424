"""Streamed stages with a frozen base and a small trained part, such as LoRA adapters.

    frozen      bf16 on the host, loaded into a slot before forward and before backward; never copied back
    trained     weights, fp32 sums, master and moments on the device, updated there after backward

`AdapterStage` only combines a streamed stage (`streamed.py`) and a resident one (`resident.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mobius.engine.resident import ResidentStage
from mobius.engine.stage_memory import GradientsReadyCallback, Update
from mobius.engine.stage_state import StageState
from mobius.engine.streamed import StreamedStage
from mobius.hardware.streams import Event


@dataclass(frozen=True)
class AdapterStage:
    """A StageMemory of two parts: `frozen` holds only weights, `trained` stores its gradients in fp32."""

    frozen: StreamedStage
    trained: ResidentStage

    @property
    def state(self) -> StageState:
        """State of the trained part, which updates and checkpoints use."""
        return self.trained.state

    @property
    def frozen_state(self) -> StageState:
        return self.frozen.state

    @property
    def reduction(self) -> Event | None:
        return self.trained.reduction

    def load(self) -> None:
        self.frozen.load()

    def is_ready(self) -> bool:
        return self.frozen.is_ready() and self.trained.is_ready()

    def wait_until_updated(self) -> None:
        self.trained.wait_until_updated()

    def gather_updated_weights(self) -> None:
        self.trained.gather_updated_weights()

    def run_after_update(self, action: Callable[[], None]) -> None:
        self.trained.run_after_update(action)

    def weights(self) -> dict[str, Tensor]:
        return self.frozen.weights() | self.trained.weights()

    def gradients(self) -> dict[str, Tensor]:
        return self.trained.gradients()

    def finish_gradients(
        self, *, excluded: frozenset[str], on_gradients_ready: GradientsReadyCallback | None = None
    ) -> Tensor:
        return self.trained.finish_gradients(excluded=excluded, on_gradients_ready=on_gradients_ready)

    def offload(self, on_gradients_ready: GradientsReadyCallback | None = None) -> None:
        """Free the slot; gradients stay on the device, and `finish_gradients` has already reported them."""
        self.frozen.offload()

    def offload_gradient_sums(self) -> None:
        """Do nothing: sums stay on the device between accumulation rounds."""

    def load_gradient_sums(self) -> None:
        """Do nothing: sums stay on the device between accumulation rounds."""

    def wait_for_gradients(self) -> None:
        self.trained.wait_for_gradients()

    def begin_update(self, update: Update) -> bool:
        return self.trained.begin_update(update)

    def update(self, update: Update) -> None:
        self.trained.update(update)
