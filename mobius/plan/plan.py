"""The plan of a run: everything a schedule and the ranks need, and nothing else.

As a file it is plan_file.py's business, what fits into memory budget.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mobius.plan.partition import StageSpan, balanced_partition
from mobius.plan.shape import ModelShape


@dataclass(frozen=True)
class Plan:
    """Which layers form which stage, on how many ranks, and which stages are streamed, which resident."""

    num_ranks: int
    num_microbatches: int
    slots: tuple[int, ...]
    """GPU slots of each rank for the stages that it streams; 0 where it streams none."""
    spans: tuple[StageSpan, ...]
    resident: frozenset[int]
    """Stages whose whole state stays on their GPU; the others are streamed."""

    @property
    def num_stages(self) -> int:
        return len(self.spans)

    @property
    def num_slots(self) -> int | None:
        """The most slots of a rank; None where every stage is resident."""
        return max(self.slots) or None

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.num_ranks

    def stages_of(self, rank: int) -> range:
        """The stages that `rank` owns: rank, rank + N, rank + 2N, ..."""
        return range(rank, self.num_stages, self.num_ranks)

    def streamed_stages(self, rank: int) -> list[int]:
        """The stages of `rank` whose weights come and go, ascending."""
        return [stage for stage in self.stages_of(rank) if stage not in self.resident]

    def with_resident(self, counts: Sequence[int], slots: int | Sequence[int]) -> Plan:
        """The same cut with the first `counts[rank]` stages of each rank resident, the others in `slots[rank]` slots.

        One number is that of all ranks. A rank has no more slots than it streams stages.
        """
        resident = frozenset(stage for rank, count in enumerate(counts) for stage in self.stages_of(rank)[:count])
        streamed = [self.stages_per_rank - count for count in counts]
        wanted = [slots] * self.num_ranks if isinstance(slots, int) else slots
        return replace(self, slots=tuple(map(min, wanted, streamed)), resident=resident)

    def describe_slots(self) -> str:
        """The slots of the ranks that have any, as text."""
        numbers = sorted({number for number in self.slots if number > 0})
        if len(numbers) > 1:
            return f"{numbers[0]} to {numbers[-1]} slots"
        return f"{numbers[0]} slot(s)" if numbers else "no slots"

    def describe(self, shape: ModelShape) -> str:
        """A short table for the log and the report: one line per stage."""
        mode = "resident" if self.num_slots is None else f"streamed through {self.describe_slots()}"
        is_mixed = self.num_slots is not None and len(self.resident) > 0
        if is_mixed:
            mode = f"{len(self.resident)} resident, the others {mode}"
        lines = [f"{self.num_stages} stages on {self.num_ranks} rank(s), {self.num_microbatches} microbatches, {mode}"]
        for span in self.spans:
            owns = [
                *(["embedding"] if span.is_first else []),
                *([f"layers {span.first_layer}-{span.end_layer - 1}"] if span.layers else []),
                *(["norm, head"] if span.is_last else []),
            ] or ["nothing, passes messages on"]
            count = span.num_parameters(shape)
            where = ", resident" if is_mixed and span.stage in self.resident else ""
            lines.append(
                f"  stage {span.stage:>3} on rank {span.stage % self.num_ranks}{where}: "
                f"{', '.join(owns)} ({count / 1e6:.1f}M)"
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
    """Cut the model evenly, unless `spans` say how; all stages streamed through `num_slots` slots, None: resident.

    Raises PlanError if there are more stages than can be.
    """
    spans = balanced_partition(shape.num_layers, num_stages, num_ranks=num_ranks) if spans is None else spans
    assert len(spans) == num_stages
    plan = Plan(num_ranks, num_microbatches, (0,) * num_ranks, tuple(spans), frozenset())
    num_resident = plan.stages_per_rank if num_slots is None else 0
    return plan.with_resident([num_resident] * num_ranks, num_slots or 0)
