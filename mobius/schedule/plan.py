"""Plan of a run: what every rank does. plan_file.py reads and writes it, memory_estimates.py counts its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from mobius.config.config import Recompute
from mobius.schedule.activation_offloading import copy_lookahead, offloads_all
from mobius.schedule.partition import ModelShape, StageCut, cut_model


class RecomputeLevel(StrEnum):
    """Activations that a stage keeps from forward to backward, if it keeps any."""

    NONE = "everything"
    """All that backward needs."""
    ELEMENTWISE = "products"
    """Results of matrix products and of attention; backward runs again what is element by element."""


def recompute_level_of(recompute: Recompute) -> RecomputeLevel:
    """Level that an option asks for; where it is left open, everything."""
    return RecomputeLevel.ELEMENTWISE if recompute is Recompute.ELEMENTWISE else RecomputeLevel.NONE


@dataclass(frozen=True)
class MemoryUse:
    """One way for a rank to use its GPU memory."""

    num_resident: int
    """Resident stages: the first ones of the rank, which the next step needs first."""
    num_saving_activations: int
    """Stages that keep their activations from forward to backward: the last ones of the rank."""
    num_slots: int
    """Slots for the streamed stages; 0 where nothing is streamed."""
    num_offloading_activations: int = 0
    """Stages whose layers' inputs wait on the host from forward to backward: the first ones of the rank, which wait
    longest. The model's last stage is never one."""


