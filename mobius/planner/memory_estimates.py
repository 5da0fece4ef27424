"""Estimates of the host and GPU memory that a run needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from mobius.config.config import ActivationOffloading, Recompute
from mobius.planner.peak_memory import (
    LayerBytes,
    MicrobatchBytes,
    embedding_bytes,
    estimate_layer,
    find_peak,
    loss_bytes,
)
from mobius.planner.request import PlanRequest
from mobius.schedule.activation_offloading import num_host_regions
from mobius.schedule.memory_layout import (
    SUM_BYTES,
    DiskBytes,
    MemoryRules,
    Part,
    Place,
    RankLayout,
    StageSizes,
    lay_out_rank,
)
from mobius.schedule.partition import ModelShape, StageCut
from mobius.schedule.plan import MemoryUse, Plan
from mobius.schedule.weight_streaming import num_loads
from mobius.units import GIB, format_bytes_sum

GPU_PROCESS_BYTES = int(2.15 * GIB)
"""Host memory of a rank without its stages, for Python, torch, CUDA, communicators and kernels (7B on four H200s)."""
STREAMING_BYTES = int(0.23 * GIB)
"""Further host memory of a rank that streams, for threads and buffers: 0.05 to 0.4 GiB in runs of 1B, 7B and 13B on
H200s."""
MEASURING_BYTES = int(0.5 * GIB)
"""Further host memory of a rank while it measures at its start (0.46 to 0.59 GiB); later, streamed stages use it."""
USABLE_MEMORY_FRACTION = 0.97
"""Share of a rank's GPU memory that plans may fill; the rest covers errors of the estimate."""
TILE_TOKENS = (32768, 16384, 8192, 4096)
"""Tile sizes that auto tries, in tokens; smaller tiles do not keep a GPU busy."""
LIBRARY_BYTES = 2**27
"""Estimated bytes of workspaces for matrix products in two threads (32 MiB each on Hopper), rotary embeddings, masks
and scalars."""
STEP_BYTES_PER_TOKEN = 16
"""Bytes of a token and its label, on ranks that have the step's tokens or labels on the GPU."""
FRAGMENT_SHARE = 0.03
"""Fragmentation of the allocator, as a share of activations and messages. In runs on H200s it was 0 to 2.6 % of all
allocated memory; on four H200s with messages over NCCL it was 8 % (2026-11-21)."""
CPU_PROCESS_BYTES = int(0.5 * GIB)
"""Host memory of a rank that computes on the CPU, without its stages (0.5 GiB with configs/quickstart.yaml)."""
CPU_FRAGMENT_SHARE = 0.2
"""Bytes that malloc takes in addition to tensors / bytes that a GPU would hold: 0.11 with 40M parameters in fp32 on two
CPU ranks; -0.02 in fp32 and -0.05 in bf16 with 135M."""


@dataclass(frozen=True)
class HostMemoryEstimate:
    """Host bytes of all ranks of a pipeline together, by category."""

    num_ranks: int
    streamed_parameters: int
    streamed: int
    """Bytes of the streamed stages' arenas."""
    computing: int
    """Bytes that ranks on the CPU would have on a GPU: resident stages, slots, gradients and activations."""
    process_bytes: int
    """Bytes of one process without its stages."""
    offloaded_activations: int = 0
    """Activations that are offloaded from forward to backward."""
    attention: int = 0
    """Attention's results, which are part of `offloaded_activations`."""
    state_buffers: int = 0
    """With states on disks: buffers for the stages that are being updated, and copies of resident stages."""
    disk: int = 0
    """Bytes on disks, not part of `total`: optimizer states, and gradients or weights if they are on disks, too."""
    disk_reads: int = 0
    """Bytes that a step reads from disks."""
    disk_writes: int = 0
    """Bytes that a step writes to disks."""
    load_buffers: int = 0
    """Bytes of weights that are being copied from disks to GPUs."""

    @property
    def total(self) -> int:
        stages = self.streamed + self.state_buffers + self.load_buffers
        return stages + self.computing + self.offloaded_activations + self.num_ranks * self.process_bytes

    def describe(self) -> str:
        """Sum of all categories as text."""
        parts, count = list[str](), self.streamed_parameters
        if count > 0 and self.streamed > 0:
            parts.append(f"{count:.3g} parameters x {self.streamed / count:.3g} bytes")
        if self.computing:
            parts.append(f"{self.computing / GIB:.3g} GiB for what a GPU would hold")
        if self.state_buffers:
            parts.append(f"{self.state_buffers / GIB:.3g} GiB for stages that are updated")
        if self.load_buffers:
            parts.append(f"{self.load_buffers / GIB:.3g} GiB for weights that are loaded")
        if self.offloaded_activations:
            parts.append(f"{self.offloaded_activations / GIB:.3g} GiB for activations")
        parts.append(f"{self.num_ranks} x {self.process_bytes / GIB:.3g} GiB for the processes")
        return " + ".join(parts)


