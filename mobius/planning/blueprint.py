"""Draws a run before any large memory is taken: device, model, plan, schedule; checks that all of it fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from mobius.config.config import Config
from mobius.errors import GpuMemoryError, PlanError
from mobius.machine.available import available_host_bytes, own_host_bytes, total_host_bytes
from mobius.machine.device_order import order_devices
from mobius.machine.devices import TORCH_DTYPES, cap_gpu_memory, check_dtype, choose_device, has_gpus
from mobius.messages.meeting import Meeting, meet_node, meet_pipeline
from mobius.models.blocks import ModelParts
from mobius.models.by_plan.checked import checked_families
from mobius.models.experts.router_loss import refuse_slices
from mobius.models.sliced_attention.sliceable import sliceable, unpackable
from mobius.plan.budget import check_host_memory, tile_tokens
from mobius.plan.cards import Host, card_of_device
from mobius.plan.choice import Answer, answer, settle
from mobius.plan.fit import may_keep_products
from mobius.plan.gpu_peak import LayerBytes
from mobius.plan.partition import ModelShape
from mobius.plan.plan import Plan
from mobius.plan.plan_file import ModelDigest, SavedPlan, check_saved_plan
from mobius.plan.profile import Profile
from mobius.plan.request import Machine, PackedRows, PlanRequest, compiles
from mobius.plan.simulation import schedule_of
from mobius.planning.alike import smallest_host, smallest_machine
from mobius.planning.host_remedies import host_remedies
from mobius.ranks import Ranks, allows_peer_copies, cpu_share, separate_device_queues
from mobius.runtime.layer_bytes import measure_layer_bytes
from mobius.runtime.routers import sent_shape
from mobius.schedule.check import check
from mobius.schedule.schedule import Schedule
from mobius.units import GIB

HOST_SHARE = 0.9
"""Share of the host's memory that activations are planned into; what is free is checked before any is taken."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this rank computes, and how it finds the others."""

    ranks: Ranks
    device: torch.device
    device_order: tuple[int, ...]
    """The index of the GPU of each of this node's ranks, if there are GPUs."""
    meeting: Meeting | None
    """Where a pipeline's ranks with GPUs can meet before they have communicators."""
    node: Meeting | None = None
    """Where the node's ranks with GPUs can, those of several pipelines too."""
    everyone: Meeting | None = None
    """Where all replicas have met. Without torchrun the store is the first rank's process, while it has a meeting."""
    sharing: int = 1
    """Pipelines that share this machine's host memory."""


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """Everything that is known before any large memory is taken or any rank is spoken to.

    It is the same on all ranks but for `place`, and what goes by the memory that is free on the rank's GPU: resident
    stages, kept activations, slots, and what is predicted from those. Compute and messages are the same whatever other
    ranks do.
    """

    place: Place
    parts: ModelParts
    answer: Answer
    """The plan, its bytes and its predicted step, and the request that they answer."""
    schedule: Schedule
    is_given: bool = False
    """Whether the plan is that of a file or a checkpoint, which nothing that is measured changes."""

    @property
    def asked(self) -> Config:
        """The configuration as it was asked for."""
        return self.answer.request.config

    @property
    def config(self) -> Config:
        """The configuration with numbers in the place of auto."""
        return self.answer.request.settled_config

    @property
    def plan(self) -> Plan:
        return self.answer.plan

    @property
    def shape(self) -> ModelShape:
        return self.answer.request.shape

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.asked.model.dtype]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Format in which summed gradients reach the optimizer."""
        return torch.float32 if self.asked.pipeline.fp32_gradients else self.dtype

    @property
    def tile_tokens(self) -> int | None:
        """Tokens of the tiles that recomputed layers run in; None: they run whole."""
        return tile_tokens(self.answer.request)

    @property
    def message_shape(self) -> tuple[int, int, int]:
        """Shape [B, L, H] of every activation and activation gradient between stages."""
        return _message_shape(self.answer.request)

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape in which these are sent: with the numbers of routers behind them, where these have a loss."""
        return sent_shape(self.message_shape, self.dtype, self.parts.router_loss)


