"""Runs a layer as two halves, before and after its attention; the gradients equal those of the whole layer.

Backward needs the layer's input, query, key and value, and the attention output, but not the layer's output. Each half
recomputes its forward within its own backward:

    post_attention_backward  gradient of the output             -> gradients of the layer's input and attention output
    AttentionGraph           gradient of the attention output   -> gradients of query, key and value
    pre_attention_backward   gradients of query, key and value  -> gradient of the layer's input, to add to the first
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
    """Query, key and value as passed to an attention function, [B, H, T, D]; or their gradients."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class AttentionGraph:
    """Attention's forward with its autograd graph, until `backward` consumes it."""

    heads: Heads
    output: Tensor
    """[B, T, H, D]."""

    @classmethod
    def of(cls, attention: LayerAttention, heads: Heads, arguments: Mapping[str, Any]) -> AttentionGraph:
        """Run `attention` on `heads`; `arguments` are the layer's arguments."""
        leaves = Heads(*(each.detach().requires_grad_() for each in heads))
        with torch.enable_grad():
            return cls(leaves, attention(*leaves, arguments))

    def backward(self, gradient: Tensor) -> Heads:
        """Gradients of query, key and value from `gradient`, the gradient of `output`."""
        return Heads(*torch.autograd.grad(self.output, self.heads, gradient))


class PrePostAttention:
    """The two halves of a layer, run on weights passed by Hugging Face name.

    `arguments` are those of the whole layer; the halves get those of the tokens in `hidden` [B, T, hidden].
    """

    def __init__(self, blocks: SplitBlocks) -> None:
        self._blocks = blocks

    def run_pre_attention(self, weights: NamedTensors, hidden: Tensor, arguments: Mapping[str, Any]) -> Heads:
        """Query, key and value, without autograd graph."""
        return Heads(*run_many_without_graph(self._blocks.pre_attention, weights, (hidden,), _own(arguments)))

    def attend(self, heads: Heads, arguments: Mapping[str, Any]) -> Tensor:
        """Attention output [B, T, H, D], without autograd graph."""
        with torch.no_grad():
            return self._blocks.attention(*heads, arguments)

    def attend_with_graph(self, heads: Heads, arguments: Mapping[str, Any]) -> AttentionGraph:
        """Attention output with its autograd graph."""
        return AttentionGraph.of(self._blocks.attention, heads, arguments)

    def run_post_attention(
        self, weights: NamedTensors, hidden: Tensor, attended: Tensor, arguments: Mapping[str, Any]
    ) -> Tensors:
        """The layer's output [B, T, hidden], and its router sums if requested, without autograd graph."""
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
        """Add gradients of the parameters after attention to `gradients` (fp32 sums by Hugging Face name).

        `gradient` belongs to the layer's output, `other_gradients` to its router sums. Returns the gradients of
        `hidden` (without the path through attention) and of `attended`.
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
        """Add the gradients of parameters before attention to `gradients`; return `hidden`'s part through attention.

        `of_heads` are the gradients of query, key and value.
        """
        given = self._blocks.pre_attention, weights, (hidden,), _own(arguments), gradients, tuple(of_heads)
        return recomputed_backward_many(*given)[0]


def _own(arguments: Mapping[str, Any]) -> KeywordArguments:
    return KeywordArguments(without_attention_arguments(arguments))
