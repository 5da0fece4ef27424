"""Plans a run on GPUs again from measurements on the machine, and caches the measurements. Collective.

Every run that streams and has no given plan measures the host, for a second or two. It also measures the link between
replicas unless `--node_link` is given. Layers and all other parts of a profile are measured only for `--num_stages
auto`, and cached for the next run. The number of microbatches stays as estimated, because measurements and transport
use the shape of a microbatch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from mobius import __version__
from mobius.distributed.rank_context import RankContext
from mobius.distributed.shards import cut
from mobius.distributed.transport import Transport, all_have_same
from mobius.engine.adamw_cpu import CPUAdamW, load_adamw_cpu
from mobius.errors import CheckpointError, PlanError, reason_of
from mobius.files.atomic_files import atomic_write
from mobius.files.regular_files import read_text
from mobius.hardware.devices import num_optimizer_threads
from mobius.models.blocks import ModelParts
from mobius.planner.gpu_specs import GIGA
from mobius.planner.host_rates import measure_host_rates, with_fewest_threads, with_host_rates
from mobius.planner.layer_bench import MicrobatchShape
from mobius.planner.measure import measure_launches, measure_profile
from mobius.planner.planning import replan
from mobius.planner.profile import FORMAT, Profile, ProfileError, ReplicaRates
from mobius.planner.request import PlanRequest
from mobius.planner.solver import PlanResult
from mobius.planner.timer import CollectiveTimer
from mobius.process.ranks import allows_peer_copies, cache_folder
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import Plan

logger = logging.getLogger(__name__)

LINK_ELEMENTS = 2**25
"""Number of bf16 weights that the replicas gather; they take 64 MiB of each GPU's memory."""
LINK_SECONDS = 0.5
"""Seconds of one measurement. On sockets, 16 rates measured for 0.5 s each were within 19 % of the lowest. Rates
measured for 0.15 s were within 34 %, rates measured for 1 s no closer (two processes on one H200, 2026-11-23)."""


def plan_by_measurement(
    result: PlanResult, parts: ModelParts, context: RankContext, transport: Transport
) -> PlanResult:
    """Return the plan to run, on which all ranks agree; collective. Call it before stages are allocated.

    Returns `result` if nothing is measured: on CPUs, with a given plan, and for a single pipeline that streams nothing
    on GPUs of known speed. Raises PlanError if the ranks disagree, and the errors of `draft_plan`.
    """
    check_same_plan(result.plan, transport)
    wanted, profile, is_new = Measurements.of(result, context.device), result.profile, False
    bench = Bench(result.request, parts, context, transport)
    if wanted.layers:
        profile, is_new = bench.measured_profile()
    if profile is not None and wanted.host and not is_new:
        profile = bench.with_host(profile)
    if profile is not None and wanted.link:
        profile = bench.with_link(profile)
    if profile is result.profile or profile is None:
        return result
    planned = replan(result, parts, context.device, profile)
    check_same_plan(planned.plan, transport)
    return planned


@dataclass(frozen=True)
class Measurements:
    """Parts that a run on GPUs measures at its start."""

    layers: bool = False
    """Whether layers and all other parts of a profile are measured, for auto (`PlanRequest.measures_layers`)."""
    host: bool = False
    """Whether the host is measured (`PlanRequest.measures_host`), unless a new profile includes it."""
    link: bool = False
    """Whether the link between replicas is measured; it is not if its rate is given."""

    @classmethod
    def of(cls, result: PlanResult, device: torch.device) -> Measurements:
        """Return the parts that a run measures: none on CPUs, or with the plan of a file or a checkpoint."""
        if device.type != "cuda" or result.is_given:
            return cls()
        request, is_link_given = result.request, result.request.config.planning.node_link is not None
        has_link, is_one_node = request.machine.num_replicas > 1, request.machine.num_nodes == 1
        return cls(request.measures_layers, request.measures_host, has_link and (is_one_node or not is_link_given))


@dataclass(frozen=True)
class Bench:
    """Measures a run's microbatches on the machine; each method is collective and releases all memory."""

    request: PlanRequest
    parts: ModelParts
    context: RankContext
    transport: Transport

    def measured_profile(self) -> tuple[Profile, bool]:
        """Return this machine's profile, and whether it is new; without a cached profile this takes less than 30 s."""
        request = self.request
        path = profile_path(
            cache_folder() / "profiles",
            request.shape,
            MicrobatchShape.of(request),
            device=self.context.device,
            num_ranks=self.transport.num_ranks,
            is_compiled=request.compiles,
            has_peer_copies=allows_peer_copies(),
            copies_messages=request.config.pipeline.copy_messages,
            product_share=request.machine.product_share,
        )
        return cached_profile(path, self._measure, self.transport)

    def _measure(self) -> Profile:
        start, timer = time.perf_counter(), CollectiveTimer(self.context.device, self.transport)
        shape, kernel = MicrobatchShape.of(self.request), self._kernel()
        profile = measure_profile(timer, self.parts, shape, kernel, messages_through_host=self._sends_over_host())
        logger.debug("profile measured in %.0f s: %s", time.perf_counter() - start, profile.describe())
        return profile

    def _sends_over_host(self) -> bool:
        """Whether messages go through host memory; peer copies may have been disabled after the plan was made."""
        return self.request.sends_over_host or not allows_peer_copies()

    def _kernel(self) -> CPUAdamW | None:
        """Optimizer's kernel with the number of threads that a run will use."""
        most = num_optimizer_threads(self.context.ranks.num_local)
        kernel, shape = load_adamw_cpu(cache_folder(), num_threads=most), MicrobatchShape.of(self.request)
        return with_fewest_threads(
            shape.dtype,
            device=self.context.device,
            transport=self.transport,
            kernel=kernel,
            reduced_format=shape.reduced_format,
        )

    def with_host(self, profile: Profile) -> Profile:
        """Return `profile` with the host's current rates: copies, updates, and launches with and without updates."""
        start, device = time.perf_counter(), self.context.device
        shape, kernel = MicrobatchShape.of(self.request), self._kernel()
        launches = measure_launches(CollectiveTimer(device, self.transport), self.parts, shape, kernel)
        rates = measure_host_rates(
            shape.dtype,
            device=device,
            transport=self.transport,
            kernel=kernel,
            reduced_format=shape.reduced_format,
        )
        logger.debug("host measured in %.1f s: %s, to enqueue a layer %s", time.perf_counter() - start, rates, launches)
        return replace(with_host_rates(profile, rates), **launches.profile_fields())

    def with_link(self, profile: Profile) -> Profile:
        """Return `profile` with the measured link between replicas."""
        start, machine = time.perf_counter(), self.request.machine
        timer = CollectiveTimer(self.context.device, self.transport, part_seconds=LINK_SECONDS)
        rates = measure_replica_rates(timer, is_through_host=machine.num_nodes > 1 or self._sends_over_host())
        timer.forget()
        given = (
            f"--node_link {rates.together / machine.replica_bytes_per_link / GIGA:.3g}"
            if machine.num_nodes > 1
            else "none"
        )
        seconds = time.perf_counter() - start
        logger.debug("link between replicas measured in %.1f s: %s; the option for it: %s", seconds, rates, given)
        return replace(profile, replicas=rates)


