"""Runs a layer in the halves before and behind its attention, forward and backward; gradients add up as of a whole one.

Backward needs the layer's input, query, key and value, and attention's result; it never needs the layer's output, and
each half runs forward again within its backward only:

    post_attention_backward  gradient of the output             -> of the layer's input, and of attention's result
    AttentionGraph           gradient of attention's result     -> of query, key and value
    pre_attention_backward   gradients of query, key and value  -> of the layer's input, to be added to the first
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mobius.models.attention_split import LayerAttention, without_attention_arguments
from mobius.models.block_autograd import (
    NamedTensors,
    recomputed_backward_many,
    run_many_without_graph,
)
from mobius.models.blocks import SplitBlocks
from mobius.models.compiled import KeywordArguments, Tensors


class Heads(NamedTuple):
    """Query, key and value as an attention function gets them, [B, H, T, D]; or their gradients."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class AttentionGraph:
    """Attention's forward with autograd's graph, until `backward` consumes it."""

    heads: Heads
    output: Tensor
    """[B, T, H, D]."""

    @classmethod
    def of(cls, attention: LayerAttention, heads: Heads, arguments: Mapping[str, Any]) -> AttentionGraph:
        """Run `attention` on `heads`; `arguments` are the layer's."""
        leaves = Heads(*(each.detach().requires_grad_() for each in heads))
        with torch.enable_grad():
            return cls(leaves, attention(*leaves, arguments))

    def backward(self, gradient: Tensor) -> Heads:
        """Gradients of query, key and value; `gradient` is that of `output`."""
        return Heads(*torch.autograd.grad(self.output, self.heads, gradient))


class PrePostAttention:
    """A layer's two halves on weights that are handed in by Hugging Face name.

    `arguments` are the whole layer's or, for the halves, those of the tokens that `hidden` [B, T, hidden] has.
    """

    def __init__(self, blocks: SplitBlocks) -> None:
        self._blocks = blocks

    def run_pre_attention(self, weights: NamedTensors, hidden: Tensor, arguments: Mapping[str, Any]) -> Heads:
        """Query, key and value, without a graph."""
        return Heads(*run_many_without_graph(self._blocks.pre_attention, weights, (hidden,), _own(arguments)))

    def attend(self, heads: Heads, arguments: Mapping[str, Any]) -> Tensor:
        """Attention's result [B, T, H, D], without a graph."""
        with torch.no_grad():
            return self._blocks.attention(*heads, arguments)

    def attend_with_graph(self, heads: Heads, arguments: Mapping[str, Any]) -> AttentionGraph:
        """Attention's result with what its backward needs."""
        return AttentionGraph.of(self._blocks.attention, heads, arguments)

    def run_post_attention(
        self, weights: NamedTensors, hidden: Tensor, attended: Tensor, arguments: Mapping[str, Any]
    ) -> Tensors:
        """The layer's output [B, T, hidden], and the sums of its router if they are asked for, without a graph."""
        return run_many_without_graph(self._blocks.post_attention, weights, (hidden, attended), _own(arguments))

    def post_attention_backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        hidden: Tensor,
        attended: Tensor,
        gradient: Tensor,
        arguments: Mapping[str, Any],
        *other_gradients: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Add the parameters' gradients behind attention to `gradients`, fp32 sums by Hugging Face name.

        `gradient` is that of the layer's output, `other_gradients` that of its router's sums. Returns those of
        `hidden`, as far as it does not go through attention, and of `attended`.
        """
        given = (
            self._blocks.post_attention,
            weights,
            (hidden, attended),
            _own(arguments),
            gradients,
            (gradient, *other_gradients),
        )
        of_hidden, of_attended = recomputed_backward_many(*given)
        return of_hidden, of_attended

    def pre_attention_backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        hidden: Tensor,
        of_heads: Heads,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        """Add the parameters' gradients before attention to `gradients`; return that of `hidden` through attention.

        `of_heads` are the gradients of query, key and value.
        """
        given = self._blocks.pre_attention, weights, (hidden,), _own(arguments), gradients, tuple(of_heads)
        return recomputed_backward_many(*given)[0]


def _own(arguments: Mapping[str, Any]) -> KeywordArguments:
    return KeywordArguments(without_attention_arguments(arguments))
