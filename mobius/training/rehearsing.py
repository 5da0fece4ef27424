"""Proves a plan on the GPU before weights are read: each rank plays a step, and a plan that does not fit is replaced.

    take memory -> play on zeros -> all ranks agree -> it fits: read the weights
        ^                               |
        +------ plan again with <-------+ it ran out of memory, or left less than the margin
                what was measured

The planner predicts bytes; the rehearsal measures them, with the run's own kernels, allocator and limit. It plays one
round of microbatches, or two where sums travel between rounds: later ones repeat them. A rank that runs out of memory
here has read nothing yet, no other rank waits for its messages, and all can go on with another plan.
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

from mobius.errors import GpuMemoryError, HostMemoryError, PlanError
from mobius.limits import max_sends_under_way
from mobius.machine.devices import MemoryMeter, free_cached_memory
from mobius.messages.rehearsal import RehearsalTransport
from mobius.messages.transport import Assembly, Messages, SingleRankTransport, Transport
from mobius.plan.plan import Plan
from mobius.plan.simulation import schedule_of
from mobius.planning.blueprint import Blueprint, plan_with_less
from mobius.runtime.documents import Rows
from mobius.runtime.executor import StepBatch
from mobius.training.out_of_memory import out_of_memory
from mobius.training.stages import RankStages
from mobius.training.step_batches import document_tensors
from mobius.training.trainer import numbers_of_ranks
from mobius.units import bytes_text

logger = logging.getLogger(__name__)

MARGIN = 0.01
"""Share of the memory that may be used which a step must leave: the allocator's blocks vary that much between steps."""
STEPS = (0.02, 0.06, 0.18)
"""Share of the memory by which each further plan is made smaller than what was predicted for the one before, at least:
what a step that ran out would have taken is not known."""


@dataclass(frozen=True)
class Rehearsal:
    """Outcome of a step that was played on this rank's GPU."""

    peak_bytes: int
    """Most that torch had allocated."""
    ran_out: torch.OutOfMemoryError | None = None

    def excess_bytes(self, predicted: int, usable: int, *, step: float) -> int:
        """Bytes that the next plan is to leave free, `step` of `usable` among them; 0 if this one fits."""
        if self.ran_out is None and self.peak_bytes <= (1 - MARGIN) * usable:
            return 0
        taken = self.peak_bytes if self.ran_out is None else max(self.peak_bytes, usable)
        return max(taken - predicted, 0) + int(step * usable)


def take_stages(
    blueprint: Blueprint, transport: Transport, take: Callable[[Blueprint], RankStages]
) -> tuple[Blueprint, RankStages]:
    """Stages in zeroed memory, and the blueprint whose plan a step was played with; collective.

    `take` makes the stages of a blueprint. On a CPU nothing is played. Where a step does not fit on some rank, all
    ranks plan again with less memory (`plan_with_less`). Raises GpuMemoryError if no plan fits, or the one that does
    not is given (`--plan`, a checkpoint's), and what `take` raises. Replicas add up gradients while they play: there a
    rank that runs out ends the run.
    """
    if blueprint.place.device.type != "cuda":
        return blueprint, take(blueprint)
    rank, everyone = blueprint.place.ranks.place, transport.everyone
    for step in (*STEPS, None):
        stages, outcome = _taken_and_played(blueprint, take)
        need, usable = blueprint.answer.needs[rank].total, blueprint.answer.request.gpu_bytes
        assert usable is not None, "a GPU has memory"
        usable += blueprint.answer.request.reserve_bytes
        excess = outcome.excess_bytes(need, usable, step=step or 0.0)
        table = numbers_of_ranks(everyone, [excess, outcome.ran_out is not None, need, outcome.peak_bytes, usable])
        if stages is not None and not table[:, :2].any():
            return blueprint, stages
        if stages is not None:
            stages.close()
        del stages
        free_cached_memory(blueprint.place.device)  # layers may be measured again
        planned = None if step is None else _planned_again(blueprint, int(table[:, 0].max()), everyone)
        if planned is None:
            break
        blueprint = planned
        _log_new_plan(blueprint, table)
    if not table[:, 1].any():  # it fits, and leaves less than the margin
        stages, outcome = _taken_and_played(blueprint, take)
        if stages is not None:
            return blueprint, stages
    error = outcome.ran_out or torch.OutOfMemoryError("another rank's step does not fit into its GPU memory.")
    raise out_of_memory(error, blueprint.place.ranks.rank, blueprint) from error


