"""The message of a run whose GPU has no memory left: its plan, and the smallest change that leaves more free."""

from __future__ import annotations

import torch

from mobius.config.config import ActivationOffloading, Recompute
from mobius.errors import GpuMemoryError, first_line
from mobius.limits import max_fetched
from mobius.plan.plan import Plan
from mobius.planning.blueprint import Blueprint


def out_of_memory(error: torch.OutOfMemoryError, rank: int, blueprint: Blueprint | None = None) -> GpuMemoryError:
    """The error to raise in place of `error`, with its notes; `blueprint` is the run's where that got so far."""
    told = f"rank {rank} ran out of GPU memory: {first_line(error)}"
    if blueprint is None:
        told += (
            " To fit: raise --num_stages (smaller stages), raise --num_chunks (smaller microbatches), lower "
            "--resident_stages, --batch_size or --seq_length, or use --use_offload if it is off."
        )
    else:
        told += f"\nThe plan was: {_plan_text(blueprint, rank)}. The smallest change: {smallest_change(blueprint)}."
    failure = GpuMemoryError(told)
    for note in getattr(error, "__notes__", ()):
        failure.add_note(note)
    return failure


def smallest_change(blueprint: Blueprint) -> str:
    """The change that costs a step least, as it is typed; none of the first seven changes what is trained."""
    config, plan = blueprint.config.pipeline, blueprint.plan
    num_resident = max(plan.use_of(rank).num_resident for rank in range(plan.num_ranks))
    rows = blueprint.answer.request.rows
    chunks = [n for n in range(plan.num_chunks + 1, rows + 1) if rows % n == 0]
    rounds = [n for n in range(plan.num_rounds + 1, plan.num_chunks + 1) if plan.num_chunks % n == 0]
    stages = range(plan.num_stages + plan.num_ranks, blueprint.shape.num_layers + 1, plan.num_ranks)
    if config.recompute is not Recompute.FULL and (plan.kept or not config.use_offload):
        return "--recompute full, so that no stage keeps its activations"
    if plan.attention_kept:
        return "--recompute full, so that attention's results are not kept"
    if not config.use_offload:
        return "--use_offload"
    if num_resident:
        return f"--resident_stages {num_resident - 1}"
    if config.activation_offloading is not ActivationOffloading.ON and not plan.stashed and _stashes_help(plan):
        return "--activation_offloading on (activations wait in CPU memory)"
    if rounds:
        return f"--num_rounds {rounds[0]} (activations of fewer microbatches at a time)"
    if chunks:
        return f"--num_chunks {chunks[0]} (smaller microbatches)"
    if stages:
        return f"--num_stages {stages[0]} (smaller stages)"
    return "a lower --seq_length"


def _stashes_help(plan: Plan) -> bool:
    """Whether fewer inputs of layers are under way to the host and back than wait on the GPU now."""
    for rank in range(plan.num_ranks):
        layers = [len(plan.cuts[stage].layers) for stage in plan.stages_of(rank) if not plan.cuts[stage].is_last]
        if sum(layers) * plan.round_size > max(layers, default=0) * min(max_fetched(plan.reach), plan.round_size):
            return True
    return False


def _plan_text(blueprint: Blueprint, rank: int) -> str:
    plan, use = blueprint.plan, blueprint.plan.use_of(rank)
    return (
        f"{plan.num_stages} stages on {plan.num_ranks} rank(s), {plan.describe_microbatches()}; on rank {rank} "
        f"{use.num_resident} stage(s) resident, {use.num_kept} keep their activations, {use.num_stashed} stash them on "
        f"the host, {use.num_slots} slot(s)"
    )
