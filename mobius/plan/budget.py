"""The arithmetic of bytes: what a run needs in host and GPU memory; it neither measures nor allocates."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mobius.config.config import Dtype
from mobius.errors import GpuMemoryError, HostMemoryError
from mobius.plan.gpu_peak import MicrobatchBytes, largest_moment
from mobius.plan.plan import Plan
from mobius.plan.shape import ModelShape
from mobius.plan.working_set import embedding_bytes, estimate_layer, loss_bytes, with_measured
from mobius.units import GIB, bytes_sum, bytes_text

MOMENTS_BYTES = 8
"""The two fp32 moments of AdamW, per parameter."""
GPU_PROCESS_BYTES = int(2.15 * GIB)
"""Host memory of a rank beside its stages: Python, torch, CUDA context, communicators, kernels (7B on four H200s)."""
STREAMING_BYTES = int(0.23 * GIB)
"""More of a rank that streams, for threads and buffers: 0.05 to 0.4 in eight runs of 1B, 7B and 13B on four H200s."""
MEASURING_BYTES = int(0.5 * GIB)
"""More for a moment at the start of one that measures (0.46 to 0.59); later stages that are streamed take its place."""
LIBRARY_BYTES = 2**27
"""Of torch's GPU memory, workspaces of matrix products for the two threads that enqueue them, 32 MiB each on Hopper,
and what is smaller than any stage: rotary embeddings, masks, scalars. An estimate."""
STEP_BYTES_PER_TOKEN = 16
"""Token and label, where the step's are on the GPU."""
FRAGMENT_SHARE = 0.03
"""Of what comes and goes, what the allocator keeps beside it. Runs on H200s had 0 to 2.6 % of all that was allocated
beside it, and 8 % with messages over NCCL (docs/benchmarks.md)."""
CONTEXT_BYTES = int(0.6 * GIB)
"""GPU memory of a process outside of torch's: context and kernels. A usual value, not measured."""
COMMUNICATOR_BYTES = int(0.05 * GIB)
"""The same of a communicator between two ranks. A guess, not measured."""
CPU_PROCESS_BYTES = int(0.5 * GIB)
"""The same of a rank that computes on the CPU (0.5 GiB with the small model of configs/quickstart.yaml)."""


@dataclass(frozen=True)
class ByteSizes:
    """Bytes per parameter of each part of a stage's training state."""

    weight: int
    """The working copy: 2 for bf16 and fp16, 4 for fp32."""
    gradient: int
    """Once summed: as much as the weight, or 4 where gradients are kept in fp32."""
    remainder: int
    """What is kept to have an fp32 master: 2 beside bf16, whose bits are half of it, 4 beside fp16."""

    @classmethod
    def of(cls, dtype: Dtype, *, has_fp32_gradients: bool = False) -> ByteSizes:
        """The sizes of a run in `dtype`, in which summed gradients are in the same format or in fp32."""
        weight = 4 if dtype is Dtype.FP32 else 2
        remainder = {Dtype.BF16: 2, Dtype.FP16: 4, Dtype.FP32: 0}[dtype]
        return cls(weight, 4 if has_fp32_gradients else weight, remainder)

    @property
    def optimizer(self) -> int:
        """What makes an fp32 master of the weights, and the moments; in an fp32 run the weights are the master."""
        return MOMENTS_BYTES + self.remainder

    @property
    def host(self) -> int:
        """Host bytes per parameter of a streamed stage: weights, gradients, remainder and moments."""
        return self.weight + self.gradient + self.optimizer

    def resident(self, *, keeps_gradients: bool) -> int:
        """GPU bytes per parameter of a resident stage: weights, remainder and moments, and gradients that are kept."""
        return self.weight + self.optimizer + (self.gradient if keeps_gradients else 0)


def waiting_stages(num_stages: int, *, clips: bool, scales_loss: bool, is_tied: bool) -> frozenset[int]:
    """The stages whose gradients are kept until all of the step's are known; others are updated behind their backward.

    Clipping and loss scaling wait for every stage's norm, the two halves of a tied matrix for each other.
    """
    if clips or scales_loss:
        return frozenset(range(num_stages))
    return frozenset((0, num_stages - 1)) if is_tied else frozenset()


