"""Interface through which the executor runs a stage's layers, on complete sequences or on slices of sequences.

Implementations: `stage.StageModule` and `sliced_layers.SlicedLayers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mobius.engine.pipelined_router_loss import NO_ROUTERS, RouterContext
from mobius.models.block_autograd import BlockGraph, NamedTensors
from mobius.models.blocks import LayerArguments
from mobius.models.compiled import SavedProducts
from mobius.models.slice_pieces import SlicedAttentionSettings

SavedForBackward = Tensor | BlockGraph | SavedProducts
"""State that a layer saves for backward: its input [B, L, H] for recomputation, its graph, or offloadable products."""


def tensors_of(saved_for_backward: Sequence[SavedForBackward]) -> list[Tensor]:
    """Return the saved layer inputs; raises AssertionError if there are graphs."""
    tensors = [each for each in saved_for_backward if isinstance(each, Tensor)]
    assert len(tensors) == len(saved_for_backward), "saved graphs have no input to recompute from"
    return tensors


@dataclass(frozen=True)
class SequenceSlice:
    """Position of a microbatch within its sequences."""

    start: int
    """First token of the slice in each sequence."""
    end: int
    length: int
    """Number of tokens of the slice in each sequence."""
    documents: Tensor | None = None
    """Document bounds of the sequences (`attention.DocumentLayout`), on the host; None: each is one document."""
    settings: dict[Any, SlicedAttentionSettings] = field(default_factory=dict)
    """Attention settings by kind of layer, created on first use and shared by all slices of these sequences."""


def cut_rows(rows: Tensor, *, num_groups: int, num_slices: int) -> list[Tensor]:
    """Return the slices [B / groups, L / slices] of `rows` [B, L], group by group."""
    return [part.contiguous() for group in rows.chunk(num_groups) for part in group.chunk(num_slices, dim=1)]


def slice_sequences(length: int, cu_seqlens: Sequence[Tensor | None], *, num_slices: int) -> list[SequenceSlice]:
    """Return the position of every slice of sequences of `length` tokens, group by group.

    `num_slices` must divide `length`. `cu_seqlens`: document bounds of each group (`attention.DocumentLayout`), on the
    host.
    """
    step, sequence_slices = length // num_slices, list[SequenceSlice]()
    for documents in cu_seqlens:
        first = SequenceSlice(0, step, length, documents)
        sequence_slices += [replace(first, start=start, end=start + step) for start in range(0, length, step)]
    return sequence_slices


@dataclass(frozen=True)
class ImageTokens:
    """Tokens of a microbatch that are images, whose features come from a frozen tower."""

    places: Tensor
    """int64 [B, T]: row of each token's features; -1 for other tokens."""
    features: Tensor
    """[image tokens, H], on the host (page-locked if there is a GPU)."""

    def fill(self, hidden: Tensor) -> Tensor:
        """Return `hidden` [B, T, H] with the features in the places of images."""
        if not len(self.features):
            return hidden
        features = self.features.to(hidden.device, hidden.dtype, non_blocking=True)
        return torch.where(self._is_image(), F.embedding(self.places.clamp(min=0), features), hidden)

    def without(self, gradient: Tensor) -> Tensor:
        """Return `gradient` [B, T, H] of hidden states, which is 0 for images, because nothing before is trained."""
        return gradient.masked_fill(self._is_image(), 0) if len(self.features) else gradient

    def _is_image(self) -> Tensor:
        return (self.places >= 0).unsqueeze(-1)


@dataclass(frozen=True)
class MicrobatchContext:
    """Inputs that the layers get for a microbatch in addition to hidden states."""

    arguments: LayerArguments
    """Arguments of all layers of the model, for complete sequences."""
    sequence_slice: SequenceSlice | None = None
    """Position of the microbatch within its sequences; None if it is complete sequences."""
    offload_saved_tensors: bool = False
    """Whether the saved tensors, including all matrix products, are offloaded to the host."""
    routers: RouterContext = NO_ROUTERS
    """Router sums, to which layers add in forward; in backward, the gradient of the sums."""
    images: ImageTokens | None = None
    """Images of the microbatch, which only the embedding needs; None: rows without images."""


class StageLayers(Protocol):
    """Forward and backward of a stage's layers, and forward of its embedding.

    The caller passes the state that `forward` or `save_input` returns to the other methods for the same microbatch.
    Hidden states are [B, T, H] with T of the sequences' L tokens; inputs of the first stage are token ids [B, T].
    """

    def forward(
        self, weights: NamedTensors, inputs: Tensor, context: MicrobatchContext
    ) -> tuple[Tensor, list[SavedForBackward]]:
        """Run the layers; return the hidden states, without a graph, and the state to save for backward."""

    def run(self, weights: NamedTensors, inputs: Tensor, context: MicrobatchContext) -> Tensor:
        """Return only the hidden states; in the model's last stage, they are the input of the final norm."""

    def save_input(self, inputs: Tensor) -> list[SavedForBackward] | None:
        """Return the state to save instead of running `forward` in the model's last stage; None: run `forward`."""

    def recompute_kv(
        self, weights: NamedTensors, saved_for_backward: Sequence[Tensor], context: MicrobatchContext
    ) -> None:
        """Recompute the keys and values that the backward of later microbatches needs."""

    def finish_forward(
        self, weights: NamedTensors, saved_for_backward: list[SavedForBackward], context: MicrobatchContext
    ) -> tuple[Tensor, list[SavedForBackward]]:
        """In the model's last stage, return the input of the final norm, and the state for `backward`."""

    def backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        saved_for_backward: list[SavedForBackward],
        gradient: Tensor,
        context: MicrobatchContext,
    ) -> Tensor:
        """Add the gradients of the layers' parameters to `gradients` (fp32 sums by name); return the input's gradient.

        `gradient` is the gradient of the returned hidden states. Empties `saved_for_backward`.
        """
