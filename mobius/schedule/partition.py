"""The sizes of a model, and how its layers are cut into stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from operator import itemgetter

from mobius.errors import PlanError

OUTER_STAGES = 2
"""The embedding and the head can be stages of their own."""
LARGER_STAGE_PAYS = 0.98
"""Maximum ratio of a pipeline's work with a layer more in the largest stage, so that it is worth its GPU memory."""
IMPOSSIBLE: tuple[float, float, float, tuple[int, ...]] = (math.inf, math.inf, math.inf, ())
"""Result of `_best_sizes` where there is no cut."""


@dataclass(frozen=True)
class TrainedParameters:
    """Numbers of trained parameters of a model with frozen ones."""

    embedding: int
    layers: tuple[int, ...]
    head: int
    """Norm's and head's together."""
    is_on_gpu: bool
    """Whether trained parameters are always on the GPU, as adapters are, even in streamed stages."""
    rank: int = 0
    """Rank of the adapters of linear layers; 0: there are none."""


@dataclass(frozen=True)
class Experts:
    """Number of experts in a model's layers: all are stored, and each token goes through a few of them."""

    number: int
    """Experts of a layer."""
    num_experts_per_token: int
    """Experts that a token goes through."""
    layers: tuple[int, ...]
    """Parameters of all experts of every layer, 0 for a layer without any."""
    shared_width: int = 0
    """Feed-forward width, in elements per token, of the shared part that all tokens go through."""
    trained: tuple[int, ...] | None = None
    """Trained parameters among `layers`; None: all of them."""

    def num_idle(self, parameters: int) -> int:
        """How many of a layer's expert `parameters` compute nothing for a token."""
        return parameters * (self.number - self.num_experts_per_token) // self.number


@dataclass(frozen=True)
class QuantizedWeights:
    """Matrices of a model's layers whose products are in eight bits."""

    matmul_dtype: str
    """Their format, in the words of --matmul_dtype."""
    layers: tuple[int, ...]
    """Weights of every layer's."""
    scales: tuple[int, ...]
    """Rows and columns of every layer's, each of which has a scale; products quantize as many elements per token."""
    largest: int
    """Weights of the largest one."""
    widest: int
    """Elements of their longest row or column."""


@dataclass(frozen=True)
class LayerWidths:
    """Elements per token that a layer computes, in addition to hidden states that exist once."""

    products: int
    """Inputs and outputs of all products but the feed-forward's: in Llama 4 H, in a layer with experts the router's
    and a shared part's, too."""
    feed_forward: int
    """Width of the feed-forward part, its experts' added up."""
    copies: int
    """Hidden states of a token for its experts, one for each, and as many results."""


