"""The plan of a run: everything a schedule and the ranks need, and nothing else.

It is saved with the results as JSON. What fits into memory is budget.py's business.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mobius.planner.partition import StageSpan, balanced_partition
from mobius.planner.shape import ModelShape


@dataclass(frozen=True)
class Plan:
    """Which layers form which stage, on how many ranks, and whether stages are streamed or resident."""

    num_ranks: int
    num_microbatches: int
    num_slots: int | None
    """GPU slots per rank for streamed stages; None when every stage is resident."""
    spans: tuple[StageSpan, ...]

    @property
    def num_stages(self) -> int:
        return len(self.spans)

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.num_ranks

    def stages_of(self, rank: int) -> range:
        """The stages that `rank` owns: rank, rank + N, rank + 2N, ..."""
        return range(rank, self.num_stages, self.num_ranks)

    def to_json(self) -> str:
        """The plan as an object of its fields, ending in a line break."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def describe(self, shape: ModelShape) -> str:
        """A short table for the log and the report: one line per stage."""
        mode = "resident" if self.num_slots is None else f"streamed through {self.num_slots} slot(s)"
        lines = [f"{self.num_stages} stages on {self.num_ranks} rank(s), {self.num_microbatches} microbatches, {mode}"]
        for span in self.spans:
            owns = [
                *(["embedding"] if span.is_first else []),
                *([f"layers {span.first_layer}-{span.end_layer - 1}"] if span.layers else []),
                *(["norm, head"] if span.is_last else []),
            ]
            count = span.num_parameters(shape)
            lines.append(
                f"  stage {span.stage:>3} on rank {span.stage % self.num_ranks}: {', '.join(owns)} ({count / 1e6:.1f}M)"
            )
        return "\n".join(lines)


def make_plan(
    shape: ModelShape,
    *,
    num_ranks: int,
    num_stages: int,
    num_microbatches: int,
    num_slots: int | None,
    spans: Sequence[StageSpan] | None = None,
) -> Plan:
    """Cut the model evenly, unless `spans` say how. Raises PlanError if there are more stages than layers."""
    spans = balanced_partition(shape.num_layers, num_stages) if spans is None else spans
    assert len(spans) == num_stages
    stages_per_rank = num_stages // num_ranks
    slots = None if num_slots is None else min(num_slots, stages_per_rank)
    return Plan(num_ranks, num_microbatches, slots, tuple(spans))
