"""When a rank's GPU holds most, and what: activations that wait for backward, messages, and the work of that moment.

    rank 1 of 2, stages 1, 3 and 5, the last of them the model's own:

    forward    F1 F1 F3 F3 | F5 B5 F5 B5 | B3 B3 B1 B1      stages that wait at each moment
    waiting    1  1  13 13 | 13  13      | 13 1  1          the model's last stage keeps one microbatch only

So the most is held at the turn of the model's last stage, of one microbatch or of the slices of one sequence, or when a
stage begins its backward; it is looked for there.

Inputs of a stashed stage's layers wait on the host. Of those, two microbatches are on the GPU at most, leaving or come
back, and a third while a forward makes it. In rounds of one or two these are of several stages.

The work of a moment is one layer's backward, head and loss, or the embedding's backward. Widths count tensors
[tokens, width] of the working format. A layer by what its code keeps and makes (models/linear.py: the gradients of all
linear outputs live until its backward ends), H hidden, I feed-forward, A + Q what the attention's four products have
for output and input (4 H in Llama):

                        graph                 peak: in the feed-forward part, or at the end
    compiled            A + Q + 3 H + 3 I     graph + 4 H + 3 I
    eager, bf16, fp16   A + Q + 9 H + 4 I     graph + 3 I,  A + Q + 18 H + 3 I     (norms in fp32)
    eager, fp32         A + Q + 6 H + 4 I     graph + 3 I,  A + Q + 12 H + 3 I

The eager ones are counted, op by op, on a CPU (tests/harness/live_bytes.py); of the compiled ones the graph is within
2 % of the 0.7 of all widths that was measured on an H200, the peak within 1 % of what was measured there. They hold
for Llama, Mistral and Qwen2; norms on queries and keys (Qwen3) make a graph 1.25 times as large, Gemma 3's 1.8 times
(eager, counted). Where a GPU is at hand, a layer is measured instead (engine/stage.py).

In a layer with experts I is the sum over a token's K experts and a shared part, and A + Q has the router's outputs in
it. Each of the K has a copy of its token's hidden states and a result: 2 K H more of a graph, and of the peak when it
is compiled again as much. The eager peak is graph + 3 K H at least, in bf16 and fp16 graph + 7 K H, where a family has
its router's shares in fp32 (Mixtral; Qwen3 rounds them). The eager ones are counted for Mixtral, within 3 %.

A forward that keeps its products alone holds A + Q + 2 H + 2 I, eager A + Q + 3 H + 2 I: no norm's result, not what the
last product takes, nothing in fp32. Its backward makes them again, and so has the same peak.

A layer in tiles of tokens (engine/tiles.py) has those widths for a tile's tokens. Of all tokens it has, q and k being
the widths of queries and of keys,

    behind attention    q + 2 k, q + q, H and the tile      heads; attention's result and its gradient; of the input
    within attention    2 (q + 2 k), q + q, H               and on GPUs fp32 sums of the queries' gradients, q
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from mobius.limits import (
    KEYS_PER_CALL,
    NUM_PREPOSTED_RECEIVES,
    max_pending_offloads,
    max_prefetched,
    max_sends_in_flight,
)
from mobius.schedule.partition import LayerWidths, ModelShape
from mobius.schedule.plan import Plan, RecomputeLevel

LOGIT_BYTES_COMPILED = 2
"""Two tensors that the compiled loss makes per logit, logits and their gradient: times the working format."""
LOGIT_BYTES_EAGER = 12
"""fp32 beside the logits: their logarithmic softmax, its gradient and theirs."""
ROWS_PER_DOCUMENT = 128
"""Rows that the backward of variable-length attention adds to its fp32 sums for each document, as FlashAttention 2 does
(mha_varlen_bwd: total_q + 128 * batch)."""
SEGMENT_TOKENS = 10
"""Tokens per partial sum in torch's backward of an embedding on a GPU (EmbeddingBackwardKernel.cu)."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that one layer takes for one microbatch."""

    saved_activations: int
    """Held from a forward that keeps its graph to its backward: the output in it, the input not."""
    peak: int
    """Most that exists in forward with graph and backward together, the graph in it; input and incoming gradient not.
    """
    recomputed: int | None = None
    """As `peak`, of a layer whose backward runs its forward again, in tiles if there are any; None: as `peak`."""

    saved_products: int | None = None
    """As `saved_activations`, of a forward that keeps its products alone; None where that is not known."""

    def saved_for_backward(self, level: RecomputeLevel) -> int:
        """Held by a forward that keeps what `level` says; everything where products alone are not known."""
        return (
            self.saved_activations
            if level is RecomputeLevel.NONE or self.saved_products is None
            else self.saved_products
        )

    @property
    def recomputed_peak(self) -> int:
        return self.peak if self.recomputed is None else self.recomputed


