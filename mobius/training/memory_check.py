"""Rehearsal: each rank runs a step on zero weights before it reads weights; a plan that does not fit is replaced.

    allocate -> run a step on zeros -> all ranks agree -> it fits: read the weights
        ^                               |
        +------ plan again with <-------+ out of memory, or less than the margin is free
                the measured bytes

The planner predicts bytes; the rehearsal measures them with the run's kernels, allocator and memory limit. It runs only
the rounds of microbatches that are needed to reach the peak (`warmup_plan`). If a rank runs out of memory here, nothing
has been read, no other rank waits for messages of this rank, and all ranks can use another plan.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mobius.data.batches import Batch
from mobius.distributed.transport import (
    ActivationTransport,
    RankGroup,
    SingleRankTransport,
    Transport,
    WarmupTransport,
    all_gather_numbers,
)
from mobius.engine.documents import Rows
from mobius.engine.step_inputs import StepBatch
from mobius.errors import GpuMemoryError, HostMemoryError, PlanError
from mobius.hardware.devices import MemoryMeter, free_cached_memory
from mobius.planner.planning import replan_with_reserve
from mobius.schedule.build import build_unchecked
from mobius.schedule.plan import Plan
from mobius.training.out_of_memory import describe_use, out_of_memory
from mobius.training.run_setup import RunSetup
from mobius.training.stages import RankStages
from mobius.training.step_batches import (
    document_tensors,
    pinned_values,
    target_rows,
    warmup_fields,
    with_dropout_keys,
)
from mobius.units import GIB, format_bytes

logger = logging.getLogger(__name__)

MEMORY_MARGIN_FRACTION = 0.01
"""Share of the usable memory that a step must leave free, because the allocator's blocks vary its use by that much."""
MAPPED_MARGIN = 0.01
"""Share of the limit by which mapped host memory may exceed the limit: plans do not count the padding of parameters."""
RESERVE_FRACTIONS = (0.02, 0.06, 0.18)
"""Minimum shares of the usable memory that the second, third and fourth plan must leave free. Guesses, because the need
of a step that ran out of memory is unknown."""


@dataclass(frozen=True)
class WarmupResult:
    """Outcome of a rehearsal step on this rank's GPU."""

    peak_bytes: int
    """Peak of the bytes that torch allocated."""
    out_of_memory_error: torch.OutOfMemoryError | None = None

    def excess_bytes(self, predicted: int, usable: int, *, step: float) -> int:
        """Return the bytes that the next plan must leave free, with share `step` of `usable`; 0 if this plan fits."""
        if self.out_of_memory_error is None and self.peak_bytes <= (1 - MEMORY_MARGIN_FRACTION) * usable:
            return 0
        taken = self.peak_bytes if self.out_of_memory_error is None else max(self.peak_bytes, usable)
        return max(taken - predicted, 0) + int(step * usable)


