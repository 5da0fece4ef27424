"""Layers of a stage as the executor runs them, whether its microbatches are whole sequences or slices of them.

`WholeLayers` is the first kind, `slices.SlicedLayers` the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mobius.models.block_autograd import NamedTensors
from mobius.models.blocks import LayerArguments
from mobius.runtime.pipelined_router_loss import RouterContext
from mobius.runtime.sequence_slices import SequenceSlice
from mobius.runtime.stage import SavedForBackward, StageModule, tensors_of


@dataclass(frozen=True)
class MicrobatchContext:
    """A microbatch as layers see it beside its hidden states."""

    arguments: LayerArguments
    """For all layers of the model; of whole sequences."""
    sequence_slice: SequenceSlice | None = None
    """Where the microbatch is in its sequences; None where it is them."""
    offload_saved_tensors: bool = False
    """Whether what layers keep of it goes to the host, with all that products need."""
    routers: RouterContext | None = None
    """Its routers, whose sums layers add to, or whose gradient they take; None where they have no loss."""


class StageLayers(Protocol):
    """Forward and backward of a stage's layers, and of its embedding forward only.

    What `forward` or `receive` gives to be kept, the others take for the same microbatch. Hidden states are [B, T, H],
    inputs of the first stage token ids [B, T].
    """

    def forward(
        self, weights: NamedTensors, inputs: Tensor, context: MicrobatchContext
    ) -> tuple[Tensor, list[SavedForBackward]]:
        """Run the layers; return the hidden states, without a graph, and what is to be kept for backward."""

    def evaluate(self, weights: NamedTensors, inputs: Tensor, context: MicrobatchContext) -> Tensor:
        """Run the layers for their hidden states alone; of the model's last stage those that norm and head get."""

    def save_input(self, inputs: Tensor) -> list[SavedForBackward] | None:
        """Return what the model's last stage keeps of its input until its turn; None: it runs `forward` for that."""

    def recompute_kv(
        self, weights: NamedTensors, saved_for_backward: Sequence[Tensor], context: MicrobatchContext
    ) -> None:
        """Make keys and values anew that backward of later microbatches needs."""

    def finish_forward(
        self, weights: NamedTensors, saved_for_backward: list[SavedForBackward], context: MicrobatchContext
    ) -> tuple[Tensor, list[SavedForBackward]]:
        """In the model's last stage, the hidden states for norm and head, and what backward then takes."""

    def backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        saved_for_backward: list[SavedForBackward],
        gradient: Tensor,
        context: MicrobatchContext,
    ) -> Tensor:
        """Add the layers' parameter gradients to `gradients`, fp32 sums by name; return that of the input.

        `gradient` is that of the hidden states. Empties `saved_for_backward`.
        """


@dataclass(frozen=True)
class WholeLayers:
    """Layers whose microbatches are whole sequences; the model's last stage runs forward in its turn only."""

    module: StageModule
    keep_graphs: bool
    """Whether activations are kept from forward to backward, instead of recomputed; weights then must stay there."""

    def forward(
        self, weights: NamedTensors, inputs: Tensor, context: MicrobatchContext
    ) -> tuple[Tensor, list[SavedForBackward]]:
        given = weights, inputs, context.arguments
        return self.module.forward(
            *given,
            keep_graphs=self.keep_graphs,
            offload_saved_tensors=context.offload_saved_tensors,
            routers=context.routers,
        )

    def evaluate(self, weights: NamedTensors, inputs: Tensor, context: MicrobatchContext) -> Tensor:
        return self.module.run(weights, inputs, context.arguments)

    def save_input(self, inputs: Tensor) -> list[SavedForBackward] | None:
        return [inputs]

    def recompute_kv(
        self, weights: NamedTensors, saved_for_backward: Sequence[Tensor], context: MicrobatchContext
    ) -> None:
        raise AssertionError("whole sequences have no keys to be made anew")

    def finish_forward(
        self, weights: NamedTensors, saved_for_backward: list[SavedForBackward], context: MicrobatchContext
    ) -> tuple[Tensor, list[SavedForBackward]]:
        (inputs,) = tensors_of(saved_for_backward)
        return self.forward(weights, inputs, context)

    def backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        saved_for_backward: list[SavedForBackward],
        gradient: Tensor,
        context: MicrobatchContext,
    ) -> Tensor:
        return self.module.backward(
            weights, gradients, saved_for_backward, gradient, context.arguments, context.routers
        )
