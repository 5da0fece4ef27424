"""What the work of one microbatch takes on a GPU beside what is kept: one layer's backward, head and loss, embedding.

Widths count tensors [tokens, width] of the working format. A layer by what its code keeps and makes (models/linear.py:
the gradients of all linear outputs live until its backward ends), H hidden, I feed-forward, A + Q what the attention's
four products have for output and input (4 H in Llama):

                        graph                 peak: in the feed-forward part, or at the end
    compiled            A + Q + 3 H + 3 I     graph + 4 H + 3 I
    eager, bf16, fp16   A + Q + 9 H + 4 I     graph + 3 I,  A + Q + 18 H + 3 I     (norms in fp32)
    eager, fp32         A + Q + 6 H + 4 I     graph + 3 I,  A + Q + 12 H + 3 I

The eager ones are counted, op by op, on a CPU (tests/harness/live_bytes.py); of the compiled ones the graph is within
2 % of the 0.7 of all widths that was measured on an H200, the peak within 1 % of what was measured there. They hold
for Llama, Mistral and Qwen2; norms on queries and keys (Qwen3) make a graph 1.25 times as large, Gemma 3's 1.8 times
(eager, counted). Where a GPU is at hand, a layer is measured instead (runtime/stage.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from mobius.plan.shape import ModelShape

LOGIT_BYTES_COMPILED = 2
"""Of the two tensors that the compiled loss makes per logit, logits and their gradient: times the working format."""
LOGIT_BYTES_EAGER = 12
"""fp32 beside the logits: their logarithmic softmax, its gradient and theirs."""
SEGMENT_TOKENS = 10
"""Tokens per partial sum in torch's backward of an embedding on a GPU (EmbeddingBackwardKernel.cu)."""


@dataclass(frozen=True)
class LayerBytes:
    """What one layer takes for one microbatch, in bytes."""

    graph: int
    """Held from a forward that keeps its graph to its backward: the output in it, the input not."""
    peak: int
    """Most that exists in forward with graph and backward together, the graph in it; input and incoming gradient not.
    """


def estimate_layer(weight_bytes: int, shape: ModelShape, tokens: int, *, compiled: bool) -> LayerBytes:
    """The layer with most parameters, by widths; `weight_bytes` per element of the working format."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    attention = max(0, max(shape.layer_parameters, default=0) - 3 * hidden * inner) // hidden
    if compiled:
        graph = attention + 3 * hidden + 3 * inner
        peak = graph + 4 * hidden + 3 * inner
    else:
        norms = 3 if weight_bytes == 4 else 6
        graph = attention + (3 + norms) * hidden + 4 * inner
        peak = max(graph + 3 * inner, attention + (6 + 2 * norms) * hidden + 3 * inner)
    return LayerBytes(graph * tokens * weight_bytes, peak * tokens * weight_bytes)


def with_measured(estimate: LayerBytes, *, graph_bytes: int | None = None, peak_bytes: int | None = None) -> LayerBytes:
    """`estimate` with what was measured in its place; a peak that was not grows with the graph."""
    if graph_bytes is None:
        return estimate
    if peak_bytes is None:
        peak_bytes = graph_bytes * estimate.peak // max(1, estimate.graph)
    return LayerBytes(graph_bytes, max(graph_bytes, peak_bytes))


def loss_bytes(
    weight_bytes: int, shape: ModelShape, *, tokens: int, chunk_tokens: int, compiled: bool, on_gpu: bool = True
) -> int:
    """Norm, head and loss of a microbatch of `tokens`: normed states, their gradient, and one chunk's logits.

    Off a GPU a product of the head's size is made before it is added (`linear.add_product`).
    """
    chunk = min(chunk_tokens, tokens)
    per_logit = LOGIT_BYTES_COMPILED * weight_bytes if compiled else LOGIT_BYTES_EAGER + weight_bytes
    logits = chunk * shape.vocab_size * per_logit
    if not on_gpu:
        product = (shape.hidden_size + 2 * chunk) * shape.vocab_size * weight_bytes
        logits = max(logits, product)
    # An eager norm keeps the states in fp32, before and behind the division.
    normed = 2 * weight_bytes + (0 if compiled else 8 if weight_bytes == 2 else 4)
    return logits + (chunk * weight_bytes + tokens * normed) * shape.hidden_size


def embedding_bytes(weight_bytes: int, shape: ModelShape, *, tokens: int, on_gpu: bool = True) -> int:
    """The embedding's backward: a gradient of the whole matrix, and on a GPU fp32 sums by segment of equal tokens."""
    dense = shape.vocab_size * shape.hidden_size * weight_bytes
    segments = tokens // SEGMENT_TOKENS + min(tokens, shape.vocab_size) if on_gpu else 0
    return dense + segments * shape.hidden_size * 4