@dataclass(frozen=True)
class ModelShape:
    """Parameter counts and dimensions of one causal language model."""

    embedding_parameters: int
    """Parameters of the token embedding."""
    layer_parameters: tuple[int, ...]
    """Parameters of every decoder layer, in order."""
    head_parameters: int
    """Parameters of the final norm and of the head, the head counted also where it is tied to the embedding."""
    hidden_size: int
    intermediate_size: int
    """Width of the widest feed-forward activation, in elements per token."""
    vocab_size: int
    is_tied: bool
    """Whether the head and the embedding share one matrix (then it is counted twice above)."""
    num_heads: int | None = None
    """Query heads of a layer; None: not known."""
    head_size: int | None = None
    """Width of a head; None: not known, all heads together are then taken to be `hidden_size` wide."""
    num_key_heads: int | None = None
    """Heads of keys and of values of a layer; None: not known, as many as queries."""
    is_sliceable: bool = False
    """Whether attention of a sequence can be computed slice by slice (`models/slice_attention.py`)."""
    is_tileable: bool = True
    """Whether recomputed layers can run tile by tile, all but their attention."""
    trained: TrainedParameters | None = None
    """None: all are trained."""
    experts: Experts | None = None
    """None: every parameter computes for every token."""
    quantized: QuantizedWeights | None = None
    """None: products are in the format of weights and activations."""

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        if self.num_heads is None or self.head_size is None:
            return self.hidden_size
        return self.num_heads * self.head_size

    @property
    def key_width(self) -> int:
        """Width of all key heads together, which is that of values, too."""
        if self.num_key_heads is None or self.num_heads is None:
            return self.attention_width
        return self.attention_width // self.num_heads * self.num_key_heads

    @property
    def num_layers(self) -> int:
        return len(self.layer_parameters)

    @property
    def num_parameters(self) -> int:
        """All parameters, shared ones counted once."""
        return self.embedding_parameters + sum(self.layer_parameters) + self.head_parameters - self._shared

    @property
    def num_trained(self) -> int:
        """Parameters that are trained, shared ones counted once."""
        if self.trained is None:
            return self.num_parameters
        shared = self._shared if self.trained.embedding else 0
        return self.trained.embedding + sum(self.trained.layers) + self.trained.head - shared

    @property
    def num_trained_in_head(self) -> int:
        """The trained parameters of norm and head."""
        return self.head_parameters if self.trained is None else self.trained.head

    @property
    def num_active(self) -> int:
        """Number of parameters that are active for a token, shared ones counted once: without unselected experts."""
        return self.num_parameters - sum(self.layer_parameters) + sum(self.active_parameters)

    @cached_property
    def active_parameters(self) -> tuple[int, ...]:
        """Parameters of every layer that compute for a token."""
        if self.experts is None:
            return self.layer_parameters
        return self._without_idle(self.experts, self.layer_parameters, self.experts.layers)

    @cached_property
    def active_trained(self) -> tuple[int, ...]:
        """The trained parameters among them."""
        if self.trained is None or self.experts is None:
            return self.active_parameters if self.trained is None else self.trained.layers
        routed = self.experts.layers if self.experts.trained is None else self.experts.trained
        return self._without_idle(self.experts, self.trained.layers, routed)

    @cached_property
    def _known_sizes(self) -> dict[tuple[object, ...], tuple[int, int, int]]:
        return {}

    def sizes_of(self, cut: StageCut) -> tuple[int, int, int]:
        """Parameters of a stage, those among them that are trained, and those of the latter that are in layers."""
        key = cut.first_layer, cut.end_layer, cut.is_first, cut.is_last
        if key not in self._known_sizes:
            self._known_sizes[key] = cut.num_parameters(self), cut.num_trained(self), cut.num_trained_in_layers(self)
        return self._known_sizes[key]

    @staticmethod
    def _without_idle(experts: Experts, counts: Sequence[int], routed: Sequence[int]) -> tuple[int, ...]:
        return tuple(count - experts.num_idle(own) for count, own in zip(counts, routed, strict=True))

    def layer_widths(self, layer: int) -> LayerWidths:
        """Widths of a layer by its parameters: each row or column of a matrix [width, H] is an element per token."""
        hidden, own = self.hidden_size, self.layer_parameters[layer]
        if self.experts is None or self.experts.layers[layer] == 0:
            inner = self.intermediate_size
            return LayerWidths(max(0, own - 3 * hidden * inner) // hidden, inner, 0)
        experts, shared = self.experts, self.experts.shared_width
        routed = experts.layers[layer] // (3 * hidden * experts.number) * experts.num_experts_per_token
        others = max(0, own - experts.layers[layer] - 3 * hidden * shared) // hidden
        return LayerWidths(others, routed + shared, experts.num_experts_per_token * hidden)

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """The first layer of each kind: layers with equal numbers of parameters, all and active ones, are one."""
        return tuple(self.kind_of_layer.index(kind) for kind in range(1 + max(self.kind_of_layer, default=-1)))

    @cached_property
    def kind_of_layer(self) -> tuple[int, ...]:
        """Index into `layer_kinds` for every layer."""
        counts = list(zip(self.layer_parameters, self.active_parameters, strict=True))
        unique = list(dict.fromkeys(counts))
        return tuple(map(unique.index, counts))

    def describe(self) -> str:
        """Text of the number of parameters and, if they differ, of active and trained ones."""
        parts = [] if self.experts is None else [f"{self.num_active:.3g} are active for a token"]
        parts += [] if self.trained is None else [f"{self.num_trained:.3g} are trained"]
        text = f"{self.num_parameters:.3g} parameters"
        return f"{text}, of which {' and '.join(parts)}" if parts else text

    @property
    def _shared(self) -> int:
        return self.vocab_size * self.hidden_size if self.is_tied else 0

    @property
    def keeps_trained_on_gpu(self) -> bool:
        """Whether all trained parameters are always on the GPU."""
        return self.trained is not None and self.trained.is_on_gpu

    @property
    def first_backward(self) -> int:
        """The first layer that has a backward: nothing is trained before it."""
        if self.trained is None or self.trained.embedding:
            return 0
        return next((index for index, count in enumerate(self.trained.layers) if count), self.num_layers)

    @property
    def product_operations(self) -> int:
        """Floating-point operations of a token in forward and backward: 2 per parameter for each of three products.

        The products are forward, input gradients (if an earlier parameter is trained) and weight gradients (of trained
        parameters). The embedding and unselected experts do not count.
        """
        forward = sum(self.active_parameters) + self.head_parameters
        if self.trained is None:
            return 6 * forward
        back = sum(self.active_parameters[self.first_backward :]) + self.head_parameters
        return 2 * (forward + back + sum(self.active_trained) + self.trained.head)


@dataclass(frozen=True)
class StageCut:
    """The layers `[first_layer, end_layer)` of a stage; the first stage also has the embedding, the last the head."""

    stage: int
    first_layer: int
    end_layer: int
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    def backward_layers(self, first: int) -> range:
        """Layers among them that have a backward, where none before layer `first` of the model has one."""
        return range(max(self.first_layer, first), max(self.end_layer, first))

    def num_parameters(self, shape: ModelShape) -> int:
        """Parameters that this stage holds, a tied head counted where it is used."""
        return self._sum(shape.embedding_parameters, shape.layer_parameters, shape.head_parameters)

    def num_trained(self, shape: ModelShape) -> int:
        """The parameters among them that are trained."""
        own = shape.trained
        return self.num_parameters(shape) if own is None else self._sum(own.embedding, own.layers, own.head)

    def num_trained_in_layers(self, shape: ModelShape) -> int:
        """The trained parameters of this stage's layers."""
        return sum(
            (shape.layer_parameters if shape.trained is None else shape.trained.layers)[
                self.layers.start : self.layers.stop
            ]
        )

    def num_active(self, shape: ModelShape) -> int:
        """The parameters of this stage that compute for a token."""
        return self._sum(shape.embedding_parameters, shape.active_parameters, shape.head_parameters)

    def num_streamed_parameters(self, shape: ModelShape) -> int:
        """The parameters among them that are loaded if the stage is streamed."""
        return self.num_parameters(shape) - (self.num_trained(shape) if shape.keeps_trained_on_gpu else 0)

    def num_quantized(self, shape: ModelShape) -> int:
        """Weights of this stage whose products are in eight bits."""
        return 0 if shape.quantized is None else sum(shape.quantized.layers[self.first_layer : self.end_layer])

    def num_scales(self, shape: ModelShape) -> int:
        """Scales of these weights."""
        return 0 if shape.quantized is None else sum(shape.quantized.scales[self.first_layer : self.end_layer])

    def _sum(self, embedding: int, layers: Sequence[int], head: int) -> int:
        own = sum(layers[self.first_layer : self.end_layer])
        return own + (embedding if self.is_first else 0) + (head if self.is_last else 0)


def max_stages(num_layers: int, num_ranks: int) -> int:
    """The largest number of stages: a layer in each, embedding and head apart, filled up to a multiple of the ranks."""
    return -(-(num_layers + OUTER_STAGES) // num_ranks) * num_ranks


@lru_cache(maxsize=1024)  # called for every change of a request
def cut_model(
    shape: ModelShape, num_stages: int, *, num_ranks: int = 1, attention_length: float = 0, spreads_head: bool = False
) -> tuple[StageCut, ...]:
    """Cut a model into stages so that a step on `num_ranks` ranks takes the least time.

    A stage has a layer at least, but for the last one, which may have the head alone.

    The work of a layer is its active parameters, that of the head its parameters: a product takes two operations for
    each parameter and token. Causal attention over `attention_length` tokens takes as many as that number of parameters
    for each element of its width; the embedding takes none. Stages larger than those of an even cut take more GPU
    memory: for each layer more, the work must be less by 2 %, also if layers recompute, which makes theirs 4/3 of this.
    Layers with experts take too much for that.

    With more stages than layers, the head gets its own stage, then the embedding; further stages, up to a multiple of
    `num_ranks`, follow the embedding and only pass messages on. The step's first stage is then ready sooner, and its
    first gradients leave sooner. A head that ranks share (`spreads_head`) is no work of the last stage, which then has
    layers, too. Raises PlanError for too many stages.
    """
    num_layers, most = shape.num_layers, max_stages(shape.num_layers, num_ranks)
    if num_stages > most:
        refusal = PlanError(
            f"--num_stages {num_stages} is more than the model can be cut into: {num_layers} layers, the embedding and "
            f"the head make {most} stages on {num_ranks} rank(s). Use --num_stages {most} or less."
        )
        refusal.advice = (f"--num_stages {most}",)
        raise refusal
    if num_stages > num_layers:
        own_stage = [] if spreads_head else [0]
        return partition_of([*[0] * (num_stages - num_layers - len(own_stage)), *[1] * num_layers, *own_stage])
    attention = int(attention_length * shape.attention_width)
    work = tuple(own + attention for own in shape.active_parameters)
    head, most = 0 if spreads_head else shape.head_parameters, -(-num_layers // num_stages)

    def best(head_work: int, most: int) -> tuple[float, float, float, tuple[int, ...]]:
        limit = max(sum(work[first : first + most]) for first in range(num_layers))
        return _best_sizes(work, head_work, num_stages, num_ranks, limit)

    recomputing = head * 3 // 4
    while shape.experts is None and best(recomputing, most + 1)[0] <= LARGER_STAGE_PAYS * best(recomputing, most)[0]:
        most += 1
    return partition_of(best(head, most)[-1])


@cache
def _best_sizes(
    work: tuple[int, ...], head: int, num_stages: int, num_ranks: int, limit: int, is_row: bool = False
) -> tuple[float, float, float, tuple[int, ...]]:
    """Work of a pipeline, its largest stage, the sum of squares of stages, and their numbers of layers, at their least.

    They are minimized in this order; of equal cuts, that with larger early stages is taken. No stage has more work of
    layers than `limit`; infinite where none can be so.

    A rank computes one of its stages for many microbatches, then its next. So each row of `num_ranks` stages, of which
    the last ends with the last stage, takes as long as its slowest stage. The work of a pipeline is the sum of these.
    `is_row`: the stages are of one row.
    """
    if num_stages == 1:
        own = sum(work) + head
        return (own, own, own * own, (len(work),)) if own - head <= limit else IMPOSSIBLE
    number = 1 if is_row else (num_stages - 1) % num_ranks + 1
    if number == num_stages:
        return _best_sizes(work, head, num_stages, num_ranks, limit, is_row=True)
    later, found = num_stages - number, [IMPOSSIBLE]
    for end in range(len(work) - later + (head > 0), number - 1, -1):
        if sum(work[:end]) > number * limit or sum(work[end:]) > later * limit:
            continue
        row, largest, squares, sizes = _best_sizes(work[:end], 0, number, num_ranks, limit, is_row=True)
        rest, rest_largest, rest_squares, rest_sizes = _best_sizes(work[end:], head, later, num_ranks, limit, is_row)
        total = max(row, rest) if is_row else row + rest
        found.append((total, max(largest, rest_largest), squares + rest_squares, (*sizes, *rest_sizes)))
    return min(found, key=itemgetter(0, 1, 2))


def partition_of(sizes: Sequence[int]) -> tuple[StageCut, ...]:
    """The cuts of stages with that many layers each, which may be none."""
    cuts = []
    first = 0
    for stage, size in enumerate(sizes):
        cuts.append(StageCut(stage, first, first + size, stage == 0, stage == len(sizes) - 1))
        first += size
    return tuple(cuts)
