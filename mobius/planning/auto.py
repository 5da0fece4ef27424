"""Resolves `--num_stages auto` and `--num_chunks auto` before a run is planned, and checks that all ranks agree.

It only asks plan/choice.py, with an estimate for the GPU that is there, or with what was measured on it. Every rank
asks for itself, so the question must be the same on all of them: it goes by the card's memory, not by what is free.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mobius.config.config import Config, Dtype, PipelineConfig
from mobius.errors import PlanError
from mobius.messages.transport import Transport
from mobius.plan.budget import CPU_PROCESS_BYTES, gpu_process_bytes
from mobius.plan.cards import Card, Host, card_of_device
from mobius.plan.choice import choose_stages_and_chunks
from mobius.plan.partition import StageSpan
from mobius.plan.plan import Plan
from mobius.plan.profile import Profile
from mobius.plan.shape import ModelShape
from mobius.plan.stage_costs import StepRules
from mobius.plan.what_if import Machine, Run, machine_profile, make_job
from mobius.ranks import allows_peer_copies
from mobius.units import GIB

logger = logging.getLogger(__name__)

DIGEST_BITS = 20


def measures_at_start(asked: Config) -> bool:
    """Whether a run on GPUs measures layers (for `auto`) or the host (if it streams) before its stages take memory."""
    return measures_layers(asked) or measures_host(asked)


def measures_layers(asked: Config) -> bool:
    """Whether what a measurement tells has a choice to make that is worth its seconds."""
    return asked.pipeline.num_stages is None


def measures_host(asked: Config) -> bool:
    """Whether the run streams, and its plan is not a given one."""
    return asked.pipeline.use_offload and asked.planning.plan is None


def usual_process_bytes(asked: Config, plan: Plan, *, on_cpu: bool) -> int:
    """Host bytes of a rank beside its stages, if it has run nothing before."""
    if on_cpu:
        return CPU_PROCESS_BYTES
    return gpu_process_bytes(streams=plan.num_slots is not None, measures=measures_at_start(asked))


@dataclass(frozen=True)
class Gpu:
    """What each rank computes on, the same on all of them."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Resolved:
    """A config without auto, and the cut that goes with it; None: an even one."""

    config: Config
    spans: Sequence[StageSpan] | None


def resolve_auto(
    config: Config, shape: ModelShape, *, num_ranks: int, gpu: Gpu | None, measured: Profile | None = None
) -> Resolved:
    """Put numbers in the place of auto, and tell which; without auto, nothing changes.

    By `measured` if there is a profile, whose microbatches `config` must then have, else by an estimate. Where there is
    none (a CPU, an unknown GPU, fp32) the numbers are the defaults, or the nearest that are possible. Raises
    GpuMemoryError if no setting fits.
    """
    pipeline = config.pipeline
    if pipeline.num_stages is not None and pipeline.num_chunks is not None:
        return Resolved(config, None)
    card = known_card(config, gpu)
    if gpu is None or (card is None and measured is None):
        return _resolve_without_estimate(config, shape, num_ranks)
    # Of a card that is not known only the memory counts: its rates are measured.
    card = card or Card(gpu.name, tera_flops=1, memory_gb=gpu.num_bytes / GIB, memory_bandwidth=1, pcie=3)
    job = make_job(_machine(card, gpu, num_ranks), run_of(config, shape), measured=measured)
    cuts_unevenly = pipeline.num_stages is None  # who gives the number of stages gets even ones
    choice = choose_stages_and_chunks(
        job, num_stages=pipeline.num_stages, num_chunks=pipeline.num_chunks, cuts_unevenly=cuts_unevenly
    )
    best = choice.best
    for notice in choice.notices:
        logger.info("%s", notice)
    chosen = replace(pipeline, num_stages=best.num_stages, num_chunks=best.num_chunks)
    logger.info(
        "chosen: --num_stages %d --num_chunks %d, layers per stage %s; %.3g s per step by %s",
        best.num_stages,
        best.num_chunks,
        " ".join(str(len(span.layers)) for span in best.spans),
        best.prediction.step_seconds,
        best.profile.describe(),
    )
    return Resolved(replace(config, pipeline=chosen), best.spans)


