"""Cuts the layers into stages; it does not know which rank runs a stage or what stays on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mobius.errors import PlanError
from mobius.planner.shape import ModelShape


@dataclass(frozen=True)
class StageSpan:
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


def balanced_partition(num_layers: int, num_stages: int) -> tuple[StageSpan, ...]:
    """Cut `num_layers` into `num_stages` spans whose sizes differ by one at most.

    Layers that are left over go to the inner stages first: the outer two carry the embedding and the head already.
    Raises PlanError if a stage would have no layer.
    """
    if num_stages > num_layers:
        raise PlanError(
            f"--num_stages {num_stages} is more than the model's {num_layers} layers; every stage needs at least one. "
            f"Use --num_stages {num_layers} or less."
        )
    base, left_over = divmod(num_layers, num_stages)
    inner_first = [*range(1, num_stages - 1), num_stages - 1, 0][:left_over] if num_stages > 1 else [0][:left_over]
    return partition_of([base + (stage in inner_first) for stage in range(num_stages)])


def partition_of(sizes: Sequence[int]) -> tuple[StageSpan, ...]:
    """The spans of stages with that many layers each; the first and the last may have none if there are others."""
    spans = []
    first = 0
    for stage, size in enumerate(sizes):
        spans.append(StageSpan(stage, first, first + size, stage == 0, stage == len(sizes) - 1))
        first += size
    return tuple(spans)
