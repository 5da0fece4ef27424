"""Fits a plan into GPU memory: refuses what cannot, and spends what is left on what makes a step shorter.

Backward need not recompute a stage's forward if its activations are kept, and that needs its weights in place from
forward to backward: of a rank's stages, the last `num_slots` stay.

    rank 0 of 2, ten stages, three slots:      F0 F2 F4 F6 F8   B8 B6 B4 B2 B0
    weights stay                                     ==============
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mobius.config import Recompute
from mobius.planner.budget import GIB, ByteSizes, GpuNeed, check_gpu_memory, gpu_need
from mobius.planner.plan import Plan
from mobius.planner.shape import ModelShape

FILLED_SHARE = 0.9
"""Of the GPU memory a rank may use, what options may fill; the rest is for the allocator's fragments."""
WORKSPACE_BYTES = GIB
"""What kernels and messages take beside the stages."""
PREFETCH_SLOTS = 3
"""A third slot loads a stage while the gradients of another leave: it pays where a stage computes no longer than that
takes."""


@dataclass(frozen=True)
class StepTokens:
    """How many tokens are on the GPU at a time."""

    step: int
    """Of all microbatches."""
    microbatch: int
    loss_chunk: int

    @property
    def num_microbatches(self) -> int:
        return self.step // self.microbatch


@dataclass(frozen=True)
class FittedPlan:
    """A plan that fits, and which of a rank's stages keep their activations from forward to backward."""

    plan: Plan
    graph_stages: frozenset[int]


def fit_plan(
    plan: Plan,
    shape: ModelShape,
    sizes: ByteSizes,
    *,
    rank: int,
    tokens: StepTokens,
    gpu_bytes: int | None,
    recompute: Recompute,
    graph_bytes: int | None = None,
    reserved_bytes: int = 0,
) -> FittedPlan:
    """Check that `plan` fits into `gpu_bytes` (None: unknown, on a CPU) and use what is left of them.

    With `Recompute.AUTO` as many of the last stages of `rank` keep their activations as fit, with the slots that they
    need; then a further slot for prefetching. `graph_bytes` is what a layer's graph holds for a microbatch, measured;
    without it nothing is kept but what is asked for. `reserved_bytes` are left for what is not in the plan.
    Raises GpuMemoryError if the plan does not fit, or with `Recompute.NONE` all activations do not.
    """
    own = plan.stages_of(rank)
    keeps_all = recompute is Recompute.NONE
    if gpu_bytes is None:
        return FittedPlan(plan, frozenset(own) if keeps_all else frozenset())

    def need_of(candidate: Plan) -> GpuNeed:
        return gpu_need(
            candidate.spans,
            shape,
            sizes,
            num_ranks=candidate.num_ranks,
            num_slots=candidate.num_slots,
            batch_tokens=tokens.step,
            microbatch_tokens=tokens.microbatch,
            loss_chunk_tokens=tokens.loss_chunk,
            keeps_activations=keeps_all,
            graph_bytes=graph_bytes,
        )

    check_gpu_memory(need_of(plan), available_bytes=gpu_bytes, is_offloading=plan.num_slots is not None)
    if keeps_all:
        return FittedPlan(plan, frozenset(own))
    usable = int(gpu_bytes * FILLED_SHARE) - WORKSPACE_BYTES - reserved_bytes
    most = len(own) if recompute is Recompute.AUTO and graph_bytes is not None else 0
    for num_graphs in range(most, -1, -1):
        stages = own[len(own) - num_graphs :]
        kept = sum(_num_graphs(plan, stage, tokens) for stage in stages) * (graph_bytes or 0)
        for candidate in _with_slots_for(plan, num_graphs):
            if need_of(candidate).total + kept <= usable:
                return FittedPlan(candidate, frozenset(stages))
    return FittedPlan(plan, frozenset())


def _num_graphs(plan: Plan, stage: int, tokens: StepTokens) -> int:
    """Graphs of a layer and a microbatch that exist when `stage` keeps its activations, beside the one that is anyhow.

    Of the model's last stage one microbatch is under way at a time.
    """
    span = plan.spans[stage]
    return max(0, len(span.layers) - 1) if span.is_last else len(span.layers) * tokens.num_microbatches


def _with_slots_for(plan: Plan, num_graphs: int) -> Iterator[Plan]:
    """`plan` with slots in which the last `num_graphs` stages of a rank stay; first with one more for prefetching."""
    if plan.num_slots is None:
        yield plan
    elif plan.num_slots == 1:  # no prefetch: nothing but the last stage stays
        yield from [plan] if num_graphs <= 1 else []
    else:
        for wanted in (PREFETCH_SLOTS, plan.num_slots):
            yield replace(plan, num_slots=min(max(wanted, num_graphs), plan.stages_per_rank))
