"""Embeds the tokens of the first stage, and runs the embedding's backward.

The embedding is a block of tokens [B, T] -> hidden states [B, T, H]. If its module sets `takes_positions`, it also gets
`position_ids` [B, T]: each token's place in its document. Such a module may hold any parameters, trained or frozen.
Features of images (`ImageTokens`) then take the places of their tokens; they have no gradient.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mobius.engine.stage_layers import MicrobatchContext
from mobius.models.block_autograd import Block, NamedTensors, backward, run_with_graph, run_without_graph

TAKES_POSITIONS: Final = "takes_positions"
"""Attribute of a module whose forward takes `position_ids`."""


class Embedder:
    """Forward and backward of the embedding, for complete sequences and for slices of sequences."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def run(self, weights: NamedTensors, tokens: Tensor, context: MicrobatchContext) -> Tensor:
        """Return the hidden states [B, T, H] of `tokens` [B, T], without a graph."""
        hidden = run_without_graph(self._block, weights, tokens, self._arguments(tokens, context))
        return hidden if context.images is None else context.images.fill(hidden)

    def backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        tokens: Tensor,
        gradient: Tensor,
        context: MicrobatchContext,
    ) -> None:
        """Add the gradients of trained parameters; `gradient` [B, T, H] belongs to the hidden states of `tokens`."""
        if self._block.num_trained_parameters:
            gradient = gradient if context.images is None else context.images.without(gradient)
            graph = run_with_graph(self._block, weights, tokens, self._arguments(tokens, context))
            backward(self._block, graph, gradients, gradient)

    def _arguments(self, tokens: Tensor, context: MicrobatchContext) -> dict[str, Any]:
        if not getattr(self._block.module, TAKES_POSITIONS, False):
            return {}
        part, position_ids = context.sequence_slice, context.arguments[0].get("position_ids")
        length = tokens.shape[1] if part is None else part.length
        if position_ids is None:  # each row is one document
            position_ids = torch.arange(length, device=tokens.device).expand(len(tokens), -1)
        return {"position_ids": position_ids if part is None else position_ids[:, part.start : part.end]}
