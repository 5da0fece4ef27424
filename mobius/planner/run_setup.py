"""Draws a run before any large memory is taken: device, model, plan, schedule; checks that all of it fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from mobius.config.config import Config, Dtype, split_names
from mobius.distributed.device_order import order_devices
from mobius.distributed.node_checks import smallest_machine, smallest_of_all
from mobius.distributed.rendezvous import Rendezvous, join_node, join_pipeline
from mobius.distributed.transport import SingleRankTransport
from mobius.engine.pipelined_router_loss import sent_shape
from mobius.errors import GpuMemoryError, PlanError
from mobius.hardware.devices import (
    TORCH_DTYPES,
    cap_gpu_memory,
    check_dtype,
    choose_device,
    has_gpus,
    num_optimizer_threads,
)
from mobius.hardware.host_memory import available_host_bytes, own_host_bytes, total_host_bytes
from mobius.models.blocks import ModelParts
from mobius.models.family_support import checked_families, unpackable_reason, unsliceable_reason
from mobius.models.quantization import check_products
from mobius.models.router_loss import refuse_slices
from mobius.planner.disk_use import check_disks, check_folders, with_room_for_steps
from mobius.planner.fit import DoesNotFitError, may_keep_products
from mobius.planner.gpu_specs import SUSTAINED_SHARE, Host, gpu_spec_of_device
from mobius.planner.layer_bench import MicrobatchShape, measure_layer_bytes
from mobius.planner.measure import measure_product_rate
from mobius.planner.measured_disks import known_disks, try_disks
from mobius.planner.memory_estimates import estimate_host_memory, tile_tokens
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.plan_file import ModelDigest, SavedPlan, check_saved_plan
from mobius.planner.profile import DiskRates, Profile
from mobius.planner.remedies import check_host_memory, gpu_refusal
from mobius.planner.request import Machine, PlanRequest, compiles
from mobius.planner.solver import PlanResult, solve
from mobius.planner.timer import CollectiveTimer
from mobius.ranks import Ranks, allows_peer_copies, num_cpus_per_rank, set_cuda_max_connections
from mobius.schedule.build import build_schedule
from mobius.schedule.packed_rows import PackedRows
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import Plan
from mobius.schedule.schedule import Schedule
from mobius.units import GIB

logger = logging.getLogger(__name__)

PROBE_SECONDS, MILLION = 0.1, 10**6
SLOW_SHARE = 0.8
"""Share of a card's usual rate of large products below which a run chooses its numbers by the measured one."""
HOST_SHARE = 0.9
"""Share of the host's memory that activations are planned into; what is free is checked before any is taken."""


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Where this rank computes, and how it finds the others."""

    ranks: Ranks
    device: torch.device
    device_order: tuple[int, ...]
    """The index of the GPU of each of this node's ranks, if there are GPUs."""
    pipeline_rendezvous: Rendezvous | None
    """Where a pipeline's ranks with GPUs can meet before they have communicators."""
    node_rendezvous: Rendezvous | None = None
    """Where the node's ranks with GPUs can, those of several pipelines too."""
    replica_rendezvous: Rendezvous | None = None
    """Rendezvous of all replicas. Without torchrun its store is the first rank's process, while that holds it."""
    pipelines_per_host: int = 1
    """Pipelines that share this machine's host memory."""


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """Everything that is known before any large memory is taken or any rank is spoken to.

    It is the same on all ranks but for `rank_context`, and what goes by the memory that is free on the rank's GPU:
    resident stages, saved activations, slots, and what is predicted from those. Compute and messages are the same
    whatever other ranks do.
    """

    rank_context: RankContext
    parts: ModelParts
    result: PlanResult
    """The plan, its bytes and its predicted step, and the request that they answer."""
    schedule: Schedule
    is_given: bool = False
    """Whether the plan is that of a file or a checkpoint, which nothing that is measured changes."""

    @property
    def requested_config(self) -> Config:
        """The configuration as it was asked for."""
        return self.result.request.config

    @property
    def config(self) -> Config:
        """The configuration with numbers in the place of auto."""
        return self.result.request.resolved_config

    @property
    def plan(self) -> Plan:
        return self.result.plan

    @property
    def shape(self) -> ModelShape:
        return self.result.request.shape

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.requested_config.model.dtype]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Format in which summed gradients reach the optimizer."""
        return torch.float32 if self.requested_config.pipeline.fp32_gradients else self.dtype

    @property
    def optimizer_threads(self) -> int:
        """Threads of each rank's CPU optimizer and copies of checkpoints: as measured, else as CPUs let expect."""
        profile = self.result.profile
        measured = 0 if profile is None else profile.optimizer_threads
        return measured or num_optimizer_threads(self.rank_context.ranks.num_local)

    @property
    def reduced_format(self) -> str:
        """Format of the layers' optimizer states, if it is not the usual one; else empty."""
        return self.result.request.reduced_format

    @property
    def tile_tokens(self) -> int | None:
        """Tokens of the tiles that recomputed layers run in; None: they run whole."""
        return tile_tokens(self.result.request)

    @property
    def message_shape(self) -> tuple[int, int, int]:
        """Shape [B, L, H] of every activation and activation gradient between stages."""
        request = self.result.request
        return request.microbatch_rows, request.slice_length, request.shape.hidden_size

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape in which these are sent: followed by the numbers of routers, if these have a loss."""
        return sent_shape(self.message_shape, self.dtype, self.parts.router_loss)


def draft_run_setup(
    config: Config,
    ranks: Ranks,
    model_config: PretrainedConfig,
    *,
    saved: SavedPlan | None = None,
    packed: PackedRows | None = None,
    replica_rendezvous: Rendezvous | None = None,
) -> RunSetup:
    """Check that the run can fit before data are read and layers are compiled; its plan is a guess.

    Collective if ranks have GPUs, or there is a `replica_rendezvous`: that of all replicas, whose smallest machine is
    planned for. With `saved` (`--plan`) nothing is chosen, only checked; `config` must have taken its numbers. `packed`
    are the facts of packed rows, where they are known already.

    Raises PlanError, GpuMemoryError or HostMemoryError, each with its arithmetic.
    """
    pipeline = config.pipeline
    if pipeline.copy_messages or ranks.num_replicas > 1:
        set_cuda_max_connections()
    rendezvous, node = _join_others(ranks) if has_gpus(pipeline.device, ranks) else (None, None)
    device_order = tuple(range(ranks.num_local))
    # Each of several pipelines has the GPUs as listed.
    if rendezvous is not None and ranks.num_pipeline_ranks == ranks.num_local:
        device_order = order_devices(config, ranks.num_pipeline_ranks, rendezvous)
    device = choose_device(pipeline.device, ranks, device_order)
    check_dtype(config.model.dtype, device)
    check_products(config.model.matmul_dtype, device)
    free_bytes = cap_gpu_memory(device, pipeline.gpu_memory_limit)
    machine, pipelines_per_host = _machine(device, ranks, free_bytes), 1
    if replica_rendezvous is not None:
        total, free, pipelines_per_host = smallest_machine(
            replica_rendezvous, ranks, machine.total_bytes, machine.free_bytes
        )
        machine = replace(
            machine,
            total_bytes=total,
            free_bytes=free,
            host_bytes=None if machine.host_bytes is None else machine.host_bytes // pipelines_per_host,
            num_nodes=max(1, ranks.num_replicas // pipelines_per_host),
            node_link=config.planning.node_link or machine.node_link,
        )
    if (met := replica_rendezvous or rendezvous) is not None and machine.host_bytes is not None:
        limit = pipeline.host_memory_limit
        own = machine.host_bytes if limit is None else int(limit * GIB) // pipelines_per_host
        machine = replace(machine, agreed_host_bytes=smallest_of_all(met, own))
    check_folders(config)
    folders = split_names(config.pipeline.offload_states_to)
    if device.type == "cuda" and not ranks.local_rank and config.planning.disk_rate is None:
        try_disks(folders)
    machine = _with_disks(machine, folders, met)
    parts = ModelParts.of(config, model_config, device, compiled=compiles(config, machine))
    shape = parts.shape()
    agree: Callable[[int], int] = int if met is None else partial(smallest_of_all, met)
    machine = with_room_for_steps(machine, config, shape, is_possible=parts.stores_in_order, agree=agree)
    if saved is not None:
        digest = ModelDigest.of(shape, config.model.dtype)
        numbers = {"num_ranks": ranks.num_pipeline_ranks, "num_replicas": ranks.num_replicas}
        check_saved_plan(saved, Path(config.planning.plan or ""), model=digest, **numbers)
    rank_context = RankContext(
        ranks=ranks,
        device=device,
        device_order=device_order,
        pipeline_rendezvous=rendezvous,
        node_rendezvous=node,
        replica_rendezvous=replica_rendezvous,
        pipelines_per_host=pipelines_per_host,
    )
    given, request = None if saved is None else saved.plan, PlanRequest.of(config, shape, machine, packed)
    if given is None and not request.candidate.is_known and config.model.dtype is not Dtype.FP32:  # has no estimate
        request = replace(request, machine=with_product_share(machine, device, TORCH_DTYPES[config.model.dtype], met))
    found = _solve(parts, request, given=given, is_draft=True)
    return _run_setup(rank_context, parts, found, is_given=given is not None)


def _join_others(ranks: Ranks) -> tuple[Rendezvous | None, Rendezvous | None]:
    """Rendezvous of this rank's pipeline and of its node; None for one that is alone."""
    pipeline = join_pipeline(ranks) if ranks.num_pipeline_ranks > 1 else None
    return pipeline, pipeline if ranks.num_pipeline_ranks == ranks.num_local else join_node(ranks)


