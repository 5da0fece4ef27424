"""Layers of a stage as the executor runs them, whether its microbatches are whole sequences or slices of them.

`WholeLayers` is the first kind, `slices.SlicedStage` the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mobius.models.blocks import LayerArguments
from mobius.models.graph import Views
from mobius.runtime.places import Place
from mobius.runtime.routers import RouterTurn
from mobius.runtime.stage import Kept, StageModule, tensors_of


@dataclass(frozen=True)
class Turn:
    """A microbatch as layers see it beside its hidden states."""

    arguments: LayerArguments
    """For all layers of the model; of whole sequences."""
    place: Place | None = None
    """Where the microbatch is in its sequences; None where it is them."""
    for_home: bool = False
    """Whether what layers keep of it goes to the host, with all that products need."""
    routers: RouterTurn | None = None
    """Its routers, whose sums layers add to, or whose gradient they take; None where they have no loss."""


class StageLayers(Protocol):
    """Forward and backward of a stage's layers, and of its embedding forward only.

    What `forward` or `receive` gives to be kept, the others take for the same microbatch. Hidden states are [B, T, H],
    inputs of the first stage token ids [B, T].
    """

    def forward(self, weights: Views, inputs: Tensor, turn: Turn) -> tuple[Tensor, list[Kept]]:
        """Run the layers; return the hidden states, without a graph, and what is to be kept for backward."""

    def evaluate(self, weights: Views, inputs: Tensor, turn: Turn) -> Tensor:
        """Run the layers for their hidden states alone; of the model's last stage those that norm and head get."""

    def receive(self, inputs: Tensor) -> list[Kept] | None:
        """Return what the model's last stage keeps of its input until its turn; None: it runs `forward` for that."""

    def make_keys(self, weights: Views, kept: Sequence[Tensor], turn: Turn) -> None:
        """Make keys and values anew that backward of later microbatches needs."""

    def finish(self, weights: Views, kept: list[Kept], turn: Turn) -> tuple[Tensor, list[Kept]]:
        """In the model's last stage, the hidden states for norm and head, and what backward then takes."""

    def backward(self, weights: Views, gradients: Views, kept: list[Kept], gradient: Tensor, turn: Turn) -> Tensor:
        """Add the layers' parameter gradients to `gradients`, fp32 sums by name; return that of the input.

        `gradient` is that of the hidden states. Empties `kept`.
        """


@dataclass(frozen=True)
class WholeLayers:
    """Layers whose microbatches are whole sequences; the model's last stage runs forward in its turn only."""

    module: StageModule
    keep_graphs: bool
    """Whether activations are kept from forward to backward, instead of recomputed; weights then must stay there."""

    def forward(self, weights: Views, inputs: Tensor, turn: Turn) -> tuple[Tensor, list[Kept]]:
        given = weights, inputs, turn.arguments
        return self.module.forward(*given, keep_graphs=self.keep_graphs, for_home=turn.for_home, routers=turn.routers)

    def evaluate(self, weights: Views, inputs: Tensor, turn: Turn) -> Tensor:
        return self.module.run(weights, inputs, turn.arguments)

    def receive(self, inputs: Tensor) -> list[Kept] | None:
        return [inputs]

    def make_keys(self, weights: Views, kept: Sequence[Tensor], turn: Turn) -> None:
        raise AssertionError("whole sequences have no keys to be made anew")

    def finish(self, weights: Views, kept: list[Kept], turn: Turn) -> tuple[Tensor, list[Kept]]:
        (inputs,) = tensors_of(kept)
        return self.forward(weights, inputs, turn)

    def backward(self, weights: Views, gradients: Views, kept: list[Kept], gradient: Tensor, turn: Turn) -> Tensor:
        return self.module.backward(weights, gradients, kept, gradient, turn.arguments, turn.routers)