def _planned_again(blueprint: Blueprint, reserve_bytes: int, everyone: Assembly) -> Blueprint | None:
    """Another plan with more memory left free; None, on all ranks alike, if some rank has none. Collective."""
    planned = None
    if not blueprint.is_given:
        with suppress(GpuMemoryError, HostMemoryError, PlanError):
            planned = plan_with_less(blueprint, reserve_bytes)
    is_new = planned is not None and planned.plan != blueprint.plan
    return planned if numbers_of_ranks(everyone, [is_new]).all() else None


def _log_new_plan(blueprint: Blueprint, table: Tensor) -> None:
    """One line on the first rank; `table` has the numbers of the rehearsal by rank."""
    worst = int(table[:, 0].argmax())
    _, ran_out, *numbers = map(int, table[worst].tolist())
    predicted, peak, usable = map(bytes_text, numbers)
    if blueprint.place.ranks.is_first:
        logger.info(
            "rehearsal: a step took %s of GPU memory on rank %d, %s was predicted and %s may be used; new plan: %s",
            "all" if ran_out else peak,
            worst,
            predicted,
            usable,
            describe_use(blueprint.plan),
        )


def _taken_and_played(
    blueprint: Blueprint, take: Callable[[Blueprint], RankStages]
) -> tuple[RankStages | None, Rehearsal]:
    """The stages and what a step with them took; no stages where that was too much."""
    device, need = blueprint.place.device, blueprint.answer.needs[blueprint.place.ranks.place].total
    stages: RankStages | None = None
    free_cached_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    retries = torch.cuda.memory_stats(device)["num_alloc_retries"]
    try:
        stages = take(blueprint)
        play_step(blueprint, stages)
        seen = torch.cuda.memory_stats(device)
        if seen["num_alloc_retries"] > retries or seen["reserved_bytes.all.peak"] > need:
            # Kernels that were tuned took memory of their own, or blocks were cut in pieces: a step without that tells.
            free_cached_memory(device)
            torch.cuda.reset_peak_memory_stats(device)
            play_step(blueprint, stages)
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # which hold tensors
        error.__traceback__ = None
        if stages is not None:
            MemoryMeter(device).synchronize()
            stages.close()
        stages = None
        outcome = Rehearsal(torch.cuda.max_memory_allocated(device), error)
    else:
        outcome = Rehearsal(torch.cuda.max_memory_allocated(device))
    gc.collect()  # what compilers leave in circles holds activations
    return stages, outcome


def play_step(blueprint: Blueprint, stages: RankStages) -> None:
    """Play a step of this rank alone on made-up data; the first real one then finds kernels and memory ready.

    Leaves weights and optimizer as they are; the gradients it makes are overwritten by the first step's.
    """
    place, request = blueprint.place, blueprint.answer.request
    plan = shortened(blueprint.plan)
    seq_length = blueprint.config.data.seq_length
    num_rows = request.microbatch_rows * plan.num_chunks
    # Different tokens: the embedding's backward takes memory for each that occurs.
    tokens = torch.arange(num_rows * seq_length).remainder(blueprint.shape.vocab_size).view(num_rows, seq_length)
    rows: Rows = [[seq_length]] if request.packed is None else [request.packed.fullest_row(seq_length)]
    documents = document_tensors([*rows] * num_rows, blueprint, num_microbatches=plan.num_chunks)
    batch = StepBatch(tokens, tokens, tokens.numel(), tokens.numel(), num_rows, documents=documents)
    stages.executor(schedule_of(plan), _alone(blueprint)).run(batch)
    MemoryMeter(place.device).synchronize()


def shortened(plan: Plan) -> Plan:
    """The plan of a step with the fewest rounds that reach its peak: two where there are more, as sums then travel."""
    rounds = min(plan.num_rounds, 2)
    return replace(plan, num_rounds=rounds, num_microbatches=plan.round_size * rounds)


def describe_use(plan: Plan) -> str:
    """Text of a plan's use of GPU memory."""
    uses = [plan.use_of(rank) for rank in range(plan.num_ranks)]

    def numbers(name: str) -> str:
        found = [getattr(use, name) for use in uses]
        return str(found[0]) if len(set(found)) == 1 else " ".join(map(str, found))

    return (
        f"{plan.num_stages} stages, {plan.describe_microbatches()}; of each rank {numbers('num_resident')} resident, "
        f"{numbers('num_kept')} save their activations, {numbers('num_stashed')} offload theirs, "
        f"{numbers('num_slots')} slots"
    )


def _alone(blueprint: Blueprint) -> Messages:
    if blueprint.plan.num_ranks == 1:
        return SingleRankTransport()
    return RehearsalTransport(
        rank=blueprint.place.ranks.place,
        device=blueprint.place.device,
        shape=blueprint.sent_shape,
        dtype=blueprint.dtype,
        max_sends=max_sends_under_way(blueprint.plan.round_size),
    )
