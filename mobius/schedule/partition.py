"""Sizes of a model, and the cut of its layers into stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from operator import itemgetter

from mobius.errors import PlanError

OUTER_STAGES = 2
"""Number of stages without layers: one for the embedding and one for the head."""
LARGER_STAGE_PAYS = 0.98
"""Maximum ratio: work with one more layer in the largest stage / work without this layer. With a higher ratio, the
layer is not worth its GPU memory."""
IMPOSSIBLE: tuple[float, float, float, tuple[int, ...]] = (math.inf, math.inf, math.inf, ())
"""Result of `_best_sizes` if no cut is possible."""


@dataclass(frozen=True)
class TrainedParameters:
    """Numbers of trained parameters in a model that also has frozen parameters."""

    embedding: int
    layers: tuple[int, ...]
    head: int
    """Trained parameters of norm and head together."""
    is_on_gpu: bool
    """Whether trained parameters are always on the GPU, even in streamed stages; true of adapters."""
    adapted_widths: tuple[int, ...] = ()
    """For each layer, the input and output widths of linear layers with adapters, summed; empty without adapters."""
    saved_widths: tuple[int, ...] = ()
    """For each layer, the elements per token that adapters save for backward besides the layer's; empty: none."""
    has_row_norms: bool = False
    """Whether each forward computes norms of the rows of adapted matrices (DoRA)."""


@dataclass(frozen=True)
class Experts:
    """Experts in a model's layers: all experts are stored, but a token uses only a few of them."""

    number: int
    """Number of experts in a layer."""
    num_experts_per_token: int
    """Number of experts in a layer that a token uses."""
    layers: tuple[int, ...]
    """For each layer, the number of parameters in all its experts; 0 for a layer without experts."""
    shared_width: int = 0
    """Feed-forward width, in elements per token, of the shared part, which all tokens use."""
    trained: tuple[int, ...] | None = None
    """For each layer, the number of trained parameters in experts; None if all parameters are trained."""

    def num_idle(self, parameters: int) -> int:
        """Number of a layer's expert `parameters` that compute nothing for a token."""
        return parameters * (self.number - self.num_experts_per_token) // self.number


@dataclass(frozen=True)
class QuantizedWeights:
    """Sizes of the matrices in a model's layers whose products are in eight bits."""

    matmul_dtype: str
    """Format of the products: a value of --matmul_dtype."""
    layers: tuple[int, ...]
    """For each layer, the number of weights in its matrices."""
    scales: tuple[int, ...]
    """For each layer, the number of rows and columns of its matrices; each has a scale. Products quantize as many
    elements per token."""
    largest: int
    """Number of weights in the largest matrix."""
    widest: int
    """Elements of the longest row or column of any matrix."""


@dataclass(frozen=True)
class WeightsInFP32:
    """Weights of the layers that are fp32 in 16-bit runs, such as routers."""

    layers: tuple[int, ...]
    """For each layer, the number of these weights."""
    trained: tuple[int, ...]
    """For each layer, how many of them are trained."""


@dataclass(frozen=True)
class CodedWeights:
    """Frozen weights of the layers that are codes between their uses."""

    base_dtype: str
    """Format of the codes: a value of --base_dtype."""
    layers: tuple[int, ...]
    """For each layer, the number of these weights."""
    num_bytes: tuple[int, ...]
    """For each layer, the bytes of codes and scales."""


@dataclass(frozen=True)
class LayerWidths:
    """Elements per token that a layer computes, without the hidden states."""

    products: int
    """Inputs and outputs of all matrix products outside the feed-forward part: 4 H in Llama. In a layer with experts,
    this includes the router and the gate of a shared part."""
    feed_forward: int
    """Width of the feed-forward part; the widths of a token's experts are added up."""
    copies: int
    """Elements in the copies of a token's hidden state, one copy per expert; the results have as many elements."""