def sketch_blueprint(
    config: Config,
    ranks: Ranks,
    model_config: PretrainedConfig,
    *,
    saved: SavedPlan | None = None,
    packed: PackedRows | None = None,
    everyone: Meeting | None = None,
) -> Blueprint:
    """The run by guess, before anything is compiled; collective if ranks have GPUs, or there is a meeting.

    `everyone` is that of all replicas, whose smallest machine is planned for.
    With `saved` (`--plan`) nothing is chosen, only checked; `config` must have taken its numbers. `packed` are the
    facts of packed rows, where they are known already.

    Raises PlanError, GpuMemoryError or HostMemoryError, each with its arithmetic.
    """
    pipeline = config.pipeline
    if pipeline.copy_messages or ranks.num_replicas > 1:
        separate_device_queues()
    meeting, node = _meet_beside(ranks) if has_gpus(pipeline.device, ranks) else (None, None)
    device_order = tuple(range(ranks.num_local))
    if meeting is not None and ranks.num_places == ranks.num_local:  # each of several pipelines has the GPUs as listed
        device_order = order_devices(config, ranks.num_places, meeting)
    device = choose_device(pipeline.device, ranks, device_order)
    check_dtype(config.model.dtype, device)
    free_bytes = cap_gpu_memory(device, pipeline.gpu_memory_limit)
    machine, sharing = _machine(device, ranks, free_bytes), 1
    if everyone is not None:
        total, free, sharing = smallest_machine(everyone, ranks, machine.total_bytes, machine.free_bytes)
        host_bytes = None if machine.host_bytes is None else machine.host_bytes // sharing
        machine = replace(machine, total_bytes=total, free_bytes=free, host_bytes=host_bytes)
        link = config.planning.node_link or machine.node_link
        machine = replace(machine, num_nodes=max(1, ranks.num_replicas // sharing), node_link=link)
    if (met := everyone or meeting) is not None and machine.host_bytes is not None:
        limit = pipeline.host_memory_limit
        own = machine.host_bytes if limit is None else int(limit * GIB) // sharing
        machine = replace(machine, agreed_host_bytes=smallest_host(met, own))
    parts = ModelParts(model_config, device, compiled=compiles(config, machine), adapters=config.adapters)
    shape = parts.shape()
    if saved is not None:
        digest = ModelDigest.of(shape, config.model.dtype)
        numbers = {"num_ranks": ranks.num_places, "num_replicas": ranks.num_replicas}
        check_saved_plan(saved, Path(config.planning.plan or ""), model=digest, **numbers)
    place = Place(
        ranks=ranks,
        device=device,
        device_order=device_order,
        meeting=meeting,
        node=node,
        everyone=everyone,
        sharing=sharing,
    )
    request = settle(PlanRequest.of(config, shape, machine, packed))
    given = None if saved is None else saved.plan
    found = answer(request, given=given, own_bytes=own_host_bytes(), is_preliminary=True)
    return _blueprint(place, parts, found, is_given=given is not None)


def _meet_beside(ranks: Ranks) -> tuple[Meeting | None, Meeting | None]:
    """Where the ranks of the own pipeline can meet, and those of the own node; None where there is one alone."""
    pipeline = meet_pipeline(ranks) if ranks.num_places > 1 else None
    return pipeline, pipeline if ranks.num_places == ranks.num_local else meet_node(ranks)


def complete_blueprint(
    sketch: Blueprint, config: Config, *, packed: PackedRows | None = None, saved: SavedPlan | None = None
) -> Blueprint:
    """The plan of a sketched run, once its data are known: `packed` are the facts of packed rows, alike on all ranks.

    `config` is the sketch's but for the number of steps. On a GPU a layer's memory is measured. `saved` and errors as
    `sketch_blueprint`.
    """
    request, parts = sketch.answer.request, sketch.parts
    if (request.num_slices or 1) > 1 and (reason := sliceable(parts.config)) is not None:
        raise PlanError(f"--num_slices {request.num_slices}: {reason}")
    if config.pipeline.num_tile_tokens and (reason := checked_families().why_not_tiles(parts.config.model_type)):
        raise PlanError(
            f"--tile_tokens {config.pipeline.tile_tokens}: layers of the family {parts.config.model_type!r} cannot run "
            f"in tiles ({reason}). Use off."
        )
    if parts.router_loss is not None:
        refuse_slices(request.num_slices or 1)
    if packed is not None and (reason := unpackable(parts.config)) is not None:
        raise PlanError(f"--packing {config.data.packing}: {reason}.")
    if packed is not None or (request.num_slices or 1) > 1:  # no masks are made, which slices have no use for
        dtype = TORCH_DTYPES[config.model.dtype]
        parts = ModelParts(
            parts.config,
            sketch.place.device,
            compiled=request.compiles,
            packed=dtype,
            adapters=config.adapters,
        )
    asked = PlanRequest.of(config, request.shape, request.machine, packed)
    return _draw(asked, sketch.place, parts, given=None if saved is None else saved.plan)


def draw_blueprint(
    config: Config,
    ranks: Ranks,
    model_config: PretrainedConfig,
    *,
    saved: SavedPlan | None = None,
    packed: PackedRows | None = None,
    everyone: Meeting | None = None,
) -> Blueprint:
    """Sketch and complete the plan of a run at once; arguments and errors are those of both."""
    sketch = sketch_blueprint(config, ranks, model_config, saved=saved, packed=packed, everyone=everyone)
    return complete_blueprint(sketch, config, packed=packed, saved=saved)


def redraw(blueprint: Blueprint, profile: Profile) -> Blueprint:
    """Plan again by what was measured, with the same microbatches; errors as `draw_blueprint`."""
    old = blueprint.answer
    asked = blueprint.asked.pipeline
    request = replace(old.request, num_stages=asked.num_stages, num_rounds=asked.num_rounds)
    settled = settle(request, measured=profile)
    layer = old.layer if tile_tokens(settled) == blueprint.tile_tokens else None  # else it is measured again
    return _draw(settled, blueprint.place, blueprint.parts, profile=profile, layer=layer)


def plan_with_less(blueprint: Blueprint, reserve_bytes: int) -> Blueprint:
    """Plan again with `reserve_bytes` of GPU memory left free; the microbatches stay unless nothing else fits.

    Others are tried where one pipeline is one rank: messages between ranks have the shape of a microbatch. Errors as
    `draw_blueprint`.
    """
    old, pipeline, place = blueprint.answer, blueprint.asked.pipeline, blueprint.place
    less = replace(
        old.request,
        num_stages=pipeline.num_stages,
        num_rounds=pipeline.num_rounds,
        reserve_bytes=reserve_bytes,
    )
    try:
        settled = settle(less, measured=old.profile)
        layer = old.layer if tile_tokens(settled) == blueprint.tile_tokens else None
        return _draw(settled, place, blueprint.parts, profile=old.profile, layer=layer, is_last=True)
    except GpuMemoryError:
        if pipeline.num_chunks is not None or place.ranks.num_ranks > 1:
            raise
    return _draw(replace(less, num_chunks=None, num_slices=pipeline.num_slices), place, blueprint.parts, is_last=True)


def machine_of_gpu(name: str, total_bytes: int, num_ranks: int, *, free_bytes: int | None = None) -> Machine:
    """This machine, whose GPUs the driver calls `name`."""
    return Machine(
        num_ranks,
        card_of_device(name),
        total_bytes,
        free_bytes,
        host_bytes=int(total_host_bytes() * HOST_SHARE),
        has_peer_copies=allows_peer_copies(),
        host=Host(cores_per_rank=max(1, cpu_share(num_ranks))),
    )


def _machine(device: torch.device, ranks: Ranks, free_bytes: int | None) -> Machine:
    if device.type != "cuda":
        return Machine(ranks.num_places, num_replicas=ranks.num_replicas, num_nodes=ranks.num_nodes)
    properties = torch.cuda.get_device_properties(device)
    own = machine_of_gpu(properties.name, properties.total_memory, ranks.num_places, free_bytes=free_bytes)
    if ranks.num_replicas == 1:
        return own
    host = replace(own.host, cores_per_rank=max(1, cpu_share(ranks.num_local)))
    return replace(own, num_replicas=ranks.num_replicas, num_nodes=ranks.num_nodes, host=host)


def _draw(
    request: PlanRequest,
    place: Place,
    parts: ModelParts,
    *,
    profile: Profile | None = None,
    layer: LayerBytes | None = None,
    given: Plan | None = None,
    is_last: bool = False,
) -> Blueprint:
    """Plan for a device; `profile` and `layer` are what was measured on it. What is planned last is simulated."""
    on_gpu = place.device.type == "cuda"
    measures = (request.measures_layers or request.measures_host) and not is_last
    will_be_redrawn = on_gpu and measures and profile is None and given is None
    request = settle(request, measured=profile)
    if layer is None and on_gpu:
        layer = measure_layer_bytes(
            parts,
            shape=_message_shape(request),
            dtype=TORCH_DTYPES[request.config.model.dtype],
            device=place.device,
            packed=request.packed,
            tile_tokens=tile_tokens(request),
            sliced_length=request.config.data.seq_length if request.plan.num_slices > 1 else None,
            with_products=may_keep_products(request),
        )
    products = None if layer is None else layer.products
    found = answer(
        replace(request, measured_products=products),
        layer=layer,
        profile=profile,
        given=given,
        own_bytes=own_host_bytes(),  # measuring layers may have made it larger
        is_preliminary=will_be_redrawn,
    )
    return _blueprint(place, parts, found, is_given=given is not None)


def _blueprint(place: Place, parts: ModelParts, found: Answer, *, is_given: bool) -> Blueprint:
    """The blueprint of an answer whose stages fit into the host's memory. Raises HostMemoryError."""
    _check_host(found, place.sharing, parts)
    schedule = schedule_of(found.plan)
    check(schedule)
    return Blueprint(place=place, parts=parts, answer=found, schedule=schedule, is_given=is_given)


def _check_host(found: Answer, sharing: int, parts: ModelParts) -> None:
    """Raise HostMemoryError if there is less than the plan needs for stages."""
    if found.request.machine.on_cpu or found.plan.num_slots is not None or found.plan.stashed:
        limit = found.request.config.pipeline.host_memory_limit
        whole = available_host_bytes() if limit is None else int(limit * GIB)
        remedies = host_remedies(found, whole // sharing, parts.config)
        check_host_memory(found.host, available_bytes=whole // sharing, remedies=remedies)


def _message_shape(request: PlanRequest) -> tuple[int, int, int]:
    return (request.microbatch_rows, request.slice_length, request.shape.hidden_size)