@dataclass(frozen=True)
class Plan:
    """Which layers form which stage, on how many ranks; which stages are resident, and which keep activations."""

    num_ranks: int
    num_microbatches: int
    slots: tuple[int, ...]
    """GPU slots of each rank for the stages that it streams; 0 where it streams none."""
    cuts: tuple[StageCut, ...]
    """The layers of every stage."""
    resident: frozenset[int]
    """Stages whose whole state stays on their GPU; the others are streamed."""
    saved_activation_stages: frozenset[int] = frozenset()
    """Stages that keep their activations from forward to backward; the others recompute them."""
    accumulation_rounds: int = 1
    """Parts of a step's microbatches that go forward and backward one after the other."""
    offloaded_activation_stages: frozenset[int] = frozenset()
    """Stages whose layers' inputs wait on the host from forward to backward."""
    num_slices: int = 1
    """Slices of each sequence; a microbatch is a slice of some sequences, and `num_microbatches` counts all."""
    recompute_level: RecomputeLevel = RecomputeLevel.NONE
    """Activations of the `kept` stages that are kept; of importance only where there are such stages."""
    saved_attention_stages: frozenset[int] = frozenset()
    """Stages whose layers keep attention's result of a slice beside their input: backward does not attend again."""
    num_offloaded_microbatches: int = 0
    """Microbatches of each round of which the `stashed` stages send home all that products need, and run none again."""

    @property
    def copy_lookahead(self) -> int:
        """Computations under which what is stashed may leave, or come back."""
        return copy_lookahead(self.microbatches_per_round, self.num_offloaded_microbatches)

    def offloads_all(self, stage: int, microbatch: int) -> bool:
        """Whether the stage sends a microbatch's products home, and not only its layers' inputs."""
        home = offloads_all(
            microbatch, microbatches_per_round=self.microbatches_per_round, number=self.num_offloaded_microbatches
        )
        return stage in self.offloaded_activation_stages and home

    @property
    def num_chunks(self) -> int:
        """Groups of whole sequences: the microbatches, where these are no slices."""
        return self.num_microbatches // self.num_slices

    @property
    def microbatches_per_round(self) -> int:
        """Microbatches of a round: the most that are between forward and backward at a time."""
        return self.num_microbatches // self.accumulation_rounds

    @property
    def num_stages(self) -> int:
        return len(self.cuts)

    @property
    def num_slots(self) -> int | None:
        """The most slots of a rank; None where every stage is resident."""
        return max(self.slots) or None

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.num_ranks

    def local_stages(self, rank: int) -> range:
        """The stages that `rank` owns: rank, rank + N, rank + 2N, ..."""
        return range(rank, self.num_stages, self.num_ranks)

    def streamed_stages(self, rank: int) -> list[int]:
        """The stages of `rank` whose weights come and go, ascending."""
        return [stage for stage in self.local_stages(rank) if stage not in self.resident]

    def with_memory_uses(self, uses: Sequence[MemoryUse]) -> Plan:
        """The plan in which each rank does what `uses` says; a rank has no more slots than it streams stages."""
        own = [self.local_stages(rank) for rank in range(self.num_ranks)]
        each = list(zip(own, uses, strict=True))
        return replace(
            self,
            slots=tuple(min(use.num_slots, len(stages) - use.num_resident) for stages, use in each),
            resident=frozenset(stage for stages, use in each for stage in stages[: use.num_resident]),
            saved_activation_stages=frozenset(
                stage for stages, use in each for stage in stages[len(stages) - use.num_saving_activations :]
            ),
            offloaded_activation_stages=frozenset(
                stage
                for stages, use in each
                for stage in stages[: min(use.num_offloading_activations, len(stages) - use.num_saving_activations)]
                if stage != self.num_stages - 1
            ),
        )

    def use_of(self, rank: int) -> MemoryUse:
        """The numbers of resident, keeping and stashed stages of `rank`, and its slots."""
        own = self.local_stages(rank)
        resident, saved_activation_stages, offloaded_activation_stages = (
            len(each.intersection(own))
            for each in (self.resident, self.saved_activation_stages, self.offloaded_activation_stages)
        )
        return MemoryUse(resident, saved_activation_stages, self.slots[rank], offloaded_activation_stages)

    def describe_slots(self) -> str:
        """The slots of the ranks that have any, as text."""
        numbers = sorted({number for number in self.slots if number > 0})
        if len(numbers) > 1:
            return f"{numbers[0]} to {numbers[-1]} slots"
        return f"{numbers[0]} slot(s)" if numbers else "no slots"

    def describe_microbatches(self) -> str:
        """The number of microbatches and, if there are several, of rounds, as text."""
        rounds = f" in {self.accumulation_rounds} rounds" if self.accumulation_rounds > 1 else ""
        slices = f" (slices, {self.num_slices} of each sequence)" if self.num_slices > 1 else ""
        return f"{self.num_microbatches} microbatches{slices}{rounds}"

    def offloads_gradient_sums(self, rank: int) -> bool:
        """Whether the sums of the rank's streamed stages are on the host between rounds; a single stage's stay."""
        return self.accumulation_rounds > 1 and len(self.streamed_stages(rank)) > 1

    def describe(self, shape: ModelShape) -> str:
        """A short table for the log and the report: one line per stage."""
        mode = "resident" if self.num_slots is None else f"streamed through {self.describe_slots()}"
        is_mixed = self.num_slots is not None and len(self.resident) > 0
        if is_mixed:
            mode = f"{len(self.resident)} resident, the others {mode}"
        lines = [f"{self.num_stages} stages on {self.num_ranks} rank(s), {self.describe_microbatches()}, {mode}"]
        for cut in self.cuts:
            owns = [
                *(["embedding"] if cut.is_first else []),
                *([f"layers {cut.first_layer}-{cut.end_layer - 1}"] if cut.layers else []),
                *(["norm, head"] if cut.is_last else []),
            ] or ["nothing, passes messages on"]
            where = ", resident" if is_mixed and cut.stage in self.resident else ""
            lines.append(
                f"  stage {cut.stage:>3} on rank {cut.stage % self.num_ranks}{where}: "
                f"{', '.join(owns)} ({cut.num_parameters(shape) / 1e6:.1f}M)"
            )
        return "\n".join(lines)


def make_plan(
    shape: ModelShape,
    *,
    num_ranks: int,
    num_stages: int,
    num_microbatches: int,
    num_slots: int | None,
    accumulation_rounds: int = 1,
    num_slices: int = 1,
    recompute_level: RecomputeLevel = RecomputeLevel.NONE,
    num_saving_attention: int = 0,
    num_offloaded_microbatches: int = 0,
) -> Plan:
    """Cut the model (`cut_model`); all stages are streamed through `num_slots` slots, None: all are resident.

    The last `num_saving_attention` stages of each rank keep attention's results.
    Raises PlanError if there are more stages than can be.
    """
    cuts = cut_model(shape, num_stages, num_ranks=num_ranks)
    plan = Plan(
        num_ranks,
        num_microbatches,
        (0,) * num_ranks,
        cuts,
        frozenset(),
        accumulation_rounds=accumulation_rounds,
        num_slices=num_slices,
        recompute_level=recompute_level,
        saved_attention_stages=frozenset(range(num_stages - num_saving_attention * num_ranks, num_stages)),
        num_offloaded_microbatches=num_offloaded_microbatches,
    )
    num_resident = plan.stages_per_rank if num_slots is None else 0
    return plan.with_memory_uses([MemoryUse(num_resident, 0, num_slots or 0)] * num_ranks)