@dataclass(frozen=True)
class ModelShape:
    """Parameter counts and dimensions of one causal language model."""

    embedding_parameters: int
    """Parameters of the token embedding."""
    layer_parameters: tuple[int, ...]
    """Parameters of every decoder layer, in order."""
    head_parameters: int
    """Parameters of the final norm and of the head, even if the head is tied to the embedding."""
    hidden_size: int
    intermediate_size: int
    """Width of the widest feed-forward activation, in elements per token."""
    vocab_size: int
    is_tied: bool
    """Whether the head and the embedding share one matrix, which the fields above count twice."""
    num_heads: int | None = None
    """Query heads of a layer; None if unknown."""
    head_size: int | None = None
    """Width of a head. If it is None (unknown), the assumed width of all heads together is `hidden_size`."""
    num_key_heads: int | None = None
    """Key heads of a layer; value heads are as many. If it is None (unknown), the number of query heads is assumed."""
    is_sliceable: bool = False
    """Whether attention can be computed slice by slice (`models/slice_attention.py`)."""
    is_tileable: bool = True
    """Whether recomputed layers, except for their attention, can run tile by tile."""
    trained: TrainedParameters | None = None
    """None if all parameters are trained."""
    experts: Experts | None = None
    """None if no layer has experts."""
    quantized: QuantizedWeights | None = None
    """None if matrix products are in the format of weights and activations."""
    in_fp32: WeightsInFP32 | None = None
    """None if all weights have one format."""
    coded: CodedWeights | None = None
    """None if all weights are values."""

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        if self.num_heads is None or self.head_size is None:
            return self.hidden_size
        return self.num_heads * self.head_size

    @property
    def key_width(self) -> int:
        """Width of all key heads together, and of all value heads together."""
        if self.num_key_heads is None or self.num_heads is None:
            return self.attention_width
        return self.attention_width // self.num_heads * self.num_key_heads

    @property
    def num_layers(self) -> int:
        return len(self.layer_parameters)

    @property
    def num_parameters(self) -> int:
        """Number of all parameters; a tied matrix counts once."""
        return self.embedding_parameters + sum(self.layer_parameters) + self.head_parameters - self._shared

    @property
    def num_trained(self) -> int:
        """Number of trained parameters; a tied matrix counts once."""
        if self.trained is None:
            return self.num_parameters
        shared = self._shared if self.trains_tied else 0
        return self.trained.embedding + sum(self.trained.layers) + self.trained.head - shared

    @property
    def trains_tied(self) -> bool:
        """Whether embedding and head share a matrix that is trained."""
        return self.is_tied and (self.trained is None or (self.trained.embedding > 0 and self.trained.head > 0))

    @property
    def num_trained_in_head(self) -> int:
        """Number of trained parameters of norm and head."""
        return self.head_parameters if self.trained is None else self.trained.head

    @property
    def num_active(self) -> int:
        """Number of parameters that compute for a token (without unselected experts); a tied matrix counts once."""
        return self.num_parameters - sum(self.layer_parameters) + sum(self.active_parameters)

    @cached_property
    def active_parameters(self) -> tuple[int, ...]:
        """For each layer, the number of parameters that compute for a token."""
        if self.experts is None:
            return self.layer_parameters
        return self._without_idle(self.experts, self.layer_parameters, self.experts.layers)

    @cached_property
    def active_trained(self) -> tuple[int, ...]:
        """For each layer, the number of trained parameters that compute for a token."""
        if self.trained is None or self.experts is None:
            return self.active_parameters if self.trained is None else self.trained.layers
        routed = self.experts.layers if self.experts.trained is None else self.experts.trained
        return self._without_idle(self.experts, self.trained.layers, routed)

    @cached_property
    def _known_sizes(self) -> dict[tuple[object, ...], tuple[int, int, int]]:
        return {}

    def sizes_of(self, cut: StageCut) -> tuple[int, int, int]:
        """Return a stage's numbers of parameters, of trained parameters, and of trained parameters in layers."""
        key = cut.first_layer, cut.end_layer, cut.is_first, cut.is_last
        if key not in self._known_sizes:
            self._known_sizes[key] = cut.num_parameters(self), cut.num_trained(self), cut.num_trained_in_layers(self)
        return self._known_sizes[key]

    @staticmethod
    def _without_idle(experts: Experts, counts: Sequence[int], routed: Sequence[int]) -> tuple[int, ...]:
        return tuple(count - experts.num_idle(own) for count, own in zip(counts, routed, strict=True))

    def layer_widths(self, layer: int) -> LayerWidths:
        """Return the widths of a layer from its parameters: a matrix [width, H] gives `width` elements per token."""
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
        """First layer of each kind. Layers of a kind have the same number of parameters and of active parameters."""
        return tuple(self.kind_of_layer.index(kind) for kind in range(1 + max(self.kind_of_layer, default=-1)))

    @cached_property
    def kind_of_layer(self) -> tuple[int, ...]:
        """Kind of each layer, as an index into `layer_kinds`."""
        counts = list(zip(self.layer_parameters, self.active_parameters, strict=True))
        unique = list(dict.fromkeys(counts))
        return tuple(map(unique.index, counts))

    def describe(self, *, trains: bool = True) -> str:
        """Describe the number of parameters and, if they differ, of active and (if the run `trains`) trained ones."""
        parts = [] if self.experts is None else [f"{self.num_active:.3g} are active for a token"]
        parts += [] if self.trained is None or not trains else [f"{self.num_trained:.3g} are trained"]
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
        """Index of the first layer that has a backward; no earlier parameter is trained."""
        if self.trained is None or self.trained.embedding:
            return 0
        return next((index for index, count in enumerate(self.trained.layers) if count), self.num_layers)

    @property
    def product_operations(self) -> int:
        """Floating-point operations for a token in forward and backward: 2 per parameter in each of three products.

        The products compute outputs, input gradients (if an earlier parameter is trained) and weight gradients (for
        trained parameters). The embedding and unselected experts do not count.
        """
        forward = sum(self.active_parameters) + self.head_parameters
        if self.trained is None:
            return 6 * forward
        back = sum(self.active_parameters[self.first_backward :]) + self.head_parameters
        return 2 * (forward + back + sum(self.active_trained) + self.trained.head)


