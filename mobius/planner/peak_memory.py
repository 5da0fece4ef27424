"""Peak GPU memory of a rank within a step: activations saved for backward, messages, and one layer's work.

    rank 1 of 2 with stages 1, 3 and 5; stage 5 is the model's last:

    actions    F1 F1 F3 F3 | F5 B5 F5 B5 | B3 B3 B1 B1
    waiting    1  1  13 13 | 13  13      | 13 1  1          stages with saved activations; stage 5: of one microbatch

The peak is therefore in the model's last stage, with one microbatch or the slices of one sequence, or at the first
backward of another stage. Stages that offload their layers' inputs have the inputs of at most two microbatches on the
GPU, during a forward of three; in rounds of one or two microbatches, these inputs may belong to several stages.

The work is one layer's backward, head and loss, or the embedding's backward. Widths count tensors [tokens, width] of
the working format. A layer's widths follow from the tensors that its code saves and allocates (models/linear.py: the
gradients of all linear outputs exist until the layer's backward ends). H is the hidden width, I the feed-forward width.
A + Q is the width of all outputs and inputs of attention's four products (4 H in Llama):

                        graph                 peak: in the feed-forward part, or at the end
    compiled            A + Q + 3 H + 3 I     graph + 4 H + 3 I
    eager, bf16, fp16   A + Q + 9 H + 4 I     graph + 3 I,  A + Q + 18 H + 3 I     (norms in fp32)
    eager, fp32         A + Q + 6 H + 4 I     graph + 3 I,  A + Q + 12 H + 3 I

Eager widths are counted op by op on a CPU (tests/harness/live_bytes.py). Compiled widths agree with measurements on an
H200: the graph within 2 % (0.7 of all widths), the peak within 1 %. Both hold for Llama, Mistral and Qwen2. Norms on
queries and keys (Qwen3) make a graph 1.25 times as large, and Gemma 3's norms 1.8 times (eager, counted). On a GPU, a
layer is measured instead (layer_bench.py).

In a layer with experts, I is the sum of the widths of a token's K experts and a shared part, and A + Q includes the
router's outputs. Each of the K experts has a copy of its token's hidden states, and a result. So a graph has 2 K H
more, and a compiled peak another 2 K H. The eager peak is at least graph + 3 K H, in bf16 and fp16 graph + 7 K H, for
families with router weights in fp32 (Mixtral; Qwen3 rounds them). Eager widths are counted for Mixtral, within 3 %.

A forward that saves only its matrix products saves A + Q + 2 H + 2 I, and an eager forward A + Q + 3 H + 2 I. It saves
no results of norms, no input of the last product, and nothing in fp32. Backward recomputes these tensors, so the peak
is the same.

A layer in tiles of tokens (engine/tiles.py) has these widths for the tokens of one tile. For all tokens it has the
following widths; q is the width of queries, k the width of keys:

    after attention     q + 2 k, q + q, H and the tile      heads; attention's result and gradient; the input's gradient
    within attention    2 (q + 2 k), q + q, H               and, on GPUs, fp32 sums of the queries' gradients, q
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from mobius.limits import (
    KEYS_PER_CALL,
    NUM_PREPOSTED_RECEIVES,
    max_pending_offloads,
    max_prefetched,
)
from mobius.schedule.depth_first import waiting_microbatches
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import Plan, RecomputeLevel

LOGIT_BYTES_COMPILED = 2
"""Elements per logit in the compiled loss, in the working format: the logit and its gradient."""
LOGIT_BYTES_EAGER = 12
"""Bytes per logit of fp32 tensors in addition to the logits: log-softmax, its gradient and the logits' gradient."""
ROWS_PER_DOCUMENT = 128
"""Rows that the backward of variable-length attention adds to its fp32 sums for each document, as FlashAttention 2 does
(mha_varlen_bwd: total_q + 128 * batch)."""
QUANTIZED_BYTES, QUANTIZED_BYTES_EAGER = 1, 9
"""Bytes per element of a product's quantized input: one code; in eager layers also two fp32 values."""
SEGMENT_TOKENS = 10
"""Tokens per partial sum in torch's backward of an embedding on a GPU (EmbeddingBackwardKernel.cu)."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that one layer takes for one microbatch."""

    saved_activations: int
    """Bytes saved from forward to backward if nothing is recomputed; with the layer's output, without its input."""
    peak: int
    """Peak of this forward and its backward, with saved activations, without the input and the output's gradient."""
    recomputed: int | None = None
    """Peak of a backward that runs the forward again, in tiles if there are any; None if it equals `peak`."""
    saved_products: int | None = None
    """Bytes saved from forward to backward if only matrix products are saved; None if unknown."""
    products_peak: int | None = None
    """Peak of the backward from saved products; None if it equals `peak`."""

    def saved_for_backward(self, level: RecomputeLevel) -> int:
        """Bytes that a forward saves at `level`; if bytes of products are unknown, bytes of all activations."""
        if level is RecomputeLevel.NONE or self.saved_products is None:
            return self.saved_activations
        return self.saved_products

    def backward_work(self, level: RecomputeLevel) -> int:
        """Bytes that a backward allocates in addition to the activations that `level` saves."""
        peak = self.peak if level is RecomputeLevel.NONE else self.products_peak or self.peak
        return peak - self.saved_for_backward(level)

    @property
    def recomputed_peak(self) -> int:
        return self.peak if self.recomputed is None else self.recomputed