def complete_run_setup(draft: RunSetup, config: Config, *, packed: PackedRows | None = None) -> RunSetup:
    """Plan a drafted run, once its data are known: `packed` are the facts of packed rows, alike on all ranks.

    `config` is the draft's but for the number of steps. On a GPU a layer's memory is measured. Errors as
    `draft_run_setup`.
    """
    request, parts = draft.result.request, draft.parts
    if request.num_slices > 1 and (reason := unsliceable_reason(parts.config)) is not None:
        raise PlanError(f"--num_slices {request.num_slices}: {reason}")
    if config.pipeline.num_tile_tokens and (reason := checked_families().untileable_reason(parts.config.model_type)):
        raise PlanError(
            f"--tile_tokens {config.pipeline.tile_tokens}: layers of the family {parts.config.model_type!r} cannot run "
            f"in tiles ({reason}). Use off."
        )
    if parts.router_loss is not None:
        refuse_slices(request.num_slices)
    if packed is not None and (reason := unpackable_reason(parts.config)) is not None:
        raise PlanError(f"--packing {config.data.packing}: {reason}.")
    if packed is not None or request.num_slices > 1:  # no masks are made, which slices have no use for
        dtype = TORCH_DTYPES[config.model.dtype]
        device = draft.rank_context.device
        parts = ModelParts.of(config, parts.config, device, compiled=request.compiles, packed_dtype=dtype)
    asked = PlanRequest.of(config, request.shape, request.machine, packed)
    return _plan_again(replace(draft, parts=parts), asked)


