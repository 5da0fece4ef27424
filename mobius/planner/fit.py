"""Fits a plan into GPU memory: refuses what cannot, and spends what is left on what makes a step shorter."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mobius.planner.budget import (
    GIB,
    ByteSizes,
    GpuNeed,
    check_gpu_memory,
    gpu_need,
    layer_activation_bytes,
)
from mobius.planner.plan import Plan
from mobius.planner.shape import ModelShape

FILLED_SHARE = 0.9
"""Of the GPU memory a rank may use, what options may fill; the rest is for the allocator's fragments."""
WORKSPACE_BYTES = GIB
"""What kernels and messages take beside the stages."""
MAX_SLOTS = 3
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
    keeps_activations: bool,
) -> FittedPlan:
    """Check that `plan` fits into `gpu_bytes` (None: unknown, on a CPU) and use what is left of them.

    First a further slot, if there is prefetch at all; then the activations of the last stage of `rank`, whose backward
    follows its forward at once. With `keeps_activations` all stages keep theirs. Raises GpuMemoryError.
    """

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
            keeps_activations=keeps_activations,
        )

    own = plan.stages_of(rank)
    if gpu_bytes is None:
        return FittedPlan(plan, frozenset(own) if keeps_activations else frozenset())
    check_gpu_memory(need_of(plan), available_bytes=gpu_bytes, is_offloading=plan.num_slots is not None)
    if keeps_activations:
        return FittedPlan(plan, frozenset(own))
    usable = int(gpu_bytes * FILLED_SHARE) - WORKSPACE_BYTES
    if plan.num_slots is not None and 1 < plan.num_slots < min(MAX_SLOTS, plan.stages_per_rank):
        wider = replace(plan, num_slots=MAX_SLOTS)
        plan = wider if need_of(wider).total <= usable else plan
    last = plan.spans[own[-1]]
    # Of the model's last stage one microbatch is under way at a time, and one layer's activations are there anyhow.
    num_graphs = len(last.layers) - 1 if last.is_last else len(last.layers) * tokens.num_microbatches
    kept = num_graphs * layer_activation_bytes(shape, sizes, tokens.microbatch)
    fits = need_of(plan).total + kept <= usable
    return FittedPlan(plan, frozenset((last.stage,)) if fits else frozenset())