@dataclass(frozen=True)
class StageCut:
    """Layers `[first_layer, end_layer)` of a stage. The first stage also has the embedding, the last stage the head."""

    stage: int
    first_layer: int
    end_layer: int
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    def backward_layers(self, first: int) -> range:
        """Layers of the stage that have a backward, if the model's first layer with a backward is `first`."""
        return range(max(self.first_layer, first), max(self.end_layer, first))

    def num_parameters(self, shape: ModelShape) -> int:
        """Number of parameters in this stage; the last stage counts the head even if it is tied."""
        return self._sum(shape.embedding_parameters, shape.layer_parameters, shape.head_parameters)

    def num_trained(self, shape: ModelShape) -> int:
        """Number of trained parameters of this stage."""
        own = shape.trained
        return self.num_parameters(shape) if own is None else self._sum(own.embedding, own.layers, own.head)

    def num_trained_in_layers(self, shape: ModelShape) -> int:
        """Number of trained parameters of this stage's layers."""
        return sum(
            (shape.layer_parameters if shape.trained is None else shape.trained.layers)[
                self.layers.start : self.layers.stop
            ]
        )

    def num_active(self, shape: ModelShape) -> int:
        """Number of parameters of this stage that compute for a token."""
        return self._sum(shape.embedding_parameters, shape.active_parameters, shape.head_parameters)

    def num_streamed_parameters(self, shape: ModelShape) -> int:
        """Number of parameters of this stage that are loaded if it is streamed; two bytes of codes count as one."""
        coded, num_bytes = self.num_coded(shape)
        own = self.num_parameters(shape) - (self.num_trained(shape) if shape.keeps_trained_on_gpu else 0)
        return own - coded + num_bytes // 2

    def num_quantized(self, shape: ModelShape) -> int:
        """Number of weights of this stage whose products are in eight bits."""
        return 0 if shape.quantized is None else sum(shape.quantized.layers[self.first_layer : self.end_layer])

    def num_in_fp32(self, shape: ModelShape) -> tuple[int, int]:
        """Numbers of all and of trained weights of this stage that are fp32 in 16-bit runs."""
        if shape.in_fp32 is None:
            return 0, 0
        layers = slice(self.first_layer, self.end_layer)
        return sum(shape.in_fp32.layers[layers]), sum(shape.in_fp32.trained[layers])

    def num_coded(self, shape: ModelShape) -> tuple[int, int]:
        """Number of this stage's weights that are codes between their uses, and bytes of the codes."""
        if shape.coded is None:
            return 0, 0
        layers = slice(self.first_layer, self.end_layer)
        return sum(shape.coded.layers[layers]), sum(shape.coded.num_bytes[layers])

    def num_scales(self, shape: ModelShape) -> int:
        """Number of scales of this stage's eight-bit weights."""
        return 0 if shape.quantized is None else sum(shape.quantized.scales[self.first_layer : self.end_layer])

    def _sum(self, embedding: int, layers: Sequence[int], head: int) -> int:
        own = sum(layers[self.first_layer : self.end_layer])
        return own + (embedding if self.is_first else 0) + (head if self.is_last else 0)


