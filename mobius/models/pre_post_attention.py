"""Runs a layer as two halves, before and after its attention; the gradients equal those of the whole layer.

Backward needs the layer's input, query, key and value, and the attention output, but not the layer's output. Each half
recomputes its forward within its own backward:

    post_attention_backward  gradient of the output             -> gradients of the layer's input and attention output
    attention's backward     gradient of the attention output   -> gradients of query, key and value
    pre_attention_backward   gradients of query, key and value  -> gradient of the layer's input, to add to the first
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from mobius.models.attention_split import LayerAttention, without_attention_arguments
from mobius.models.block_autograd import Block, NamedTensors, recomputed_backward_many, run_many_without_graph
from mobius.models.compiled import KeywordArguments, Tensors


class Heads(NamedTuple):
    """Query, key and value as passed to an attention function, [B, H, T, D]; or their gradients."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class SplitBlocks:
    """A layer split at its attention, run on weights passed by Hugging Face name; both halves have its prefix.

    `arguments` are those of the whole layer; the halves get those of the tokens in `hidden` [B, T, hidden].
    """

    pre_attention: Block
    """Hidden states -> query, key and value."""
    post_attention: Block
    """Hidden states and attention output [B, T, H, D] -> the layer's output, and its router sums if requested."""
    attention: LayerAttention

    def run_pre_attention(self, weights: NamedTensors, hidden: Tensor, arguments: Mapping[str, Any]) -> Heads:
        """Query, key and value, without autograd graph."""
        return Heads(*run_many_without_graph(self.pre_attention, weights, (hidden,), _own(arguments)))

    def run_post_attention(
        self, weights: NamedTensors, hidden: Tensor, attended: Tensor, arguments: Mapping[str, Any]
    ) -> Tensors:
        """The layer's outputs, without autograd graph."""
        return run_many_without_graph(self.post_attention, weights, (hidden, attended), _own(arguments))

    def post_attention_backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        hidden: Tensor,
        attended: Tensor,
        gradient: Tensor,
        arguments: Mapping[str, Any],
        *other_gradients: Tensor,
    ) -> Tensors:
        """Add gradients of the parameters after attention to `gradients` (fp32 sums by Hugging Face name).

        `gradient` belongs to the layer's output, `other_gradients` to its router sums. Returns the gradients of
        `hidden` (without the path through attention) and of `attended`.
        """
        inputs, output_gradients = (hidden, attended), (gradient, *other_gradients)
        given = self.post_attention, weights, inputs, _own(arguments), gradients, output_gradients
        return recomputed_backward_many(*given)

    def pre_attention_backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        hidden: Tensor,
        head_gradients: Heads,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        """Add the gradients of parameters before attention to `gradients`; return `hidden`'s part through attention."""
        given = self.pre_attention, weights, (hidden,), _own(arguments), gradients, tuple(head_gradients)
        return recomputed_backward_many(*given)[0]


def _own(arguments: Mapping[str, Any]) -> KeywordArguments:
    return KeywordArguments(without_attention_arguments(arguments))
