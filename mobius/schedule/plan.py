"""Plan of a run: the work of each rank. plan_file.py reads and writes plans, memory_estimates.py counts their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from mobius.schedule.memory_layout import RankUse
from mobius.schedule.partition import ModelShape, StageCut, cut_model
from mobius.schedule.spec import ScheduleSpec


class RecomputeLevel(StrEnum):
    """Work that backward recomputes in a stage that saves activations."""

    NONE = "none"
    """The stage saves everything that backward needs."""
    ELEMENTWISE = "elementwise"
    """The stage saves results of matrix products and of attention; backward recomputes elementwise work."""


@dataclass(frozen=True)
class MemoryUse:
    """One way for a rank to use its GPU memory."""

    num_resident: int
    """Number of resident stages. They are the rank's first stages, which the next step needs first."""
    num_saving_activations: int
    """Number of stages that save activations for backward. They are the rank's last stages."""
    num_slots: int
    """Number of slots for the streamed stages; 0 if nothing is streamed."""
    num_offloading_activations: int = 0
    """Number of stages that offload the inputs of their layers to the host until backward. They are the rank's first
    stages, which wait longest. The model's last stage never offloads inputs."""
    num_sum_buffers: int = 0
    """Number of buffers for unfinished gradient sums of streamed stages; 0: the minimum (`num_sum_buffers`)."""
    num_saving_products: int = 0
    """Number of stages that save only products. They are the first of the stages that save activations, because the
    activations of the first stages wait longest."""


@dataclass(frozen=True)
class Plan(ScheduleSpec):
    """Schedule parameters of a model: the layers of each stage, and the stages that save activations."""

    cuts: tuple[StageCut, ...] = field(default=(), kw_only=True, hash=False)
    """Layers of every stage."""
    saved_activation_stages: frozenset[int] = field(default=frozenset(), kw_only=True)
    """Stages that save their activations for backward; other stages recompute them."""
    saved_product_stages: frozenset[int] = field(default=frozenset(), kw_only=True)
    """Stages among `saved_activation_stages` that save only the results of matrix products and of attention."""
    saved_attention_stages: frozenset[int] = field(default=frozenset(), kw_only=True)
    """Stages whose layers save the input and attention's result of a slice, so that backward does not recompute
    attention."""
    states_in_memory: frozenset[int] = field(default=frozenset(), kw_only=True)
    """Streamed stages whose optimizer states stay in host memory, while the states of other stages are on disks."""

    def __post_init__(self) -> None:
        assert len(self.cuts) == self.num_stages, "a plan has the layers of every stage"

    def rank_use(self, rank: int) -> RankUse:
        """Return how the stages of `rank` use its memory."""
        return super().rank_use(rank)._replace(states_in_memory=self.states_in_memory)

    def level_of(self, stage: int) -> RecomputeLevel:
        """Return the recompute level of `stage`, a stage that saves activations."""
        return RecomputeLevel.ELEMENTWISE if stage in self.saved_product_stages else RecomputeLevel.NONE

    def with_memory_uses(self, uses: Sequence[MemoryUse]) -> Plan:
        """Return a plan with the memory use `uses[rank]` on each rank, but at most one slot per streamed stage."""
        slots, sum_buffers = [], []
        resident, saving, products, offloading = (list[int]() for _ in range(4))
        for rank, use in zip(range(self.num_ranks), uses, strict=True):
            own = self.local_stages(rank)
            recomputing = len(own) - use.num_saving_activations
            slots.append(min(use.num_slots, len(own) - use.num_resident))
            sum_buffers.append(min(use.num_sum_buffers, len(own) - use.num_resident))
            resident += own[: use.num_resident]
            saving += own[recomputing:]
            products += own[recomputing:][: use.num_saving_products]
            offloading += own[: min(use.num_offloading_activations, recomputing)]
        return replace(
            self,
            slots=tuple(slots),
            sum_buffers=tuple(sum_buffers),
            resident=frozenset(resident),
            saved_activation_stages=frozenset(saving),
            saved_product_stages=frozenset(products),
            offloaded_activation_stages=frozenset(offloading) - {self.num_stages - 1},
        )

    def with_same_use(self, use: MemoryUse) -> Plan:
        """Return a plan with the memory use `use` on every rank."""
        return self.with_memory_uses([use] * self.num_ranks)

    def use_of(self, rank: int) -> MemoryUse:
        """Return the memory use of `rank`: numbers of resident, saving and offloading stages, slots and buffers."""
        own = self.local_stages(rank)
        stages = (
            self.resident,
            self.saved_activation_stages,
            self.offloaded_activation_stages,
            self.saved_product_stages,
        )
        resident, saving, offloading, products = (len(each.intersection(own)) for each in stages)
        buffers = self.sum_buffers[rank] if self.sum_buffers else 0
        return MemoryUse(resident, saving, self.slots[rank], offloading, buffers, products)

    def describe_microbatches(self) -> str:
        """Describe the number of microbatches and, if there are several, of rounds and slices."""
        rounds = f" in {self.num_rounds} rounds" if self.num_rounds > 1 else ""
        rounds += ", depth-first" if self.is_depth_first else ""
        rounds += ", the head on all ranks" if self.spreads_head else ""
        slices = f" (slices, {self.num_slices} of each sequence)" if self.num_slices > 1 else ""
        return f"{self.num_microbatches} microbatches{slices}{rounds}"

    def describe(self) -> str:
        """Describe stages, microbatches and slots in one line."""
        numbers = sorted({number for number in self.slots if number > 0})
        slots = f"{numbers[0]} slot(s) per rank" if numbers else "no slots"
        if len(numbers) > 1:
            slots = f"{numbers[0]} to {numbers[-1]} slots per rank"
        return f"{self.num_stages} stages on {self.num_ranks} rank(s), {self.describe_microbatches()}, {slots}"


def make_plan(
    shape: ModelShape,
    *,
    num_ranks: int,
    num_stages: int,
    num_microbatches: int,
    num_slots: int | None,
    num_saving_attention: int = 0,
    attention_length: float = 0,
    **numbers: Any,
) -> Plan:
    """Cut the model (`cut_model`) and stream all stages through `num_slots` slots; with None, all stages are resident.

    The last `num_saving_attention` stages of each rank save attention's results; `numbers` are other fields of the plan
    by name. Raises PlanError if the model cannot be cut into `num_stages` stages.
    """
    plan = Plan(
        num_ranks,
        num_stages,
        num_microbatches,
        (0,) * num_ranks,
        cuts=cut_model(
            shape,
            num_stages,
            num_ranks=num_ranks,
            attention_length=attention_length,
            spreads_head=numbers.get("spreads_head", False),
        ),
        saved_attention_stages=frozenset(range(num_stages - num_saving_attention * num_ranks, num_stages)),
        **numbers,
    )
    if num_slots is not None and plan.is_depth_first:
        num_slots = plan.stages_per_rank
    num_resident = plan.stages_per_rank if num_slots is None else 0
    return plan.with_same_use(MemoryUse(num_resident, 0, num_slots or 0))
