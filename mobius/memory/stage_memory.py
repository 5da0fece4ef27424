"""One stage's memory, as executor and stepper see it: streamed (`streamed.py`) or resident (`resident.py`).

    load -> weights -> forward -> offload     and later     load -> weights, gradients -> backward
                                                                 -> finish_gradients -> offload -> update

A resident stage is neither loaded nor offloaded. In a step of several rounds this goes round as often, and between
them a streamed stage's sums are on the host:

    load -> weights -> forward -> load_gradient_sums -> weights, gradients -> backward -> offload_gradient_sums
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from mobius.memory.layout import FlatRange
from mobius.memory.stage_state import StageState
from mobius.memory.streams import Event


class Update(Protocol):
    """The optimizer's update of one stage, with the numbers of its step."""

    def __call__(self, *, pieces: Sequence[FlatRange], found_inf: Tensor | None = None) -> None:
        """Update `pieces` of the trained part; nothing changes where `found_inf` (fp32 scalar, on the device) is 1."""


GradientsReadyCallback = Callable[[int], None]
"""Told in the middle of the step that all microbatches are in a stage's gradients, and `begin_update` may be called.

They are sealed, and if they leave the device they have started to.
"""


class StageMemory(Protocol):
    """Weights and gradients of one stage on the compute device, and the state that the optimizer updates."""

    @property
    def state(self) -> StageState:
        """Training state, on the host or on the device; sealing may put another buffer in its gradients' place."""

    @property
    def frozen_state(self) -> StageState:
        """Where frozen weights are: in `state`, or in one of their own."""

    @property
    def reduction(self) -> Event | None:
        """Point behind which what sealing returned is there for compute; None where compute's own order says so."""

    def load(self) -> None:
        """Start bringing the weights to the device, at once or behind their update; returns before it is done."""

    def is_ready(self) -> bool:
        """Whether `wait_until_updated` and `weights` let nobody wait, because they did before or nothing changed."""

    def wait_until_updated(self) -> None:
        """Make the host, or compute where the state is on the device, wait for the update; raises what it raised."""

    def run_after_update(self, action: Callable[[], None]) -> None:
        """Call `action` once the state has all updates that were begun: now, or in the thread that updates.

        Behind updates on a GPU it is called before they are done, in the order of their stream.
        """

    def gather_updated_weights(self) -> None:
        """Bring the weights of `state` that other replicas have updated; collective over them.

        Blocks until weights and updates are there. Only what reads the state by itself needs it: a load brings them.
        """

    def weights(self) -> dict[str, Tensor]:
        """Parameter views on the device; the compute stream waits until they are there."""

    def gradients(self) -> dict[str, Tensor]:
        """fp32 sums of the trained parameters on the device, zero at the first call of a step."""

    def finish_gradients(
        self, *, excluded: frozenset[str], on_gradients_ready: GradientsReadyCallback | None = None
    ) -> Tensor:
        """End accumulation: bring the gradients into the form in which they leave or are read by the update.

        Returns their squared norm without the parameters in `excluded` (fp32 scalar on the device, not synchronized,
        and to be read behind `reduction`), computed in fp32 before any cast; a value that the cast makes infinite
        (fp16) makes it NaN. Tells `on_gradients_ready` if the gradients stay.
        """

    def offload(self, on_gradients_ready: GradientsReadyCallback | None = None) -> None:
        """Free the stage's place on the device; returns at once.

        Sealed gradients start on their way to the host, and `on_gradients_ready` is told.
        """

    def offload_gradient_sums(self) -> None:
        """Send what is added up so far to the host, where it waits for `load_gradient_sums`; returns at once."""

    def load_gradient_sums(self) -> None:
        """Start bringing back what was added up; `gradients` goes on with it. Returns at once."""

    def wait_for_gradients(self) -> None:
        """Make the host, or compute where they are on the device, wait until `state.gradients` are complete."""

    def begin_update(self, update: Update) -> bool:
        """Run `update` under the rest of the step, unless the gradients are not finite; False if it cannot begin yet.

        Called when the gradients are complete.
        """

    def update(self, update: Update) -> None:
        """Run `update` now or, where updates queue, in its turn; the step is over and decided to be taken."""