def allocate_stages_that_fit(
    run_setup: RunSetup, transport: Transport, allocate: Callable[[RunSetup], RankStages]
) -> tuple[RunSetup, RankStages]:
    """Return the setup with the plan that fits, and its stages in zeroed memory; collective.

    `allocate` creates the stages of a setup. On a CPU no step runs. If a step does not fit on some rank, all ranks plan
    again with less memory (`replan_with_reserve`). Raises GpuMemoryError if no plan fits, or if a given plan (`--plan`
    or a checkpoint's) does not fit, and the errors of `allocate`. With replicas, the run ends if a rank runs out of
    memory, because replicas reduce gradients in this step.
    """
    if run_setup.device.type != "cuda":
        return run_setup, allocate(run_setup)
    rank, all_ranks = run_setup.ranks.pipeline_rank, transport.all_ranks
    for step in (*RESERVE_FRACTIONS, None):
        stages, outcome = _allocate_and_run(run_setup, allocate)
        need, usable = run_setup.result.gpu_estimates[rank].total, run_setup.result.request.gpu_bytes
        assert usable is not None, "a GPU has memory"
        usable += run_setup.result.request.reserve_bytes
        excess = outcome.excess_bytes(need, usable, step=step or 0.0)
        table = all_gather_numbers(
            all_ranks, [excess, outcome.out_of_memory_error is not None, need, outcome.peak_bytes, usable]
        )
        if stages is not None and not table[:, :2].any():
            return run_setup, stages
        if stages is not None:
            stages.close()
        del stages
        free_cached_memory(run_setup.device)  # a new plan may measure layers again
        planned = None if step is None else _replan_all_ranks(run_setup, int(table[:, 0].max()), all_ranks)
        if planned is None:
            break
        run_setup = planned
        _log_new_plan(run_setup, table)
    if not table[:, 1].any():  # the step fits, but leaves less than the margin
        stages, outcome = _allocate_and_run(run_setup, allocate)
        if stages is not None:
            return run_setup, stages
    error = outcome.out_of_memory_error or torch.OutOfMemoryError(
        "another rank's step does not fit into its GPU memory."
    )
    raise out_of_memory(error, run_setup.ranks.rank, run_setup) from error


def check_mapped_bytes(run_setup: RunSetup, stages: RankStages, transport: Transport) -> None:
    """Raise HostMemoryError if the ranks have mapped more host memory than `--host_memory_limit`; collective.

    The planner counted less than the limit. The message lists the mapped memory by purpose.
    """
    limit, mapped = run_setup.config.pipeline.host_memory_limit, stages.mapped_bytes()
    if limit is None:
        return
    estimate = run_setup.result.host_estimate
    own = all_gather_numbers(transport.all_ranks, [*mapped.values()]).sum(0) / run_setup.ranks.num_replicas
    processes, available = estimate.num_ranks * estimate.process_bytes, limit * GIB / run_setup.pipelines_per_host
    if float(own.sum()) + processes > (1 + MAPPED_MARGIN) * available:
        of_parts = sorted(zip(own.tolist(), mapped, strict=True), reverse=True)
        sizes = ", ".join(f"{format_bytes(size)} of {name}" for size, name in of_parts if size)
        raise HostMemoryError(
            f"the stages have mapped {format_bytes(float(own.sum()))} of host memory ({sizes}). With "
            f"{format_bytes(processes)} for the processes, this is more than --host_memory_limit {limit:g}; the plan "
            f"counted {format_bytes(estimate.total)}. Raise the limit, or use less host memory: more "
            "--resident_stages, --optimizer_states compact, --offload_states_to."
        )


def _replan_all_ranks(run_setup: RunSetup, reserve_bytes: int, all_ranks: RankGroup) -> RunSetup | None:
    """Return the setup with a new plan that leaves `reserve_bytes` free; None if a rank finds none. Collective."""
    planned = None
    if not run_setup.result.is_given:
        with suppress(GpuMemoryError, HostMemoryError, PlanError):
            result = replan_with_reserve(run_setup.result, run_setup.parts, run_setup.device, reserve_bytes)
            planned = replace(run_setup, result=result)
    is_new = planned is not None and planned.plan != run_setup.plan
    return planned if all_gather_numbers(all_ranks, [is_new]).all() else None


def _log_new_plan(run_setup: RunSetup, table: Tensor) -> None:
    """Log the new plan on the first rank; `table` has a row of rehearsal numbers for each rank."""
    worst = int(table[:, 0].argmax())
    _, out_of_memory_error, *numbers = map(int, table[worst].tolist())
    predicted, peak, usable = map(format_bytes, numbers)
    if run_setup.ranks.is_first:
        logger.info(
            "rehearsal: a step took %s of GPU memory on rank %d; predicted: %s, usable: %s. New plan: %s",
            "all" if out_of_memory_error else peak,
            worst,
            predicted,
            usable,
            describe_use(run_setup.plan),
        )