@dataclass(frozen=True)
class MicrobatchBytes:
    """Bytes that a microbatch takes."""

    activation: int
    """A message, or a layer's input: [B, L, H]."""
    layer: LayerBytes
    loss: int
    embedding: int
    attention: int = 0
    """Attention's result and log-sum-exp of a layer."""
    first_backward: int = 0
    """The first layer of the model that has a backward; those before it keep nothing."""


@dataclass(frozen=True)
class LiveMemory:
    """Bytes at one moment, beside weights and optimizer."""

    inputs: int = 0
    """Bytes that layers keep for recomputing."""
    saved_activations: int = 0
    """Kept activations."""
    messages: int = 0
    """Received ahead, and sent but not yet let go."""
    work: int = 0

    @property
    def total(self) -> int:
        return self.inputs + self.saved_activations + self.messages + self.work


def document_bytes(shape: ModelShape, num_documents: int) -> int:
    """Bytes that a layer's backward takes for packed rows beside those for rows of one document.

    They are sums of the queries' gradients [rows, heads, head size] and of a number per row and head, in fp32.
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
    """The layer that takes most, by widths; `weight_bytes` per element of the working format.

    `num_documents` is the fixed number that variable-length attention is told of for a microbatch; 0: rows are one
    document each, in the dense kernel. `tile_tokens` as in `runtime.stage.StageModule`. `sliced_length`: the tokens are
    slices of so many `rows` of that length each, run like tiles, in one if they are not cut further.
    """
    sliced = 0
    if sliced_length is not None:
        sliced = slice_bytes(weight_bytes, shape, tokens, rows=rows, length=sliced_length)
    kinds = [
        _layer_bytes(
            weight_bytes,
            shape,
            shape.layer_widths(layer),
            tokens,
            compiled=compiled,
            beside=document_bytes(shape, num_documents),
            tile_tokens=min(tile_tokens or tokens, tokens),
            sliced=sliced,
        )
        for layer in shape.layer_kinds
    ]
    # Kept graphs are counted as of equal layers, so each number is the largest of any layer's.
    tiled = [kind.recomputed for kind in kinds if kind.recomputed is not None]
    return LayerBytes(
        max((kind.saved_activations for kind in kinds), default=0),
        max((kind.peak for kind in kinds), default=0),
        max(tiled) if tiled else None,
        max((kind.saved_products or 0 for kind in kinds), default=0),
    )


def _layer_bytes(
    weight_bytes: int,
    shape: ModelShape,
    widths: LayerWidths,
    tokens: int,
    *,
    compiled: bool,
    beside: int,
    tile_tokens: int,
    sliced: int,
) -> LayerBytes:
    """`beside` is what attention takes of its own, `sliced` that of a slice; 0 where tokens are no slices."""
    hidden, attention, inner = shape.hidden_size, widths.products, widths.feed_forward
    routed = 2 * widths.copies
    if compiled:
        graph = attention + 3 * hidden + 3 * inner + routed
        products = attention + 2 * hidden + 2 * inner + routed
        peak = graph + 4 * hidden + 3 * inner + routed
    else:
        norms = 3 if weight_bytes == 4 else 6
        graph = attention + (3 + norms) * hidden + 4 * inner + routed
        products = attention + 3 * hidden + 2 * inner + routed
        summed = (3 if weight_bytes == 4 else 7) * widths.copies
        peak = max(graph + 3 * inner, graph + summed, attention + (6 + 2 * norms) * hidden + 3 * inner)
    tiled = None
    if sliced or tokens > tile_tokens:
        behind, within = _tiled_bytes(weight_bytes, shape, attention, compiled=compiled)
        tiled = max(behind * tokens + peak * tile_tokens * weight_bytes, within * tokens + beside + sliced)
    graph, products, peak = (each * tokens * weight_bytes for each in (graph, products, peak))
    return LayerBytes(graph, peak + beside, tiled, products)


def _tiled_bytes(weight_bytes: int, shape: ModelShape, attention: int, *, compiled: bool) -> tuple[int, int]:
    """Bytes for each of all tokens of a layer in tiles: while they run behind attention, and within its backward.

    `attention` is A + Q. FlashAttention's backward adds up the queries' gradients in fp32 for formats of two bytes.
    """
    queries = shape.attention_width
    heads = attention - queries  # q + 2 k, where A + Q is 2 q + 2 k
    kept = (heads + 2 * queries + shape.hidden_size) * weight_bytes + 4 * (shape.num_heads or 0)
    sums = 4 * (queries + (shape.num_heads or 0)) if compiled and weight_bytes == 2 else 0
    return kept, kept + heads * weight_bytes + sums


def slice_bytes(weight_bytes: int, shape: ModelShape, tokens: int, *, rows: int, length: int) -> int:
    """Bytes that attention of a slice of `tokens` takes beside that of a whole sequence as long; an estimate.

    `tokens` are those of all `rows`, `length` those of a sequence. What attention gives for parts of the keys is merged
    in fp32, and so are gradients of queries: once that width in fp32, and a part's own. A part's gradients of keys and
    values are made before they are added, for each query head where FlashAttention runs.
    """
    keys = max(tokens, rows * min(length, KEYS_PER_CALL))
    return tokens * shape.attention_width * (4 + weight_bytes) + 2 * keys * shape.attention_width * weight_bytes


def loss_bytes(
    weight_bytes: int, shape: ModelShape, *, tokens: int, chunk_tokens: int, compiled: bool, on_gpu: bool
) -> int:
    """Norm, head and loss of a microbatch of `tokens`: normed states, their gradient, and one chunk's logits.

    On a CPU a product of the head's size is made before it is added (`linear.add_linear_weight_gradient`).
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