def max_stages(num_layers: int, num_ranks: int) -> int:
    """Maximum number of stages: the number of layers, embedding and head, rounded up to a multiple of the ranks."""
    return -(-(num_layers + OUTER_STAGES) // num_ranks) * num_ranks


@lru_cache(maxsize=1024)  # called for every change of a request
def cut_model(
    shape: ModelShape, num_stages: int, *, num_ranks: int = 1, attention_length: float = 0, spreads_head: bool = False
) -> tuple[StageCut, ...]:
    """Cut a model into stages so that a step on `num_ranks` ranks takes the least time.

    Each stage has at least one layer, except for the last stage, which may have only the head.

    A matrix product takes two operations for each parameter and token. So the work of a layer is its number of active
    parameters, and the work of the head is its number of parameters. Causal attention to `attention_length` tokens
    counts as `attention_length` parameters for each element of its width. The embedding counts as no work.

    A stage with more layers than in an even cut takes more GPU memory. So each additional layer must lower the work of
    the pipeline by 2 %, even if layers recompute, which multiplies their work by 4/3. Layers with experts take too much
    memory for this.

    With more stages than layers, the head gets a separate stage, then the embedding. More stages, up to a multiple of
    `num_ranks`, follow the embedding and only pass messages on. The step's first stage is then ready sooner, and its
    first gradients leave sooner. If ranks share the head (`spreads_head`), the head is no work of the last stage, and
    the last stage always has layers. Raises PlanError for too many stages.
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
    """Best cut: work of the pipeline, work of its largest stage, sum of squared work, and layers per stage.

    The three numbers are minimized in this order. Among equal cuts, the cut with larger early stages is returned. The
    layers of a stage have at most `limit` work; if no such cut exists, the numbers are infinite.

    A rank computes one of its stages for many microbatches, then its next stage. So each row of `num_ranks` stages
    takes as long as its slowest stage; the last row ends with the last stage. The work of a row is the work of its
    slowest stage; the work of a pipeline is the sum of its rows. With `is_row`, all given stages are in one row.
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
    """Cuts of stages with the given numbers of layers, which may be 0."""
    cuts = []
    first = 0
    for stage, size in enumerate(sizes):
        cuts.append(StageCut(stage, first, first + size, stage == 0, stage == len(sizes) - 1))
        first += size
    return tuple(cuts)