def measure_replica_rates(timer: CollectiveTimer, *, is_through_host: bool) -> ReplicaRates:
    """Measure the all-gather of weights between equal ranks of all replicas, for all groups at once and one by one.

    Collective. It uses the code and the connections of the run; gradients are reduced over the same link.
    `is_through_host`: whether the link uses host memory. The transport must have replicas.
    """
    transport, replicas = timer.transport, timer.transport.replicas
    assert replicas is not None, "there is a link between replicas"
    segment = cut(0, LINK_ELEMENTS, replicas.num_replicas)
    weights = torch.zeros(LINK_ELEMENTS, dtype=torch.bfloat16, device=timer.device)
    sent = (replicas.num_replicas - 1) * segment[0].stop * weights.element_size()
    gather = partial(replicas.all_gather_for_load, weights, [segment])
    together = transport.num_ranks * sent / timer.seconds(gather)
    alone = together if transport.num_ranks == 1 else min(together, sent / timer.seconds_alone(gather))
    return ReplicaRates(together, alone, is_through_host)


def check_same_plan(plan: Plan, transport: Transport) -> None:
    """Raise PlanError if the ranks' plans divide the model or the batch differently; collective."""
    all_ranks = transport.all_ranks
    if not all_have_same(
        repr((plan.num_microbatches, plan.num_slices, plan.num_rounds, plan.order, plan.cuts)), all_ranks
    ):
        raise PlanError(
            "the ranks have different plans, because their GPUs or CPUs differ. Give the numbers instead of auto: "
            f"--num_stages {plan.num_stages} --num_chunks {plan.num_chunks} --num_slices {plan.num_slices} "
            f"--num_rounds {plan.num_rounds} --compute_order {plan.order} "
            f"(the numbers of rank {all_ranks.rank})."
        )


def profile_path(
    folder: Path,
    model: ModelShape,
    shape: MicrobatchShape,
    *,
    device: torch.device,
    num_ranks: int,
    is_compiled: bool,
    has_peer_copies: bool = True,
    copies_messages: bool = True,
    product_share: float = 1.0,
) -> Path:
    """Return the profile's path in `folder`, by hardware, its speed, model, microbatch, format, ranks and versions.

    `product_share` is the current speed of products / their usual speed. The share is lower while another program uses
    a GPU; later runs must not be planned with a profile measured then.
    """
    is_cuda, packed = device.type == "cuda", shape.packed
    # Number of documents in a measured row, and the maximum number of documents in a row.
    documents = [] if packed is None else [len(packed.typical_row(shape.seq_length)), packed.max_documents]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if is_cuda else []
    key = {
        "devices": names or [platform.processor() or platform.machine()],
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else 0,
        "product_share": round(product_share, 1),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "model": repr(model),
        "microbatch": repr(replace(shape, packed=None)),
        "documents": documents,
        "num_ranks": num_ranks,
        "is_compiled": is_compiled,
        "messages": [has_peer_copies, copies_messages],
        "versions": [__version__, torch.__version__, FORMAT],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"profile-{digest}.json"


def cached_profile(path: Path, measure: Callable[[], Profile], transport: Transport) -> tuple[Profile, bool]:
    """Return the profile in `path`, or else measure it and save it there; also return whether it is new. Collective.

    Each node has a separate cache: either all ranks read the same profile, or all measure. A file that is not a profile
    is logged and replaced. If the file cannot be written, this is only logged.
    """
    known = None
    try:
        known = Profile.from_json(read_text(path)) if path.exists() else None
    except (OSError, CheckpointError, ProfileError) as error:
        logger.warning("the profile %s cannot be used and is measured again: %s", path, error)
    all_know = all_have_same("" if known is None else known.to_json(), transport.all_ranks)
    if known is not None and all_know:
        return known, False
    profile = measure()
    if transport.rank != 0:
        return profile, True
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, has_many_writers=True) as temporary:
            temporary.write_text(profile.to_json(), encoding="utf-8")
    except OSError as error:
        logger.warning("the profile cannot be saved in %s, the next run measures again: %s", path, reason_of(error))
    return profile, True
