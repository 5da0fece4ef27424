"""The arithmetic of bytes: what a run needs in host and GPU memory; it neither measures nor allocates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mobius.config import Dtype
from mobius.errors import GpuMemoryError, HostMemoryError
from mobius.planner.partition import StageSpan
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
    host_gradient: int
    """Of a streamed stage: as much as the weight, or 4 where gradients travel in fp32."""
    host_remainder: int
    """What a streamed stage keeps to have an fp32 master: 2 beside bf16, whose bits are half of it, 4 beside fp16."""

    @classmethod
    def of(cls, dtype: Dtype, *, has_fp32_gradients: bool = False) -> ByteSizes:
        """The sizes of a run in `dtype`, in which gradients travel to the host in the same format or in fp32."""
        weight = 4 if dtype is Dtype.FP32 else 2
        remainder = {Dtype.BF16: 2, Dtype.FP16: 4, Dtype.FP32: 0}[dtype]
        return cls(weight, 4 if has_fp32_gradients else weight, remainder)

    @property
    def optimizer(self) -> int:
        """On the GPU: fp32 master and moments; in an fp32 run the weights are the master."""
        return MOMENTS_BYTES + (4 if self.weight == 2 else 0)

    @property
    def host(self) -> int:
        """Host bytes per parameter of a streamed stage: weights, gradients, remainder and moments."""
        return self.weight + self.host_gradient + self.host_remainder + MOMENTS_BYTES

    @property
    def resident(self) -> int:
        """GPU bytes per parameter of a resident stage: weights, fp32 gradients, master and moments."""
        return self.weight + 4 + self.optimizer


def _spans_of_rank(spans: Sequence[StageSpan], rank: int, num_ranks: int) -> list[StageSpan]:
    return [span for span in spans if span.stage % num_ranks == rank]


def check_host_memory(
    spans: Sequence[StageSpan],
    shape: ModelShape,
    *,
    bytes_per_parameter: int,
    process_bytes: int,
    num_ranks: int,
    available_bytes: int,
) -> int:
    """Return the host bytes that all stages of all ranks need together, the processes included.

    Raises HostMemoryError, with the arithmetic, if `available_bytes` is less.
    """
    num_parameters = sum(span.num_parameters(shape) for span in spans)
    need = num_parameters * bytes_per_parameter + num_ranks * process_bytes
    if need > available_bytes:
        raise HostMemoryError(
            f"{num_ranks} rank(s) need {need / GIB:.1f} GiB of host memory "
            f"({num_parameters:.3g} parameters x {bytes_per_parameter} bytes + {num_ranks} x "
            f"{process_bytes / GIB:.1f} GiB for the processes), {available_bytes / GIB:.1f} GiB is available. Use a "
            "smaller model or a host with more memory; if this host's memory grows on demand, state how much may be "
            "used with --host_memory_limit."
        )
    return need


@dataclass(frozen=True)
class GpuNeed:
    """GPU bytes of the fullest rank, by category. A lower bound: kernels' workspaces and communicators come on top."""

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
    spans: Sequence[StageSpan],
    shape: ModelShape,
    sizes: ByteSizes,
    *,
    num_ranks: int,
    num_slots: int | None,
    batch_tokens: int,
    microbatch_tokens: int,
    loss_chunk_tokens: int,
    keeps_activations: bool = False,
    graph_bytes: int | None = None,
) -> GpuNeed:
    """Estimate the fullest rank's GPU bytes; `num_slots` None means that every stage stays on its GPU.

    `keeps_activations` says that backward recomputes nothing, `graph_bytes` what a layer's graph holds for a microbatch
    where that was measured.
    """
    needs = []
    activation = shape.hidden_size * sizes.weight
    for rank in range(num_ranks):
        own = _spans_of_rank(spans, rank, num_ranks)
        counts = [span.num_parameters(shape) for span in own]
        if num_slots is None:
            held, grad_elements, optimizer = sum(counts), sum(counts), sum(counts) * sizes.optimizer
        else:
            held, grad_elements, optimizer = min(num_slots, len(own)) * max(counts), max(counts), 0
            # Gradients that travel wider than the weights leave from their accumulator, of which there are then two.
            grad_elements *= 2 if sizes.host_gradient > sizes.weight else 1
        layer = layer_activation_bytes(shape, sizes, microbatch_tokens) if graph_bytes is None else graph_bytes
        per_layer = layer * (batch_tokens // microbatch_tokens) if keeps_activations else batch_tokens * activation
        stash = sum(len(span.layers) for span in own) * per_layer
        # Logits in the working dtype and fp32, their gradient, and the head's gradient before accumulation.
        chunk = min(loss_chunk_tokens, microbatch_tokens)
        loss = (chunk * (sizes.weight + 8) + shape.hidden_size * sizes.weight) * shape.vocab_size
        work = max(layer, loss if any(span.is_last for span in own) else 0)
        needs.append(GpuNeed(rank, held * sizes.weight, grad_elements * 4, optimizer, stash, work))
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
