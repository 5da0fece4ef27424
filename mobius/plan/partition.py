"""The sizes of a model, and how its layers are cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mobius.errors import PlanError

OUTER_STAGES = 2
"""The embedding and the head can be stages of their own."""


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
    """Whether attention of a sequence can be computed slice by slice (`models/sliced_attention`)."""

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
        """Trainable parameters, shared ones counted once."""
        shared = self.vocab_size * self.hidden_size if self.is_tied else 0
        return self.embedding_parameters + sum(self.layer_parameters) + self.head_parameters - shared


@dataclass(frozen=True)
class StageCut:
    """The layers `[first_layer, end_layer)` of a stage; the first stage also owns the embedding, the last the head."""

    stage: int
    first_layer: int
    end_layer: int
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    def num_parameters(self, shape: ModelShape) -> int:
        """Parameters that this stage holds, a tied head counted where it is used."""
        layers = sum(shape.layer_parameters[self.first_layer : self.end_layer])
        embedding = shape.embedding_parameters if self.is_first else 0
        head = shape.head_parameters if self.is_last else 0
        return embedding + layers + head


def most_stages(num_layers: int, num_ranks: int) -> int:
    """The largest number of stages: a layer in each, embedding and head apart, filled up to a multiple of the ranks."""
    return -(-(num_layers + OUTER_STAGES) // num_ranks) * num_ranks


def balanced_partition(num_layers: int, num_stages: int, *, num_ranks: int = 1) -> tuple[StageCut, ...]:
    """Cut `num_layers` into `num_stages` stages whose sizes differ by one at most.

    Layers that are left over go to the inner stages first: the outer two carry the embedding and the head already.
    With more stages than layers, the head gets a stage of its own, then the embedding, and what is left over to a
    multiple of `num_ranks` are stages behind it that pass messages on. The step's first stage is then ready sooner,
    and its first gradients leave sooner. Raises PlanError for more stages than that makes sense for.
    """
    most = most_stages(num_layers, num_ranks)
    if num_stages > most:
        raise PlanError(
            f"--num_stages {num_stages} is more than the model can be cut into: {num_layers} layers, the embedding and "
            f"the head make {most} stages on {num_ranks} rank(s). Use --num_stages {most} or less."
        )
    if num_stages > num_layers:
        without = num_stages - num_layers
        return partition_of([*[0] * (without - 1), *[1] * num_layers, 0])
    base, left_over = divmod(num_layers, num_stages)
    inner_first = [*range(1, num_stages - 1), num_stages - 1, 0][:left_over] if num_stages > 1 else [0][:left_over]
    return partition_of([base + (stage in inner_first) for stage in range(num_stages)])


def partition_of(sizes: Sequence[int]) -> tuple[StageCut, ...]:
    """The cuts of stages with that many layers each, which may be none."""
    cuts = []
    first = 0
    for stage, size in enumerate(sizes):
        cuts.append(StageCut(stage, first, first + size, stage == 0, stage == len(sizes) - 1))
        first += size
    return tuple(cuts)
