"""The arithmetic of bytes: what a run needs in host and GPU memory; it neither measures nor allocates."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from mobius.config import Dtype
from mobius.errors import GpuMemoryError, HostMemoryError
from mobius.planner.plan import Plan
from mobius.planner.shape import ModelShape

GIB = 2**30
MOMENTS_BYTES = 8
"""The two fp32 moments of AdamW, per parameter."""
GPU_PROCESS_BYTES = int(2.2 * GIB)
"""Host memory of a rank beside its stages: Python, torch, CUDA context, communicators (2.0 to 2.2 GiB on H200s)."""
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
        parts.append(f"{self.num_ranks} x {self.process_bytes / GIB:.1f} GiB for the processes")
        return " + ".join(parts)


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
            f"{need.num_ranks} rank(s) need {need.total / GIB:.1f} GiB of host memory ({need.describe()}), "
            f"{available_bytes / GIB:.1f} GiB is available. Use a smaller model or a host with more memory; if this "
            "host's memory grows on demand, state how much may be used with --host_memory_limit."
        )


@dataclass(frozen=True)
class StepTokens:
    """How many tokens are on the GPU at a time."""

    step: int
    """Of all microbatches."""
    microbatch: int
    loss_chunk: int

    @property
    def num_microbatches(self) -> int:
        return self.step // self.microbatch


@dataclass(frozen=True)
class GpuNeed:
    """GPU bytes of one rank, by category. A lower bound: kernels' workspaces and communicators come on top."""

    rank: int
    weights: int
    gradients: int
    optimizer: int
    stash: int
    working_set: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.stash + self.working_set

    def describe(self) -> str:
        """The sum as text, in GiB."""
        return (
            f"weights {self.weights / GIB:.2f} + gradients {self.gradients / GIB:.2f} "
            f"+ optimizer {self.optimizer / GIB:.2f} + stashed activations {self.stash / GIB:.2f} "
            f"+ one layer's work {self.working_set / GIB:.2f} = {self.total / GIB:.2f} GiB"
        )


def gpu_need(
    plan: Plan,
    shape: ModelShape,
    sizes: ByteSizes,
    tokens: StepTokens,
    *,
    rank: int,
    waiting: Collection[int] = (),
    keeps_activations: bool = False,
    graph_bytes: int | None = None,
) -> GpuNeed:
    """Count the GPU bytes of `rank`: streamed stages share slots, resident ones hold their whole state.

    `waiting` are the stages that keep their gradients (`waiting_stages`), `keeps_activations` says that backward
    recomputes nothing, and `graph_bytes` is what a layer's graph holds for a microbatch where that was measured.
    """
    own = [plan.spans[stage] for stage in plan.stages_of(rank)]
    streamed = [span.num_parameters(shape) for span in own if span.stage not in plan.resident]
    resident = {span.stage: span.num_parameters(shape) for span in own if span.stage in plan.resident}
    slots = plan.slots_of(rank) * max(streamed, default=0)
    kept = sum(count for stage, count in resident.items() if stage in waiting)
    # Gradients add up in one fp32 sum, of which there are two where streamed ones leave from it.
    in_place = {stage for stage in resident if stage in waiting and sizes.gradient == 4}
    summed = max([*streamed, *(count for stage, count in resident.items() if stage not in in_place)], default=0)
    num_sums = 2 if streamed and sizes.gradient > sizes.weight else 1
    activation = shape.hidden_size * sizes.weight
    layer = layer_activation_bytes(shape, sizes, tokens.microbatch) if graph_bytes is None else graph_bytes
    per_layer = layer * tokens.num_microbatches if keeps_activations else tokens.step * activation
    # Logits in the working dtype and fp32, their gradient, and the head's gradient before accumulation.
    chunk = min(tokens.loss_chunk, tokens.microbatch)
    loss = (chunk * (sizes.weight + 8) + shape.hidden_size * sizes.weight) * shape.vocab_size
    return GpuNeed(
        rank,
        weights=(slots + sum(resident.values())) * sizes.weight,
        gradients=summed * 4 * num_sums + kept * sizes.gradient,
        optimizer=sum(resident.values()) * sizes.optimizer,
        stash=sum(len(span.layers) for span in own) * per_layer,
        working_set=max(layer, loss if any(span.is_last for span in own) else 0),
    )


def fullest(needs: Iterable[GpuNeed]) -> GpuNeed:
    """The largest of several ranks' needs."""
    return max(needs, key=lambda need: need.total)


def layer_activation_bytes(shape: ModelShape, sizes: ByteSizes, tokens: int) -> int:
    """What one layer's graph holds for `tokens`, by guess: 8 tensors of hidden and 5 of feed-forward width.

    Llama's graphs hold 0.7 (compiled) to 1.1 (eager) of it, eager ones of families with norms on queries and keys up to
    1.8 times as much.
    """
    return tokens * (8 * shape.hidden_size + 5 * shape.intermediate_size) * sizes.weight


def check_gpu_memory(need: GpuNeed, *, available_bytes: int, is_offloading: bool) -> None:
    """Raise GpuMemoryError, with the arithmetic and what to change, if `need` exceeds `available_bytes` of one GPU."""
    if need.total <= available_bytes:
        return
    advice = ["raise --num_chunks (smaller microbatches)", "lower --batch_size or --seq_length"]
    advice.insert(0, "raise --num_stages (smaller stages)" if is_offloading else "use --use_offload")
    raise GpuMemoryError(
        f"rank {need.rank} needs at least {need.total / GIB:.1f} GiB of GPU memory ({need.describe()}), "
        f"{available_bytes / GIB:.1f} GiB is available. To fit: {'; '.join(advice)}."
    )