def _allocate_and_run(
    run_setup: RunSetup, allocate: Callable[[RunSetup], RankStages]
) -> tuple[RankStages | None, WarmupResult]:
    """Allocate the stages and run a step; return the stages (None if memory ran out) and the outcome of the step."""
    device, need = (
        run_setup.device,
        run_setup.result.gpu_estimates[run_setup.ranks.pipeline_rank].total,
    )
    stages: RankStages | None = None
    free_cached_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    retries = torch.cuda.memory_stats(device)["num_alloc_retries"]
    try:
        stages = allocate(run_setup)
        run_warmup_step(run_setup, stages)
        stats = torch.cuda.memory_stats(device)
        if stats["num_alloc_retries"] > retries or stats["reserved_bytes.all.peak"] > need:
            # Autotuning took memory, or blocks are fragmented: measure again without these effects.
            free_cached_memory(device)
            torch.cuda.reset_peak_memory_stats(device)
            run_warmup_step(run_setup, stages)
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # frames keep tensors alive
        error.__traceback__ = None
        if stages is not None:
            MemoryMeter(device).synchronize()
            stages.close()
        stages = None
        outcome = WarmupResult(torch.cuda.max_memory_allocated(device), error)
    else:
        outcome = WarmupResult(torch.cuda.max_memory_allocated(device))
    gc.collect()  # reference cycles of compilers keep activations alive
    return stages, outcome


def run_warmup_step(run_setup: RunSetup, stages: RankStages) -> None:
    """Run a step of this rank alone on synthetic data, so that kernels and memory are ready for the first real step.

    Weights and optimizer state do not change; the first real step overwrites the gradients.
    """
    request = run_setup.result.request
    plan = warmup_plan(run_setup.plan)
    seq_length = run_setup.config.data.seq_length
    num_rows = request.microbatch_rows * plan.num_chunks
    # The embedding's backward allocates memory for each distinct token, so the tokens are distinct.
    tokens = torch.arange(num_rows * seq_length).remainder(run_setup.shape.vocab_size).view(num_rows, seq_length)
    rows: Rows = [[seq_length]] if request.packed is None else [request.packed.fullest_row(seq_length)]
    rows = [*rows] * num_rows
    documents = document_tensors(rows, run_setup, num_microbatches=plan.num_chunks)
    array = tokens.numpy()
    synthetic = Batch(array, array, array.size, array.size, num_rows, 0.0, **warmup_fields(run_setup, rows))
    batch = StepBatch(
        tokens,
        tokens,
        tokens.numel(),
        tokens.numel(),
        num_rows,
        documents=documents,
        document_lengths=rows,
        counts=run_setup.objective.counts(target_rows(synthetic)),
        **pinned_values([with_dropout_keys(synthetic, run_setup, 0)], run_setup),
    )
    transport = warmup_transport(run_setup, plan.max_sends_in_flight)
    stages.executor(build_unchecked(plan), transport).run(
        batch, on_gradients_ready=lambda stage: stages.memory[stage].states.discard_gradients()
    )
    MemoryMeter(run_setup.device).synchronize()


def warmup_plan(plan: Plan) -> Plan:
    """Return the plan with the fewest rounds that reach its peak memory.

    Breadth first, gradient sums are copied between two rounds; depth first, three rounds overlap.
    """
    rounds = min(plan.num_rounds, 3 if plan.is_depth_first else 2)
    return replace(plan, num_rounds=rounds, num_microbatches=plan.microbatches_per_round * rounds)


def warmup_transport(run_setup: RunSetup, max_pending_sends: int) -> ActivationTransport:
    """Return a transport for this rank alone, which may hold as many sent messages as the real transport."""
    if run_setup.plan.num_ranks == 1:
        return SingleRankTransport()
    return WarmupTransport(
        rank=run_setup.ranks.pipeline_rank,
        device=run_setup.device,
        message_format=run_setup.message_format,
        max_pending_sends=max_pending_sends,
    )