def embedding_bytes(weight_bytes: int, shape: ModelShape, *, tokens: int, on_gpu: bool) -> int:
    """The embedding's backward: a gradient of the whole matrix, and on a GPU fp32 sums by segment of equal tokens."""
    dense = shape.vocab_size * shape.hidden_size * weight_bytes
    segments = tokens // SEGMENT_TOKENS + min(tokens, shape.vocab_size) if on_gpu else 0
    return dense + segments * shape.hidden_size * 4


def find_peak(plan: Plan, rank: int, size: MicrobatchBytes) -> LiveMemory:
    """The moment of a step at which `rank` holds most."""
    return max(_Rank(plan, rank, size).moments(), key=lambda held: held.total)


class _Rank:
    """One rank's step."""

    def __init__(self, plan: Plan, rank: int, size: MicrobatchBytes) -> None:
        self._plan, self._stages, self._size = plan, plan.local_stages(rank), size
        self._max_sends = max_sends_in_flight(plan.microbatches_per_round)
        inputs = [self._inputs(stage) for stage in self._stages if stage in plan.offloaded_activation_stages]
        self._most_inputs = max(inputs, default=0)
        """Bytes of what a stashed stage's layers keep of a microbatch."""
        layers = max(
            (self._num_kept(stage) for stage in self._stages if stage in plan.offloaded_activation_stages), default=0
        )
        self._more = max(0, layers * (size.layer.saved_for_backward(RecomputeLevel.ELEMENTWISE) - size.activation))
        """Further bytes of one of which products leave."""
        self._under_way = (
            min(max_prefetched(plan.copy_lookahead), len(inputs) * plan.microbatches_per_round) * self._most_inputs
        )
        self._under_way += self._more * self._most_whole(max_prefetched(plan.copy_lookahead))
        """Bytes of what leaves or has come back; while the model's last stage turns, it need not all be there."""
        self._graph = size.layer.saved_for_backward(plan.recompute_level)
        self._waiting = [stage for stage in self._stages if not plan.cuts[stage].is_last]
        """Stages whose microbatches all go forward before the first comes back."""
        self._leaves = [index for index, stage in enumerate(self._waiting) if stage in plan.offloaded_activation_stages]
        """Which of them send their inputs home."""
        each = [(0, 0) if stage in plan.offloaded_activation_stages else self._kept(stage) for stage in self._waiting]
        self._inputs_of = [
            plan.microbatches_per_round * total for total in accumulate((own for own, _ in each), initial=0)
        ]
        """Inputs of a round that the first so many of these keep here."""
        self._graphs_of = [
            plan.microbatches_per_round * total for total in accumulate((own for _, own in each), initial=0)
        ]
        """Graphs, alike."""
        self._ahead = 0 if plan.num_ranks == 1 else NUM_PREPOSTED_RECEIVES * size.activation

    def moments(self) -> Iterator[LiveMemory]:
        """Moments at which most may be held: turns of the model's last stage, and each stage's first backward."""
        for number in self._leaves:
            yield self._leaving(number)
        turns = len(self._waiting) < len(self._stages)
        if turns:
            yield from self._turn(self._stages[-1])
        for number in range(1, len(self._waiting) + 1):
            yield from self._backward(number, is_first_backward=number == len(self._waiting) and not turns)

    def _leaving(self, num_before: int) -> LiveMemory:
        """The forward of a stashed stage behind so many, while inputs of the microbatches before leave."""
        stayed, kept = self._inputs_of[num_before], self._graphs_of[num_before]
        most = max_pending_offloads(self._plan.copy_lookahead) + 1
        number = min(most, self._plan.microbatches_per_round)
        # The stages before may still leave, which may be larger.
        end = bisect_right(self._leaves, num_before)
        near = [self._waiting[index] for index in self._leaves[max(0, end - most - 1) : end]]
        inputs = [self._inputs(each) for each in near for _ in range(number)]
        ends = range(len(inputs) - number + 1, len(inputs) + 1)
        own = max(sum(inputs[max(0, end - most) : end]) for end in ends)
        own += self._more * self._most_whole(min(most, len(inputs)))
        messages = self._ahead + self._sent(0, self._outputs(num_before + 1))
        # A forward without a graph makes less than one with it, and in tiles less than backward does in them.
        layer = self._size.layer
        work = (
            layer.saved_activations
            if self._plan.num_offloaded_microbatches
            else min(layer.saved_activations, layer.recomputed_peak)
        )
        return LiveMemory(stayed + own, kept, messages, work)

    def _most_whole(self, number: int) -> int:
        """Microbatches whose products go home among so many that follow one another; stages begin anew."""
        size = self._plan.microbatches_per_round
        if self._plan.num_offloaded_microbatches == 0 or self._more == 0:
            return 0
        whole = [self._plan.offloads_products(m) for m in range(size + number)]
        return max(sum(whole[first : first + number]) for first in range(size))

    def _turn(self, stage: int) -> Iterator[LiveMemory]:
        """Forward, loss and backward of the model's last stage, of one microbatch or of the slices of one sequence."""
        size, per_message, number = self._size, self._size.activation, len(self._waiting)
        inputs, graphs = self._kept(stage)
        stayed, kept = self._inputs_of[number], self._graphs_of[number]
        # A single microbatch turns when all that left has gone, and the stage before is back, if that was stashed.
        is_back = self._plan.microbatches_per_round == 1 and self._plan.offloaded_activation_stages.issuperset(
            self._waiting[-1:]
        )
        one = self._most_inputs + self._more * self._most_whole(1)
        stayed += min(self._under_way, one) if is_back else self._under_way
        is_only = self._plan.cuts[stage].is_first
        output = 0 if self._keeps(stage) else per_message  # a graph has its output in it
        # All slices have gone forward before the first comes back; each then leaves a gradient in its inputs' stead.
        for own in sorted({self._plan.num_slices, 1}):
            gradients = 0 if is_only else self._plan.microbatches_per_round - own
            messages = self._ahead + self._sent(gradients, self._outputs(number))
            here = stayed + own * inputs
            yield LiveMemory(here, kept + graphs, messages, output + size.loss)
            # The output and its gradient stay until the backward of the stage is done.
            yield LiveMemory(here, kept + graphs, messages, output + per_message + self._layer_work(stage))
            if is_only:
                yield LiveMemory(here - inputs, kept, messages, 3 * per_message + size.embedding)

    def _backward(self, number: int, *, is_first_backward: bool) -> Iterator[LiveMemory]:
        """The first microbatch's backward of a stage, the last of the first so many that are waiting."""
        stage, stayed, kept = self._waiting[number - 1], self._inputs_of[number], self._graphs_of[number]
        stayed += self._under_way
        if is_first_backward:
            sent = self._sent(0, self._outputs(number))
        else:
            sent = self._sent(self._plan.microbatches_per_round, self._max_sends)
        messages = self._ahead + sent
        yield LiveMemory(stayed, kept, messages, self._layer_work(stage))
        if self._plan.cuts[stage].is_first:
            inputs, graphs = self._kept(stage)
            inputs = 0 if stage in self._plan.offloaded_activation_stages else inputs
            yield LiveMemory(stayed - inputs, kept - graphs, messages, self._size.activation + self._size.embedding)

    def _keeps(self, stage: int) -> bool:
        return stage in self._plan.saved_activation_stages and len(self._plan.cuts[stage].layers) > 0

    def _kept(self, stage: int) -> tuple[int, int]:
        """Inputs and graphs of a stage and a microbatch."""
        if self._keeps(stage):
            return self._size.activation, self._num_kept(stage) * self._graph
        return self._inputs(stage), 0

    def _inputs(self, stage: int) -> int:
        """Bytes that the layers of a stage keep of a microbatch to be recomputed."""
        attention = self._size.attention if stage in self._plan.saved_attention_stages else 0
        return self._num_kept(stage) * (self._size.activation + attention)

    def _num_kept(self, stage: int) -> int:
        """Layers of a stage that keep something for backward; the model's last stage keeps its input in any case."""
        cut = self._plan.cuts[stage]
        number = len(cut.backward_layers(self._size.first_backward))
        return max(number, 1) if cut.is_last and cut.layers else number

    def _layer_work(self, stage: int) -> int:
        """A layer's backward, without what is kept, or forward, if there is no other."""
        layer, cut = self._size.layer, self._plan.cuts[stage]
        if not cut.backward_layers(self._size.first_backward):
            return min(layer.saved_activations, layer.recomputed_peak) if cut.layers else 0
        if stage in self._plan.offloaded_activation_stages and self._plan.num_offloaded_microbatches:
            return max(layer.recomputed_peak, layer.peak - layer.saved_for_backward(RecomputeLevel.ELEMENTWISE))
        return layer.peak - self._graph if self._keeps(stage) else layer.recomputed_peak

    def _outputs(self, num_stages: int) -> int:
        """Outputs of the first so many waiting stages among the last messages that take memory of their own.

        A kept graph has its output in it.
        """
        number = self._plan.microbatches_per_round
        in_graphs = number if num_stages and self._keeps(self._waiting[num_stages - 1]) else 0
        return max(0, min(number * num_stages, self._max_sends) - in_graphs)

    def _sent(self, gradients: int, outputs: int) -> int:
        """Bytes of messages: gradients, and outputs before them; one rank alone hands its gradients over itself."""
        number = gradients if self._plan.num_ranks == 1 else min(self._max_sends, gradients + outputs)
        return number * self._size.activation