@dataclass(frozen=True)
class HostNeed:
    """Host bytes of all ranks together, by category."""

    num_ranks: int
    streamed_parameters: int
    streamed: int
    """The arenas of the streamed stages."""
    resident_parameters: int
    resident: int
    """Resident stages of ranks that compute on the CPU; on GPUs they take none."""
    process_bytes: int
    """Of one process."""

    @property
    def total(self) -> int:
        return self.streamed + self.resident + self.num_ranks * self.process_bytes

    def describe(self) -> str:
        """The sum as text."""
        parts = [
            f"{count:.3g} {name}parameters x {num_bytes / count:.3g} bytes"
            for count, num_bytes, name in (
                (self.streamed_parameters, self.streamed, ""),
                (self.resident_parameters, self.resident, "resident "),
            )
            if count > 0 and num_bytes > 0
        ]
        parts.append(f"{self.num_ranks} x {self.process_bytes / GIB:.3g} GiB for the processes")
        return " + ".join(parts)


def gpu_process_bytes(*, streams: bool, measures: bool) -> int:
    """Host bytes of a rank with a GPU beside its stages; `measures` where it does so before it takes memory."""
    more = STREAMING_BYTES if streams else MEASURING_BYTES if measures else 0
    return GPU_PROCESS_BYTES + more


def host_need(
    plan: Plan, shape: ModelShape, sizes: ByteSizes, *, process_bytes: int, waiting: Collection[int], on_cpu: bool
) -> HostNeed:
    """Count the host bytes of all ranks; with `on_cpu` resident stages are in host memory as well.

    `waiting` are the stages that keep their gradients (`waiting_stages`). While stages are loaded, one tensor at a time
    comes on top; the buffers that a step takes later are not there yet.
    """
    streamed = resident = resident_bytes = 0
    for span in plan.spans:
        count = span.num_parameters(shape)
        if span.stage not in plan.resident:
            streamed += count
        elif on_cpu:
            resident += count
            resident_bytes += count * sizes.resident(keeps_gradients=span.stage in waiting)
    return HostNeed(plan.num_ranks, streamed, streamed * sizes.host, resident, resident_bytes, process_bytes)


def check_host_memory(need: HostNeed, *, available_bytes: int) -> None:
    """Raise HostMemoryError, with the arithmetic, if `need` exceeds `available_bytes` of the machine."""
    if need.total > available_bytes:
        raise HostMemoryError(
            f"{need.num_ranks} rank(s) need {bytes_text(need.total)} of host memory ({need.describe()}), "
            f"{bytes_text(available_bytes)} is available. Use a smaller model or a host with more memory; if this "
            "host's memory grows on demand, state how much may be used with --host_memory_limit."
        )


@dataclass(frozen=True)
class StepTokens:
    """How many tokens are on the GPU at a time."""

    step: int
    """Of all microbatches."""
    microbatch: int
    loss_chunk: int
    batch_size: int | None = None
    """Sequences of a step, where they are known; what is advised goes by them."""

    @property
    def num_microbatches(self) -> int:
        return self.step // self.microbatch


