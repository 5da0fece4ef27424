"""Message for a GPU that ran out of memory: the plan, and the smallest change that frees memory."""

from __future__ import annotations

import torch

from mobius.config.config import ActivationOffloading, Recompute
from mobius.errors import GpuMemoryError, first_line
from mobius.limits import max_prefetched
from mobius.schedule.plan import Plan
from mobius.training.run_setup import RunSetup


def out_of_memory(error: torch.OutOfMemoryError, rank: int, run_setup: RunSetup | None = None) -> GpuMemoryError:
    """Return the error to raise instead of `error`, with its notes; `run_setup` is None if there is no plan yet."""
    text = f"rank {rank} ran out of GPU memory: {first_line(error)}"
    if run_setup is None:
        text += (
            " To fit: raise --num_stages (smaller stages), raise --num_chunks (smaller microbatches), lower "
            "--resident_stages, --batch_size or --seq_length, or use --use_offload if it is off."
        )
    else:
        text += f"\nThe plan was: {describe_use(run_setup.plan)}. The smallest change: {smallest_change(run_setup)}."
    failure = GpuMemoryError(text)
    for note in getattr(error, "__notes__", ()):
        failure.add_note(note)
    return failure


def smallest_change(run_setup: RunSetup) -> str:
    """Return the option that saves memory and slows a step least; only the last choice changes the training."""
    config, plan = run_setup.config.pipeline, run_setup.plan
    num_resident = max(plan.use_of(rank).num_resident for rank in range(plan.num_ranks))
    rows = run_setup.result.request.rows
    chunks = [n for n in range(plan.num_chunks + 1, rows + 1) if rows % n == 0]
    rounds = [n for n in range(plan.num_rounds + 1, plan.num_chunks + 1) if plan.num_chunks % n == 0]
    stages = range(plan.num_stages + plan.num_ranks, run_setup.shape.num_layers + 1, plan.num_ranks)
    if config.recompute is not Recompute.FULL and (plan.saved_activation_stages or not config.use_offload):
        return "--recompute full, so that no stage saves its activations"
    if plan.saved_attention_stages:
        return "--recompute full, so that attention's results are not saved"
    if not config.use_offload:
        return "--use_offload"
    if num_resident:
        return f"--resident_stages {num_resident - 1}"
    if (
        config.activation_offloading is not ActivationOffloading.ON
        and not plan.offloaded_activation_stages
        and _offloading_helps(plan)
    ):
        return "--activation_offloading on (activations wait in host memory)"
    if rounds:
        return f"--num_rounds {rounds[0]} (activations of fewer microbatches at a time)"
    if chunks:
        return f"--num_chunks {chunks[0]} (smaller microbatches)"
    if stages:
        return f"--num_stages {stages[0]} (smaller stages)"
    return "a lower --seq_length"


def _offloading_helps(plan: Plan) -> bool:
    """Whether offloading would reduce the layer inputs on the GPU: only inputs that are being copied stay there."""
    for rank in range(plan.num_ranks):
        layers = [len(plan.cuts[stage].layers) for stage in plan.local_stages(rank) if not plan.cuts[stage].is_last]
        if sum(layers) * plan.microbatches_per_round > max(layers, default=0) * min(
            max_prefetched(plan.copy_lookahead), plan.microbatches_per_round
        ):
            return True
    return False


def describe_use(plan: Plan) -> str:
    """Describe a plan's use of GPU memory."""
    uses = [plan.use_of(rank) for rank in range(plan.num_ranks)]

    def numbers(name: str) -> str:
        values = [getattr(use, name) for use in uses]
        return str(values[0]) if len(set(values)) == 1 else " ".join(map(str, values))

    return (
        f"{plan.num_stages} stages on {plan.num_ranks} rank(s), {plan.describe_microbatches()}; "
        f"stages per rank: {numbers('num_resident')} resident, {numbers('num_saving_activations')} save activations, "
        f"{numbers('num_offloading_activations')} offload activations; {numbers('num_slots')} slots"
    )