@dataclass(frozen=True)
class MicrobatchBytes:
    """Bytes that a microbatch takes."""

    activation: int
    """Bytes of a message, or of a layer's input: [B, L, H]."""
    layer: LayerBytes
    loss: int
    embedding: int
    attention: int = 0
    """Bytes of attention's result and log-sum-exp in a layer."""
    first_backward: int = 0
    """First layer of the model that has a backward; layers before it save nothing."""
    quantized: int = 0
    """Bytes of the copy of a slot's largest quantized matrix, needed when a loaded stage is first used."""


class LiveMemory(NamedTuple):
    """Bytes in use at one time of a step, without weights and optimizer state."""

    inputs: int = 0
    """Saved inputs of recomputed layers."""
    saved_activations: int = 0
    messages: int = 0
    """Messages received ahead, or in flight."""
    work: int = 0

    @property
    def total(self) -> int:
        return self.inputs + self.saved_activations + self.messages + self.work


def document_bytes(shape: ModelShape, num_documents: int) -> int:
    """Return the additional bytes that a layer's backward takes for packed rows.

    These bytes are fp32 sums of the queries' gradients [rows, heads, head size], and one fp32 number per row and head.
    """
    return 4 * ROWS_PER_DOCUMENT * num_documents * (shape.attention_width + (shape.num_heads or 0))


def estimate_layer(
    weight_bytes: int,
    shape: ModelShape,
    tokens: int,
    *,
    compiled: bool,
    num_documents: int = 0,
    tile_tokens: int | None = None,
    rows: int = 1,
    sliced_length: int | None = None,
) -> LayerBytes:
    """Estimate the largest layer by widths; `weight_bytes` are the bytes of an element in the working format.

    `num_documents` is the maximum number of documents that variable-length attention gets for a microbatch; 0 for the
    dense kernel: each row is one document. `tile_tokens` as in `engine.stage.StageModule`. With `sliced_length`, the
    tokens are slices of `rows` sequences of this length, and the slices run like tiles.
    """
    hidden, is_fp32 = shape.hidden_size, weight_bytes == 4
    tile, packed_sums, sliced = min(tile_tokens or tokens, tokens), document_bytes(shape, num_documents), 0
    if sliced_length is not None:
        sliced = slice_bytes(weight_bytes, shape, tokens, rows=rows, length=sliced_length)
    of_adapters = 0 if shape.trained is None else max(shape.trained.saved_widths, default=0)
    kinds = [LayerBytes(0, 0, saved_products=0)]
    for widths in map(shape.layer_widths, shape.layer_kinds):
        attention, inner, routed = widths.products, widths.feed_forward, 2 * widths.copies
        if compiled:
            graph = attention + 3 * hidden + 3 * inner + routed
            products = attention + 2 * hidden + 2 * inner + routed
            peak = graph + 4 * hidden + 3 * inner + routed
        else:
            norms = 3 if is_fp32 else 6
            graph = attention + (3 + norms) * hidden + 4 * inner + routed
            products = attention + 3 * hidden + 2 * inner + routed
            summed = (3 if is_fp32 else 7) * widths.copies
            peak = max(graph + 3 * inner, graph + summed, attention + (6 + 2 * norms) * hidden + 3 * inner)
        graph, peak = graph + of_adapters, peak + of_adapters
        if shape.quantized is not None:
            peak += shape.quantized.widest * (QUANTIZED_BYTES if compiled else QUANTIZED_BYTES_EAGER) // weight_bytes
        tiled = None
        if sliced or tokens > tile:
            after, within = _tiled_bytes(weight_bytes, shape, attention, compiled=compiled)
            tiled = max(after * tokens + peak * tile * weight_bytes, within * tokens + packed_sums + sliced)
        graph, products, peak = (each * tokens * weight_bytes for each in (graph, products, peak))
        kinds.append(LayerBytes(graph, peak + packed_sums, tiled, products))
    # Saved graphs are counted as if all layers were equal, so each number is the maximum of all kinds of layers.
    tiled_of_kinds = [kind.recomputed for kind in kinds if kind.recomputed is not None]
    return LayerBytes(
        max(kind.saved_activations for kind in kinds),
        max(kind.peak for kind in kinds),
        max(tiled_of_kinds, default=None),
        max(kind.saved_products or 0 for kind in kinds),
    )