def process_bytes(request: PlanRequest, plan: Plan) -> int:
    """Return the host bytes of a rank's process without its stages."""
    if request.machine.on_cpu:
        return CPU_PROCESS_BYTES
    streams = plan.num_slots is not None
    measures = request.measures_layers or request.measures_host
    return GPU_PROCESS_BYTES + (STREAMING_BYTES if streams else MEASURING_BYTES if measures else 0)


def estimate_host_memory(request: PlanRequest, plan: Plan, *, own_bytes: int = 0) -> HostMemoryEstimate:
    """Return the host bytes of all ranks of a pipeline; on CPUs these include the bytes that GPUs would hold.

    `own_bytes` is the current size of this process, which may have run something else before.
    """
    shape, layouts = request.shape, [rank_layout(request, plan, rank) for rank in range(plan.num_ranks)]
    on_cpu, each = request.machine.on_cpu, process_bytes(request, plan)
    held = sum(need.total for need in estimate_gpu_memory_of_ranks(request, plan)) if on_cpu else 0
    if not request.machine.on_cpu:
        each = max(each, own_bytes)
    inputs = products = attention = 0
    for stage in plan.offloaded_activation_stages:
        layers, regions = len(plan.cuts[stage].backward_layers(shape.first_backward)), num_host_regions(stage, plan)
        inputs += layers * regions
        products += layers * (regions * plan.num_offloaded_microbatches // plan.microbatches_per_round)
        attention += layers * regions * (stage in plan.saved_attention_stages)
    attention *= request.attention_bytes
    offloaded_activations = inputs * request.message_bytes + attention
    offloaded_activations += products * max(0, request.product_bytes - request.message_bytes)
    on_disks = disk_bytes(request, plan, layouts)
    return HostMemoryEstimate(
        plan.num_ranks,
        streamed_parameters=sum(layout.num_loaded for layout in layouts),
        streamed=sum(layout.num_bytes(Place.HOST) for layout in layouts),
        computing=int((1 + CPU_FRAGMENT_SHARE) * held),
        process_bytes=each,
        offloaded_activations=offloaded_activations,
        attention=attention,
        state_buffers=sum(layout.state_buffers.total for layout in layouts) + on_disks.copied,
        disk=on_disks.stored,
        disk_reads=on_disks.read,
        disk_writes=on_disks.written,
        load_buffers=sum(layout.load_buffers.total for layout in layouts),
    )


def rank_layout(request: PlanRequest, plan: Plan, rank: int) -> RankLayout:
    """Return the memory layout of one rank of `plan` as a run allocates it, but without the padding of parameters."""
    rules, shape = request.memory_rules, request.shape
    sizes = {stage: _stage_sizes(plan.cuts[stage], shape, rules) for stage in plan.local_stages(rank)}
    return lay_out_rank(sizes, plan.rank_use(rank), rules, num_stages=plan.num_stages)


def _stage_sizes(cut: StageCut, shape: ModelShape, rules: MemoryRules) -> StageSizes:
    return rules.sizes_of(
        *shape.sizes_of(cut),
        scales=cut.num_scales(shape),
        codes=cut.num_quantized(shape),
        in_fp32=cut.num_in_fp32(shape),
        coded=cut.num_coded(shape),
    )


def disk_bytes(request: PlanRequest, plan: Plan, layouts: Sequence[RankLayout]) -> DiskBytes:
    """Return the bytes that a pipeline stores on disks, and that a step reads, writes, and copies before writing."""
    if request.memory_rules.disks is None:
        return DiskBytes()
    found = list[DiskBytes]()
    for rank, layout in enumerate(layouts):
        streamed = plan.streamed_stages(rank)
        numbers = num_loads(len(streamed), plan.slots[rank], plan.num_rounds)
        loads = dict(zip(streamed, numbers, strict=True))
        found += [own.disk_bytes(layout.rules, loads.get(stage, 0)) for stage, own in layout.stages.items()]
    return DiskBytes(*map(sum, zip(*found, strict=True)))


@dataclass(frozen=True)
class GpuMemoryEstimate:
    """GPU bytes of one rank by category, at the peak of a step."""

    rank: int
    weights: int
    gradients: int
    optimizer: int
    inputs: int
    working_set: int
    saved_activations: int = 0
    """Activations that are saved from forward to backward."""
    messages: int = 0
    """Messages that are received ahead or in flight, and gradients in flight between replicas."""
    kv_cache: int = 0
    """Keys and values of a stage's layers for earlier slices, and their gradients."""
    quantized_copies: int = 0
    """Eight-bit codes of resident stages' weights, and scales of the weights of resident stages and in slots."""
    libraries: int = 0
    """Tokens and positions of the step, workspaces of matrix products, and fragmentation."""

    @property
    def states(self) -> int:
        """Bytes that stay allocated through all steps."""
        return self.weights + self.gradients + self.optimizer + self.kv_cache + self.quantized_copies

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each category, by its name as text."""
        names = [field.name for field in fields(self) if field.name != "rank"]
        return {name.replace("_", " "): getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def describe(self) -> str:
        """Sum of all categories as text."""
        return format_bytes_sum([(name, num_bytes) for name, num_bytes in self.parts.items() if num_bytes])


def activation_bytes(request: PlanRequest, plan: Plan, rank: int, size: MicrobatchBytes) -> dict[str, int]:
    """Return the bytes that do not depend on resident stages (activations), by field of `GpuMemoryEstimate`."""
    most = find_peak(plan, rank, size)
    cuts = [plan.cuts[stage] for stage in plan.local_stages(rank)]
    has_head = plan.spreads_head or any(cut.is_last for cut in cuts)
    token_bytes = STEP_BYTES_PER_TOKEN if has_head or any(cut.is_first for cut in cuts) else 0
    token_bytes += request.config.objective.teacher_bytes if has_head else 0
    return {
        "inputs": most.inputs,
        "saved_activations": most.saved_activations,
        "messages": most.messages + request.memory_rules.received_bytes,
        "working_set": most.work,
        "libraries": LIBRARY_BYTES
        + token_bytes * request.step_tokens
        + request.position_bytes
        + int(FRAGMENT_SHARE * most.total),
    }


def state_bytes(request: PlanRequest, plan: Plan, rank: int) -> dict[str, int]:
    """Return the bytes that stay allocated through all steps, by field of `GpuMemoryEstimate`."""
    shape, layout, weight = request.shape, rank_layout(request, plan, rank), request.memory_rules.weight
    pools = layout.gpu_pools
    # If ranks share norm and head, each rank has copies, except the owner, which has them in its last stage.
    copies_head = plan.spreads_head and rank != plan.rank_of(plan.num_stages - 1)
    head, head_sums = (shape.head_parameters, shape.num_trained_in_head) if copies_head else (0, 0)
    layers = max(len(plan.cuts[stage].layers) for stage in layout.stages)
    return {
        "weights": pools["slots"] + layout.num_bytes(Place.GPU, Part.WEIGHTS) + head * weight,
        "gradients": pools["sum buffers"]
        + layout.num_bytes(Place.GPU, Part.SUMS, Part.GRADIENTS)
        + SUM_BYTES * head_sums,
        "optimizer": layout.num_bytes(Place.GPU, Part.STATES),
        "kv_cache": layers * request.kv_cache_bytes,
        "quantized_copies": layout.num_bytes(Place.GPU, Part.CODES) + pools["scales of slots"],
    }


def estimate_gpu_memory_of_ranks(
    request: PlanRequest, plan: Plan, layer: LayerBytes | None = None, ranks: Iterable[int] | None = None
) -> tuple[GpuMemoryEstimate, ...]:
    """Estimate the GPU memory of `ranks` (None: all); `layer` gives the measured bytes of one layer and microbatch.

    Streamed stages share slots; resident stages hold their whole state.
    """
    size = microbatch_bytes(request, layer)
    return tuple(
        GpuMemoryEstimate(rank, **state_bytes(request, plan, rank), **activation_bytes(request, plan, rank, size))
        for rank in ranks or range(plan.num_ranks)
    )


@lru_cache(maxsize=1024)  # cached: every step of a search calls it
def estimated_layer(request: PlanRequest) -> LayerBytes:
    """Estimate the bytes of one layer and microbatch, with the layer's tiles."""
    return _estimated_layer(request, tile_tokens(request))


def tile_tokens(request: PlanRequest) -> int | None:
    """Return the tokens of a tile of recomputed layers; None if these layers are not tiled.

    Auto uses no tiles if the smallest use of memory fits without tiles. Otherwise it uses the largest tiles that fit,
    or the smallest tiles if none fit. It compares estimates with the total GPU memory instead of the free memory, so
    that all ranks choose the same tiles.
    """
    pipeline = request.config.pipeline
    if pipeline.tile_tokens != "auto" or pipeline.recompute.saves_activations:
        return pipeline.num_tile_tokens
    request = request.on_empty_gpu
    if request.candidate.num_saving_attention is None and request.recompute is Recompute.AUTO:
        request = request.trying(num_saving_attention=request.plan.stages_per_rank)
    return _tile_that_fits(request)


@lru_cache(maxsize=64)  # cached: every estimate of a layer calls it
def _tile_that_fits(request: PlanRequest) -> int | None:
    available, plan = request.gpu_bytes, request.plan
    smaller = [number for number in TILE_TOKENS if number < request.microbatch_tokens]
    if available is None or not smaller or not request.shape.is_tileable:
        return None
    num_resident, usable = request.num_resident or 0, int(available * USABLE_MEMORY_FRACTION) - request.mailbox_bytes
    slots, asked = min(plan.num_slots or 0, plan.stages_per_rank - num_resident), _asked_offloading(request)
    plans = [plan.with_same_use(MemoryUse(num_resident, 0, slots, number)) for number in asked]
    for number in (None, *smaller):
        layer = _estimated_layer(request, number)
        needs = (largest_gpu_estimate(estimate_gpu_memory_of_ranks(request, each, layer)).total for each in plans)
        if any(need <= usable for need in needs):
            return number
    return smaller[-1]


def _asked_offloading(request: PlanRequest) -> list[int]:
    """Minimum and maximum of a rank's stages that may offload activations, by options and host memory."""
    asked, plan = request.config.pipeline.activation_offloading, request.plan
    if asked is ActivationOffloading.ON:
        return [plan.stages_per_rank]
    most = plan.with_same_use(MemoryUse(0, 0, plan.num_slots or 0, plan.stages_per_rank))
    has_room = request.host_bytes is None or estimate_host_memory(request, most).total <= request.host_bytes
    return [0, plan.stages_per_rank] if asked is ActivationOffloading.AUTO and has_room else [0]


def _estimated_layer(request: PlanRequest, tile_tokens: int | None) -> LayerBytes:
    is_sliced = request.plan.num_slices > 1
    return estimate_layer(
        request.memory_rules.weight,
        request.shape,
        request.microbatch_tokens,
        compiled=request.compiles,
        num_documents=request.microbatch_documents,
        tile_tokens=tile_tokens,
        rows=request.microbatch_tokens // request.slice_length if is_sliced else 1,
        sliced_length=request.config.data.seq_length if is_sliced else None,
    )


def microbatch_bytes(request: PlanRequest, layer: LayerBytes | None = None) -> MicrobatchBytes:
    """Estimate the bytes of a microbatch; `layer` replaces the estimate of a layer."""
    weight, shape, tokens = request.memory_rules.weight, request.shape, request.microbatch_tokens
    on_gpu, layer = not request.machine.on_cpu, layer or estimated_layer(request)
    return MicrobatchBytes(
        activation=request.message_bytes,
        layer=layer,
        loss=loss_bytes(
            weight,
            shape,
            tokens=tokens,
            chunk_tokens=request.config.pipeline.loss_chunk_tokens,
            compiled=request.compiles,
            on_gpu=on_gpu,
        ),
        embedding=embedding_bytes(weight, shape, tokens=tokens, on_gpu=on_gpu),
        attention=request.attention_bytes,
        first_backward=shape.first_backward,
        quantized=0 if shape.quantized is None else weight * shape.quantized.largest,
    )


def largest_gpu_estimate(needs: Iterable[GpuMemoryEstimate]) -> GpuMemoryEstimate:
    """Return the estimate of the fullest rank."""
    return max(needs, key=lambda need: need.total)
