"""One stage's memory as executor and stepper see it: streamed (`streamed.py`) or resident (`resident.py`).

    load -> weights -> forward -> offload     and later     load -> weights, gradients -> backward
                                                                 -> finish_gradients -> offload -> update

Resident stages are neither loaded nor offloaded. Each accumulation round repeats this cycle; a streamed stage's sums
are on the host between rounds:

    load -> weights -> forward -> load_gradient_sums -> weights, gradients -> backward -> offload_gradient_sums
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from mobius.engine.stage_state import StageState
from mobius.hardware.streams import Event
from mobius.models.layout import FlatRange


class Update(Protocol):
    """The optimizer's update of one stage, with the constants of its step."""

    def __call__(self, *, pieces: Sequence[FlatRange], found_inf: Tensor | None = None) -> None:
        """Update `pieces` of the trained part; changes nothing if `found_inf` (fp32 scalar, on the device) is 1."""


GradientsReadyCallback = Callable[[int], None]
"""Called with a stage, during the step, once its gradients are finished and `begin_update` may be called.

If the gradients leave the device, their copy has started.
"""


class StageMemory(Protocol):
    """Weights and gradients of one stage on the compute device, and the state that the optimizer updates."""

    @property
    def state(self) -> StageState:
        """Training state, on the host or the device; `finish_gradients` may replace its gradient buffer."""

    @property
    def frozen_state(self) -> StageState:
        """State that holds the frozen weights: `state` or a separate one."""

    @property
    def reduction(self) -> Event | None:
        """Event after which compute may read the result of `finish_gradients`; None if stream order suffices."""

    def load(self) -> None:
        """Start copying the weights to the device, after any pending update; returns before it is done."""

    def is_ready(self) -> bool:
        """Whether `wait_until_updated` and `weights` return without waiting."""

    def wait_until_updated(self) -> None:
        """Make the host wait for the update, or compute if the state is on the device; raises what it raised."""

    def run_after_update(self, action: Callable[[], None]) -> None:
        """Call `action` after all updates begun so far: now, or in the optimizer's thread.

        Updates on a GPU may still be running when it is called; stream order protects the state.
        """

    def gather_updated_weights(self) -> None:
        """Fetch the weights of `state` that other replicas have updated; collective over replicas.

        Blocks until weights and updates are complete. Needed only to read the state directly: a load gathers them
        anyway.
        """

    def weights(self) -> dict[str, Tensor]:
        """Return parameter views on the device; the compute stream waits until they are loaded."""

    def gradients(self) -> dict[str, Tensor]:
        """Return fp32 sums of the trained parameters on the device, zero at the first call of a step."""

    def finish_gradients(
        self, *, excluded: frozenset[str], on_gradients_ready: GradientsReadyCallback | None = None
    ) -> Tensor:
        """Finish accumulation: convert the gradients to the form that is offloaded or that the update reads.

        Returns their squared norm without the parameters in `excluded` (fp32 scalar on the device, not synchronized,
        valid after `reduction`). It is computed in fp32 before any cast; a value that the cast makes infinite (fp16)
        makes it NaN. Calls `on_gradients_ready` if the gradients stay on the device.
        """

    def offload(self, on_gradients_ready: GradientsReadyCallback | None = None) -> None:
        """Free the stage's slot on the device; returns at once.

        Starts copying finished gradients to the host and then calls `on_gradients_ready`.
        """

    def offload_gradient_sums(self) -> None:
        """Start copying the unfinished sums to the host, until `load_gradient_sums`; returns at once."""

    def load_gradient_sums(self) -> None:
        """Start copying the unfinished sums back, for `gradients` to continue. Returns at once."""

    def wait_for_gradients(self) -> None:
        """Make the host wait until `state.gradients` are complete, or compute if they are on the device."""

    def begin_update(self, update: Update) -> bool:
        """Run `update` during the rest of the step, unless the gradients are not finite; False if it cannot begin yet.

        Call it after the gradients are finished.
        """

    def update(self, update: Update) -> None:
        """Run `update` after the step, now or in queue order; the caller has decided not to skip it."""