def _tiled_bytes(weight_bytes: int, shape: ModelShape, attention: int, *, compiled: bool) -> tuple[int, int]:
    """Return bytes per token of a layer in tiles: while tiles run after attention, and in attention's backward.

    `attention` is A + Q. For two-byte formats, FlashAttention's backward adds up the queries' gradients in fp32.
    """
    queries = shape.attention_width
    heads = attention - queries  # q + 2 k, where A + Q is 2 q + 2 k
    after = (heads + 2 * queries + shape.hidden_size) * weight_bytes + 4 * (shape.num_heads or 0)
    sums = 4 * (queries + (shape.num_heads or 0)) if compiled and weight_bytes == 2 else 0
    return after, after + heads * weight_bytes + sums


def slice_bytes(weight_bytes: int, shape: ModelShape, tokens: int, *, rows: int, length: int) -> int:
    """Estimate the additional bytes that attention takes for a slice.

    `tokens` counts the tokens of all `rows`, `length` the tokens of one whole sequence. Results for parts of the keys
    and gradients of queries are merged in fp32: one fp32 tensor, and one part's tensor in the working format.
    FlashAttention computes the gradients of a part's keys and values for each query head before they are added.
    """
    keys = max(tokens, rows * min(length, KEYS_PER_CALL))
    return tokens * shape.attention_width * (4 + weight_bytes) + 2 * keys * shape.attention_width * weight_bytes


def loss_bytes(
    weight_bytes: int, shape: ModelShape, *, tokens: int, chunk_tokens: int, compiled: bool, on_gpu: bool
) -> int:
    """Return the bytes of norm, head and loss for `tokens`: normed states, their gradient, and one chunk's logits.

    On a CPU a product as large as the head is computed before it is added (`linear.ProductFormat`).
    """
    chunk = min(chunk_tokens, tokens)
    per_logit = LOGIT_BYTES_COMPILED * weight_bytes if compiled else LOGIT_BYTES_EAGER + weight_bytes
    logits = chunk * shape.vocab_size * per_logit
    if not on_gpu:
        product = (shape.hidden_size + 2 * chunk) * shape.vocab_size * weight_bytes
        logits = max(logits, product)
    # An eager norm also keeps the hidden states in fp32, before and after the division.
    normed = 2 * weight_bytes + (0 if compiled else 8 if weight_bytes == 2 else 4)
    return logits + (chunk * weight_bytes + tokens * normed) * shape.hidden_size


def embedding_bytes(weight_bytes: int, shape: ModelShape, *, tokens: int, on_gpu: bool) -> int:
    """Return the bytes of the embedding's backward: the whole gradient, and on GPUs also fp32 sums of segments."""
    dense = shape.vocab_size * shape.hidden_size * weight_bytes
    segments = tokens // SEGMENT_TOKENS + min(tokens, shape.vocab_size) if on_gpu else 0
    return dense + segments * shape.hidden_size * 4


def find_peak(plan: Plan, rank: int, size: MicrobatchBytes) -> LiveMemory:
    """Return the memory of `rank` at the peak of a step."""
    step = _RankStep(plan, rank, size)
    if plan.is_depth_first:
        return max(step.depth_first(), key=lambda held: held.total)
    return max((*step.offloading_forwards(), *step.last_stage(), *step.first_backwards()), key=lambda held: held.total)


class _StageBytes(NamedTuple):
    """Bytes of a microbatch in a stage; `saved` are (inputs, graphs), `products` do not include the inputs."""

    offloads: bool
    inputs: int
    saved: tuple[int, int]
    saves_graph: bool
    products: int
    copied: int
    work: int

    @property
    def stays(self) -> tuple[int, int]:
        """Bytes of (inputs, graphs) that the stage saves on the GPU."""
        return (0, 0) if self.offloads else self.saved