def replan(run_setup: RunSetup, profile: Profile) -> RunSetup:
    """Plan again with a measured profile and the same microbatches; errors as `draft_run_setup`."""
    return _plan_again(run_setup, _open_again(run_setup), profile=profile, layer=run_setup.result.layer)


def replan_with_reserve(run_setup: RunSetup, reserve_bytes: int) -> RunSetup:
    """Plan again with `reserve_bytes` of GPU memory left free; the microbatches stay unless nothing else fits.

    Other microbatches are tried only if a pipeline is one rank, because messages between ranks have the shape of a
    microbatch. Errors as `draft_run_setup`.
    """
    request, asked = replace(_open_again(run_setup), reserve_bytes=reserve_bytes), run_setup.requested_config.pipeline
    known = run_setup.result
    try:
        return _plan_again(run_setup, request, profile=known.profile, layer=known.layer, is_last=True)
    except GpuMemoryError:
        if asked.num_chunks is not None or run_setup.rank_context.ranks.num_ranks > 1:
            raise
    return _plan_again(run_setup, request.trying(num_chunks=None, num_slices=asked.num_slices), is_last=True)


def _open_again(run_setup: RunSetup) -> PlanRequest:
    """The request with stages, rounds and buffers as the user asked, and with the microbatches that were chosen."""
    request = run_setup.result.request
    whole = PlanRequest.of(run_setup.requested_config, request.shape, request.machine)
    asked, request = whole.candidate, replace(request, num_state_buffers=whole.num_state_buffers)
    return request.trying(num_stages=asked.num_stages, accumulation_rounds=asked.accumulation_rounds, order=asked.order)


def machine_of_gpu(name: str, total_bytes: int, num_ranks: int, *, free_bytes: int | None = None) -> Machine:
    """This machine, whose GPUs the driver calls `name`."""
    return Machine(
        num_ranks,
        gpu_spec_of_device(name),
        total_bytes,
        free_bytes,
        host_bytes=int(total_host_bytes() * HOST_SHARE),
        has_peer_copies=allows_peer_copies(),
        host=Host(cores_per_rank=max(1, num_cpus_per_rank(num_ranks))),
    )


def with_product_share(machine: Machine, device: torch.device, dtype: torch.dtype, met: Rendezvous | None) -> Machine:
    """Return `machine` with the measured share of its usual speed, if the slowest GPU of the ranks that `met` is slow.

    Collective if ranks `met`. Numbers are chosen by estimates before layers run; for a GPU that is limited or shared
    these would be far too fast. A GPU that is not known, or has no room for a product, counts as usual.
    """
    if device.type != "cuda":
        return machine
    share = 1.0
    if machine.gpu_spec is not None:
        timer = CollectiveTimer(device, SingleRankTransport(), part_seconds=PROBE_SECONDS)
        with suppress(torch.OutOfMemoryError):
            share = measure_product_rate(timer, dtype) * SUSTAINED_SHARE / machine.gpu_spec.product_rate
    if met is not None:
        share = smallest_of_all(met, round(MILLION * share)) / MILLION
    if share > SLOW_SHARE:
        return machine
    text = "large products take %.1f times as long as is usual for this GPU: numbers are chosen for that"
    logger.info(text, 1 / share)
    return replace(machine, product_share=share)