def known_card(config: Config, gpu: Gpu | None) -> Card | None:
    """The card of which there is an estimate for this run; not for fp32, which data sheets give no rate for."""
    return None if gpu is None or config.model.dtype is Dtype.FP32 else card_of_device(gpu.name)


def estimate_of(config: Config, shape: ModelShape, *, num_ranks: int, gpu: Gpu | None) -> Profile | None:
    """The estimate for a run whose microbatches are known; None where there is none."""
    card = known_card(config, gpu)
    if card is None or gpu is None:
        return None
    tokens, length = config.pipeline.microbatch_size * config.data.seq_length, config.data.seq_length
    machine = _machine(card, gpu, num_ranks)
    return machine_profile(machine, shape, microbatch_tokens=tokens, seq_length=length)


def step_rules(config: Config, shape: ModelShape) -> StepRules:
    """How the steps of a run go whose microbatches are known."""
    run = run_of(config, shape)
    return run.rules(config.pipeline.num_microbatches)


def _machine(card: Card, gpu: Gpu, num_ranks: int) -> Machine:
    cores = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    own = replace(card, memory_gb=gpu.num_bytes / GIB, has_peer_copies=card.has_peer_copies and allows_peer_copies())
    return Machine(own if allows_peer_copies() else replace(own, nvlink=0.0), num_ranks, Host(cores_per_rank=cores))


def run_of(config: Config, shape: ModelShape) -> Run:
    """What is to be trained, as the planner sees it."""
    pipeline = config.pipeline
    return Run(
        shape,
        batch_size=pipeline.batch_size,
        seq_length=config.data.seq_length,
        num_stages=pipeline.num_stages,
        num_chunks=pipeline.num_chunks,
        gpu_memory_limit=pipeline.gpu_memory_limit,
        use_offload=pipeline.use_offload,
        num_resident=pipeline.num_resident_stages,
        recompute=pipeline.recompute,
        # Loss scaling waits for all gradients as clipping does.
        clips=config.optim.max_grad_norm > 0 or config.model.dtype is Dtype.FP16,
        overlaps_optimizer=pipeline.overlap_optimizer,
        use_prefetch=pipeline.use_prefetch,
        loss_chunk_tokens=pipeline.loss_chunk_tokens,
        dtype=config.model.dtype,
        has_fp32_gradients=pipeline.fp32_gradients,
    )


def _resolve_without_estimate(config: Config, shape: ModelShape, num_ranks: int) -> Resolved:
    """The defaults' numbers where they are possible, else the largest below them that are."""
    pipeline, usual = config.pipeline, PipelineConfig()
    assert usual.num_stages is not None
    stages, chunks = pipeline.num_stages, pipeline.num_chunks
    if stages is None:
        most = min(max(usual.num_stages, num_ranks), shape.num_layers)
        stages = max(num_ranks, most // num_ranks * num_ranks)
    if chunks is None:
        most = max(usual.num_microbatches, num_ranks)
        chunks = max(n for n in range(1, most + 1) if pipeline.batch_size % n == 0)
    logger.info("chosen without an estimate for this device: --num_stages %d --num_chunks %d", stages, chunks)
    return Resolved(replace(config, pipeline=replace(pipeline, num_stages=stages, num_chunks=chunks)), None)


def check_agreement(plan: Plan, transport: Transport) -> None:
    """Raise PlanError if the ranks have cut the model or the batch differently; collective."""
    facts = repr((plan.num_microbatches, plan.spans)).encode()
    own = int(hashlib.sha256(facts).hexdigest(), 16) % 2**DIGEST_BITS
    # All are equal if and only if their variance is 0; the numbers are small enough to be exact.
    sums = transport.sum_over_ranks(torch.tensor([own, own * own], dtype=torch.float64)).tolist()
    if transport.num_ranks * int(sums[1]) != int(sums[0]) ** 2:
        raise PlanError(
            "the ranks came to different plans, so their GPUs or CPUs differ. Give the numbers instead of auto: "
            f"--num_stages {plan.num_stages} --num_chunks {plan.num_microbatches} (rank {transport.rank}'s)."
        )