def _stage_bytes(plan: Plan, stage: int, size: MicrobatchBytes) -> _StageBytes:
    cut, layer, offloads = plan.cuts[stage], size.layer, stage in plan.offloaded_activation_stages
    has_layers, level = len(cut.layers) > 0, plan.level_of(stage)
    saves_graph = has_layers and stage in plan.saved_activation_stages
    number = num_backward = len(cut.backward_layers(size.first_backward))
    if cut.is_last and has_layers:
        number = max(number, 1)  # the model's last stage always saves its input
    inputs = number * (size.activation + size.attention * (stage in plan.saved_attention_stages))
    products = max(0, number * (layer.saved_for_backward(RecomputeLevel.ELEMENTWISE) - size.activation))
    saved = (size.activation, number * layer.saved_for_backward(level)) if saves_graph else (inputs, 0)
    work = layer.recomputed_peak
    if num_backward == 0:
        work = min(layer.saved_activations, layer.recomputed_peak) if has_layers else 0
    elif saves_graph:
        work = layer.backward_work(level)
    elif offloads and plan.num_offloaded_microbatches:
        work = max(layer.recomputed_peak, layer.backward_work(RecomputeLevel.ELEMENTWISE))
    copied = size.quantized if has_layers and stage not in plan.resident else 0
    return _StageBytes(offloads, inputs, saved, saves_graph, products, copied, max(copied, work))