@dataclass(frozen=True)
class GpuNeed:
    """GPU bytes of one rank by category, at the moment of a step at which it holds most."""

    rank: int
    weights: int
    gradients: int
    optimizer: int
    stash: int
    working_set: int
    graphs: int = 0
    """Activations that are kept from forward to backward."""
    messages: int = 0
    """Received ahead, and sent but not yet let go."""
    libraries: int = 0
    """Tokens of the step, workspaces of matrix products, and what the allocator cannot use."""

    @property
    def states(self) -> int:
        """What stays through all steps, whatever activations do."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.states + self.stash + self.graphs + self.messages + self.working_set + self.libraries

    def describe(self) -> str:
        """The sum as text."""
        return bytes_sum(
            (
                ("weights", self.weights),
                ("gradients", self.gradients),
                ("optimizer", self.optimizer),
                ("stashed activations", self.stash),
                ("kept activations", self.graphs),
                ("messages", self.messages),
                ("one layer's work", self.working_set),
                ("libraries", self.libraries),
            )
        )


def gpu_need(
    plan: Plan,
    shape: ModelShape,
    sizes: ByteSizes,
    tokens: StepTokens,
    *,
    rank: int,
    waiting: Collection[int] = (),
    graph_stages: Collection[int] = (),
    graph_bytes: int | None = None,
    peak_bytes: int | None = None,
    compiled: bool = True,
) -> GpuNeed:
    """Predict what torch takes on the GPU of `rank`; streamed stages share slots, resident ones hold their whole state.

    `waiting` are the stages that keep their gradients (`waiting_stages`), `graph_stages` those that keep their
    activations. `graph_bytes` and `peak_bytes` are what a layer takes for a microbatch
    (`LayerBytes`) where that was measured. `compiled` says whether layers and loss are.
    """
    own = [plan.spans[stage] for stage in plan.stages_of(rank)]
    streamed = [span.num_parameters(shape) for span in own if span.stage not in plan.resident]
    resident = {span.stage: span.num_parameters(shape) for span in own if span.stage in plan.resident}
    slots = plan.slots[rank] * max(streamed, default=0)
    kept = sum(count for stage, count in resident.items() if stage in waiting)
    # Gradients add up in one fp32 sum, of which there are two where streamed ones leave from it.
    in_place = {stage for stage in resident if stage in waiting and sizes.gradient == 4}
    summed = max([*streamed, *(count for stage, count in resident.items() if stage not in in_place)], default=0)
    num_sums = 2 if streamed and sizes.gradient > sizes.weight else 1
    size = microbatch_bytes(shape, sizes, tokens, graph_bytes=graph_bytes, peak_bytes=peak_bytes, compiled=compiled)
    most = largest_moment(plan, rank, size, graph_stages=graph_stages)
    ends = any(span.is_first or span.is_last for span in own)
    return GpuNeed(
        rank,
        weights=(slots + sum(resident.values())) * sizes.weight,
        gradients=summed * 4 * num_sums + kept * sizes.gradient,
        optimizer=sum(resident.values()) * sizes.optimizer,
        stash=most.stash,
        graphs=most.graphs,
        messages=most.messages,
        working_set=most.work,
        libraries=LIBRARY_BYTES
        + (STEP_BYTES_PER_TOKEN * tokens.step if ends else 0)
        + int(FRAGMENT_SHARE * most.total),
    )


def microbatch_bytes(
    shape: ModelShape,
    sizes: ByteSizes,
    tokens: StepTokens,
    *,
    graph_bytes: int | None = None,
    peak_bytes: int | None = None,
    compiled: bool = True,
    on_gpu: bool = True,
) -> MicrobatchBytes:
    """What a microbatch takes: estimates, but for a layer's bytes where they are given."""
    count, chunk = tokens.microbatch, tokens.loss_chunk
    layer = estimate_layer(sizes.weight, shape, count, compiled=compiled)
    return MicrobatchBytes(
        activation=count * shape.hidden_size * sizes.weight,
        layer=with_measured(layer, graph_bytes=graph_bytes, peak_bytes=peak_bytes),
        loss=loss_bytes(sizes.weight, shape, tokens=count, chunk_tokens=chunk, compiled=compiled, on_gpu=on_gpu),
        embedding=embedding_bytes(sizes.weight, shape, tokens=count, on_gpu=on_gpu),
    )


def fullest(needs: Iterable[GpuNeed]) -> GpuNeed:
    """The largest of several ranks' needs."""
    return max(needs, key=lambda need: need.total)


@dataclass(frozen=True)
class Remedy:
    """A change as the user types it, and the bytes of the fullest rank with it."""

    options: str
    num_bytes: int


def check_gpu_memory(
    need: GpuNeed, *, available_bytes: int, is_offloading: bool, remedies: Sequence[Remedy] = ()
) -> None:
    """Raise GpuMemoryError, with the arithmetic and what to change, if `need` exceeds `available_bytes` of one GPU.

    `remedies` are single changes that were tried and fit.
    """
    if need.total <= available_bytes:
        return
    if remedies:
        tried = "; or ".join(f"{remedy.options} (needs {bytes_text(remedy.num_bytes)})" for remedy in remedies)
        advice = f"Any of these alone fits: {tried}."
    else:
        general = ["raise --num_chunks (smaller microbatches)", "lower --batch_size or --seq_length"]
        general.insert(0, "raise --num_stages (smaller stages)" if is_offloading else "use --use_offload")
        advice = f"To fit: {'; '.join(general)}."
    raise GpuMemoryError(
        f"rank {need.rank} needs {bytes_text(need.total)} of GPU memory ({need.describe()}), "
        f"{bytes_text(available_bytes)} is available. {advice}"
    )