def _machine(device: torch.device, ranks: Ranks, free_bytes: int | None) -> Machine:
    if device.type != "cuda":
        return Machine(ranks.num_pipeline_ranks, num_replicas=ranks.num_replicas, num_nodes=ranks.num_nodes)
    properties = torch.cuda.get_device_properties(device)
    own = machine_of_gpu(properties.name, properties.total_memory, ranks.num_pipeline_ranks, free_bytes=free_bytes)
    if ranks.num_replicas == 1:
        return own
    host = replace(own.host, cores_per_rank=max(1, num_cpus_per_rank(ranks.num_local)))
    return replace(own, num_replicas=ranks.num_replicas, num_nodes=ranks.num_nodes, host=host)


def _with_disks(machine: Machine, folders: Sequence[str], met: Rendezvous | None) -> Machine:
    """Return `machine` with rates and shares of its disks: those of the slowest node, if they are known on all.

    Collective if ranks `met`.
    """
    if folders and met is not None:
        smallest_of_all(met, 0)  # a node's first rank has tried its disks
    disks, shares = known_disks(folders)
    own = disks or DiskRates(0, 0, is_burst=True)
    numbers = [int(own.read), int(own.write), int(own.total), int(not own.is_burst)]
    if folders and met is not None:
        numbers = [smallest_of_all(met, number) for number in numbers]
    read, write, at_once, sustained = numbers
    disks = DiskRates(read, write, is_burst=not sustained, at_once=at_once) if read and write else None
    return replace(machine, disks=disks, disk_shares=shares)


def _plan_again(
    before: RunSetup,
    request: PlanRequest,
    *,
    profile: Profile | None = None,
    layer: LayerBytes | None = None,
    is_last: bool = False,
) -> RunSetup:
    """Plan for the device of `before`, by what was measured on it: a profile, and a layer of the same microbatches.

    Without `layer`, and for other tiles than `before` has, a layer's bytes are measured on GPUs. What is measured later
    is planned again, so only the last plan is simulated.
    """
    device, given = before.rank_context.device, before.plan if before.is_given else None

    def measured_layer(request: PlanRequest) -> LayerBytes:
        if layer is not None and tile_tokens(request) == before.tile_tokens:
            return layer
        shape, with_products = MicrobatchShape.of(request), may_keep_products(request)
        return measure_layer_bytes(before.parts, shape, device=device, with_products=with_products)

    on_gpu = device.type == "cuda"
    is_measured_next = on_gpu and not is_last and (request.measures_layers or request.measures_host)
    is_preliminary = is_measured_next and profile is None and given is None
    result = _solve(
        before.parts,
        request,
        layer=measured_layer if on_gpu else None,
        profile=profile,
        given=given,
        is_preliminary=is_preliminary,
    )
    if not (is_preliminary or is_last):  # the last plan is made when stages and their files exist
        check_disks(result, is_here=True)
    return _run_setup(before.rank_context, before.parts, result, is_given=before.is_given)


def _solve(parts: ModelParts, request: PlanRequest, **options: Any) -> PlanResult:
    """Plan as `solve` does; an error says what to change."""
    try:
        return solve(request, **options)
    except DoesNotFitError as error:
        raise gpu_refusal(error, parts.config) from None


def _run_setup(rank_context: RankContext, parts: ModelParts, result: PlanResult, *, is_given: bool) -> RunSetup:
    """The setup of a plan whose stages fit into the host's memory. Raises HostMemoryError."""
    request, plan = result.request, result.plan
    # This process may have grown while a layer was measured.
    result = replace(result, host_estimate=estimate_host_memory(request, plan, own_bytes=own_host_bytes()))
    if request.machine.on_cpu or plan.num_slots is not None or plan.offloaded_activation_stages:
        available = host_bytes_per_pipeline(request.config, rank_context.pipelines_per_host)
        check_host_memory(result, available, parts.config)
    schedule = build_schedule(plan)
    return RunSetup(rank_context=rank_context, parts=parts, result=result, schedule=schedule, is_given=is_given)


def host_bytes_per_pipeline(config: Config, pipelines_per_host: int) -> int:
    """Return the host memory that a pipeline may use: its part of `--host_memory_limit`, else of what is free here."""
    limit = config.pipeline.host_memory_limit
    return (available_host_bytes() if limit is None else int(limit * GIB)) // pipelines_per_host