class _RankStep:
    """One rank's step: its memory at each moment that may be the peak."""

    def __init__(self, plan: Plan, rank: int, size: MicrobatchBytes) -> None:
        self._plan, self._rank, self._size, self._stages = plan, rank, size, plan.local_stages(rank)
        self._per_round, self._max_sends = plan.microbatches_per_round, plan.max_sends_in_flight
        self._received = 0 if plan.num_ranks == 1 else NUM_PREPOSTED_RECEIVES * size.activation
        self._waiting = [stage for stage in self._stages if not plan.cuts[stage].is_last]
        """Stages that run forward on all microbatches of a round before their first backward."""
        self._bytes = {stage: _stage_bytes(plan, stage, size) for stage in self._stages}
        offloading = [each for each in self._bytes.values() if each.offloads]
        self._offloaded = max((each.inputs for each in offloading), default=0)
        """Layer inputs of one microbatch in the largest stage that offloads."""
        self._products = max((each.products for each in offloading), default=0)
        """Additional bytes that a microbatch offloads if its products are offloaded."""
        in_flight = max_prefetched(plan.copy_lookahead)
        self._in_flight = min(in_flight, len(offloading) * self._per_round) * self._offloaded
        self._in_flight += self._product_bytes(in_flight)
        """Bytes of inputs and products that are being copied to the host or back."""
        saved = [self._bytes[stage].stays for stage in self._waiting]
        self._held = [
            (self._per_round * inputs, self._per_round * graphs)
            for inputs, graphs in accumulate(saved, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0))
        ]
        """Entry n: bytes of (inputs, graphs) that the first n waiting stages save on the GPU in a round."""

    def offloading_forwards(self) -> Iterator[LiveMemory]:
        """Memory in the forward of each offloading stage, while earlier inputs are copied to the host."""
        most, num_offloading, layer = max_pending_offloads(self._plan.copy_lookahead) + 1, 0, self._size.layer
        # Upper bounds: a forward without a graph allocates less than one with a graph, and a tiled forward less than
        # a tiled backward.
        work = layer.saved_activations
        if not self._plan.num_offloaded_microbatches:
            work = min(work, layer.recomputed_peak)
        for number, stage in enumerate(self._waiting):
            if self._bytes[stage].offloads:
                num_offloading += 1
                leaving = min(most, num_offloading * self._per_round)
                inputs, graphs = self._held[number]
                inputs += leaving * self._offloaded + self._product_bytes(leaving)
                own = max(work, self._bytes[stage].copied)
                yield LiveMemory(inputs, graphs, self._messages(0, self._outputs(number + 1)), own)

    def last_stage(self) -> Iterator[LiveMemory]:
        """Memory in forward, loss and backward of the model's last stage.

        This stage runs all three for one microbatch at a time, or for the slices of one sequence.
        """
        stage, number = self._stages[-1], len(self._waiting)
        cut, message, (own, graphs) = self._plan.cuts[stage], self._size.activation, self._bytes[stage].saved
        if not cut.is_last:
            return
        inputs, held = self._held[number]
        graphs += held
        in_flight = self._in_flight
        if self._per_round == 1 and all(self._bytes[each].offloads for each in self._waiting[-1:]):
            # Only the last waiting stage's inputs are still being copied, and these belong to one microbatch.
            in_flight = min(in_flight, self._offloaded + self._product_bytes(1))
        output = 0 if self._bytes[stage].saves_graph else message  # a saved graph already contains the output
        # All slices run forward before the first backward. Each backward frees a slice's inputs and adds a gradient.
        for num_slices in {self._plan.num_slices, 1}:
            gradients = 0 if cut.is_first else self._per_round - num_slices
            messages, here = self._messages(gradients, self._outputs(number)), inputs + in_flight + num_slices * own
            yield LiveMemory(here, graphs, messages, output + self._size.loss)
            # The output and its gradient exist until the stage's backward ends.
            yield LiveMemory(here, graphs, messages, output + message + self._bytes[stage].work)
            if cut.is_first:
                yield LiveMemory(here - own, held, messages, 3 * message + self._size.embedding)

    def first_backwards(self) -> Iterator[LiveMemory]:
        """Memory at the first backward of each waiting stage."""
        has_last_stage = len(self._waiting) < len(self._stages)
        for number, stage in enumerate(self._waiting, start=1):
            inputs, graphs = self._held[number]
            inputs += self._in_flight
            is_first = number == len(self._waiting) and not has_last_stage
            messages = self._messages(0, self._outputs(number)) if is_first else self._messages(self._per_round)
            yield LiveMemory(inputs, graphs, messages, self._bytes[stage].work)
            if self._plan.cuts[stage].is_first:
                saved = self._bytes[stage].stays
                work = self._size.activation + self._size.embedding
                yield LiveMemory(inputs - saved[0], graphs - saved[1], messages, work)

    def depth_first(self) -> Iterator[LiveMemory]:
        """Memory in depth-first order: all saved activations, plus the largest work."""
        plan, message = self._plan, self._size.activation
        cuts = [plan.cuts[stage] for stage in self._stages]
        at_once = None if plan.spreads_head else plan.num_stages - 1
        own = [*self._bytes.values()]
        saved = [(0, 0) if stage == at_once else each.stays for stage, each in self._bytes.items()]
        work = max(each.work for each in own)
        messages, last = self._messages(self._per_round), LiveMemory()
        if cuts[0].is_first:
            work = max(work, message + self._size.embedding)
        if plan.spreads_head:  # hidden states exist until their gradient is computed
            work = max(work, message + self._size.loss)
        elif cuts[-1].is_last:  # one microbatch; the output and its gradient exist until the stage's backward ends
            output = 0 if own[-1].saves_graph else message
            last = LiveMemory(*own[-1].saved, messages, output + max(self._size.loss, message + work))
        of_inputs, of_graphs = zip(*saved, strict=True)
        waits = [each.offloads for each in own]

        def held(counts: Sequence[int]) -> tuple[int, int]:
            inputs = self._alternating_copies(sum(map(mul, counts, waits))) if any(waits) else 0
            return inputs + sum(map(mul, counts, of_inputs)), sum(map(mul, counts, of_graphs))

        inputs, graphs = max(map(held, waiting_microbatches(self._rank, plan)), key=sum)
        yield LiveMemory(inputs, graphs, messages, work)
        yield LiveMemory(inputs + last.inputs, graphs + last.saved_activations, last.messages, last.work)

    def _alternating_copies(self, number: int) -> int:
        """Bytes being copied to the host and back, while `number` microbatches of offloading stages wait.

        GPU tensors of the latest offloads stay allocated, even if copies of these tensors are already back on the GPU.
        """
        lookahead = self._plan.copy_lookahead
        leaving, back = max_pending_offloads(lookahead) + 1, min(max_prefetched(lookahead), number)
        return (leaving + back) * self._offloaded + self._product_bytes(leaving) + self._product_bytes(back)

    def _product_bytes(self, number: int) -> int:
        """Bytes of offloaded products in `number` consecutive microbatches; offloads are evenly spaced."""
        return -(-number * self._plan.num_offloaded_microbatches // self._per_round) * self._products

    def _outputs(self, num_stages: int) -> int:
        """Number of outputs in flight from the first `num_stages` waiting stages, without outputs in saved graphs."""
        in_graphs = self._per_round if num_stages and self._bytes[self._waiting[num_stages - 1]].saves_graph else 0
        return max(0, min(self._per_round * num_stages, self._max_sends) - in_graphs)

    def _messages(self, gradients: int, outputs: int | None = None) -> int:
        """Bytes of messages received ahead and in flight; on a single rank, of gradients between its stages.

        `outputs` is the number of outputs sent before the gradients; None: as many as can be in flight.
        """
        outputs = self._max_sends if outputs is None else outputs
        number = gradients if self._plan.num_ranks == 1 else min(self._max_sends, gradients + outputs)
        return self._received + number * self._size.activation
