"""Measures a Profile on the real device with the real shapes: layers, loss, copies, messages, optimizers. Collective.

Every number is taken on every rank at once where ranks disturb each other, and averaged, so that all ranks get the same
profile. It decides nothing (planner/) and keeps nothing (profile_cache.py). Compiling what it times comes on top of its
own seconds, and is not done again by the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mobius.memory.available import available_host_bytes
from mobius.memory.host_arena import HostArena
from mobius.memory.layout import StageLayout
from mobius.memory.resident import ResidentStages
from mobius.memory.stage_state import StageState
from mobius.models.blocks import LayerInputs, ModelParts
from mobius.optim.adamw import AdamWSettings, FlatAdamW
from mobius.optim.kernel import AdamWKernel
from mobius.planner.partition import StageSpan
from mobius.planner.profile import CopyRates, LayerSeconds, MessageRates, Profile, Source
from mobius.runtime.stage import StageModule
from mobius.runtime.transport import Transport

PART_SECONDS = 0.4
"""How long each part is repeated, at least `MIN_REPEATS` times; some twenty parts make a few seconds in all."""
MIN_REPEATS, WARM_UP = 3, 2
MESSAGES = 8
"""Sent in a row to a neighbour."""
SETTINGS = AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01)


@dataclass(frozen=True)
class MicrobatchShape:
    """What flows: sequences and tokens of a microbatch, and how it is computed."""

    batch: int
    seq_length: int
    dtype: torch.dtype
    loss_chunk_tokens: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_length


@dataclass(frozen=True)
class Amounts:
    """How much is copied and updated at a time; smaller for tests."""

    copy_bytes: int = 2**28
    cpu_parameters: int = 2**26
    gpu_parameters: int = 2**26


class _Bench:
    """Runs work for a while and tells the seconds of one run, the same on all ranks."""

    def __init__(self, device: torch.device, transport: Transport) -> None:
        self.device, self.transport = device, transport

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], *, begin: Callable[[], object] | None = None) -> float:
        """Mean seconds of `work` on all ranks at once, run back to back as within a step.

        `begin` starts what is to go on beside it, with the device idle before.
        """
        for _ in range(WARM_UP):
            work()
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        # All ranks repeat equally often, or those that are done would no longer disturb the others.
        repeats = max(MIN_REPEATS, int(PART_SECONDS / self.mean(max(time.perf_counter() - start, 1e-6))))
        self.transport.barrier()
        if begin is not None:
            begin()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        if begin is None:
            self.synchronize()
        seconds = (time.perf_counter() - start) / repeats
        self.synchronize()
        return self.mean(seconds)

    def seconds_alone(self, work: Callable[[], object]) -> float:
        """Mean over the ranks of the seconds that each takes while the others wait."""
        own = 0.0
        for rank in range(self.transport.num_ranks):
            self.transport.barrier()
            if rank != self.transport.rank:
                continue
            times = []
            for _ in range(WARM_UP + MIN_REPEATS):
                self.synchronize()
                start = time.perf_counter()
                work()
                self.synchronize()
                times.append(time.perf_counter() - start)
            own = min(times[WARM_UP:])
        self.transport.barrier()
        return self.mean(own)

    def mean(self, value: float) -> float:
        return float(self.transport.sum_over_ranks(torch.tensor([value], dtype=torch.float64))) / (
            self.transport.num_ranks
        )


def measure_profile(
    parts: ModelParts,
    shape: MicrobatchShape,
    *,
    device: torch.device,
    transport: Transport,
    kernel: AdamWKernel | None,
    messages_through_host: bool = False,
    amounts: Amounts | None = None,
) -> Profile:
    """Time everything; collective over all ranks of `transport`, whose messages must have the shape of the model's.

    `kernel` is the CPU optimizer's; None measures torch's. All memory that it takes is given back.
    """
    amounts = amounts or Amounts()
    bench = _Bench(device, transport)
    layers, kind_of_layer = _measure_layers(bench, parts, shape)
    embedding_forward, embedding_backward, loss = _measure_ends(bench, parts, shape)
    memory = _Copies(device, amounts.copy_bytes)
    try:
        copies = _measure_copies(bench, memory, amounts.copy_bytes)
        cpu = _measure_cpu_optimizer(bench, shape.dtype, kernel, amounts.cpu_parameters, memory)
    finally:
        memory.close()
    both = copies.both_down + copies.both_up
    profile = Profile(
        source=Source.MEASURED,
        basis=f"{transport.num_ranks} x {_device_name(device)}",
        num_ranks=transport.num_ranks,
        microbatch_tokens=shape.tokens,
        layer_kinds=layers,
        kind_of_layer=kind_of_layer,
        embedding_forward=embedding_forward,
        embedding_backward=embedding_backward,
        loss=loss,
        copies=copies,
        messages=_measure_messages(bench, parts, shape, is_through_host=messages_through_host),
        cpu_adamw=cpu.alone,
        cpu_adamw_together=cpu.together,
        cpu_adamw_beside_copies=cpu.beside_copies,
        cpu_adamw_bytes=cpu.bytes_moved,
        gpu_adamw=_measure_gpu_optimizer(bench, shape.dtype, amounts.gpu_parameters),
        # At least what was seen to be moved.
        host_bandwidth=transport.num_ranks * max(both, cpu.together * cpu.bytes_moved),
        gpu_bandwidth=_measure_gpu_memory(bench, amounts.copy_bytes),
        gpu_memory=_memory_bytes(device),
        step_overhead=bench.seconds(transport.barrier),
    )
    del memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # a run reports its own
    return profile


def _measure_layers(
    bench: _Bench, parts: ModelParts, shape: MicrobatchShape
) -> tuple[tuple[LayerSeconds, ...], tuple[int, ...]]:
    """Every kind of layer, forward, backward with recompute, and forward and backward with the graph kept."""
    device = bench.device
    inputs = LayerInputs(parts, device=device, dtype=shape.dtype)
    # Layers of one kind share a module; masks differ by what the family gives them beside the hidden states.
    kinds: dict[int, int] = {}
    for index, layer in enumerate(parts.layers):
        kinds.setdefault(id(layer.module), index)
    seconds = []
    for index in kinds.values():
        span = StageSpan(0, index, index + 1, is_first=False, is_last=False)
        stage = StageModule(parts, span, inputs, loss_chunk_tokens=shape.loss_chunk_tokens)
        weights, gradients = _memory_of(stage, shape.dtype, device)
        hidden = torch.randn(shape.batch, shape.seq_length, parts.config.hidden_size, device=device, dtype=shape.dtype)

        def forward(stage: StageModule = stage, w: dict[str, Tensor] = weights, h: Tensor = hidden) -> None:
            stage.forward(w, h)

        def recomputed(
            stage: StageModule = stage, w: dict[str, Tensor] = weights, g: dict[str, Tensor] = gradients,
            h: Tensor = hidden,
        ) -> None:  # fmt: skip
            stage.backward(w, g, [h], h)

        def kept(
            stage: StageModule = stage, w: dict[str, Tensor] = weights, g: dict[str, Tensor] = gradients,
            h: Tensor = hidden,
        ) -> None:  # fmt: skip
            stage.backward(w, g, stage.forward(w, h, keep_graphs=True)[1], h)

        forward_seconds = bench.seconds(forward)
        # What is kept is measured as a pair; a forward that keeps its graph counts as one that does not.
        backward = max(bench.seconds(kept) - forward_seconds, 0.0)
        seconds.append(LayerSeconds(forward_seconds, backward, bench.seconds(recomputed)))
    order = list(kinds)
    return tuple(seconds), tuple(order.index(id(layer.module)) for layer in parts.layers)


def _measure_ends(bench: _Bench, parts: ModelParts, shape: MicrobatchShape) -> tuple[float, float, float]:
    """Embedding forward, embedding backward, and norm, head and loss with their backward."""
    device = bench.device
    inputs = LayerInputs(parts, device=device, dtype=shape.dtype)
    size = (shape.batch, shape.seq_length)
    tokens = torch.randint(0, parts.config.vocab_size, size, device=device)
    hidden = torch.randn(*size, parts.config.hidden_size, device=device, dtype=shape.dtype)
    first = StageModule(parts, StageSpan(0, 0, 0, True, False), inputs, loss_chunk_tokens=shape.loss_chunk_tokens)
    weights, gradients = _memory_of(first, shape.dtype, device)
    forward = bench.seconds(lambda: first.forward(weights, tokens))
    backward = bench.seconds(lambda: first.embedding_backward(weights, gradients, tokens, hidden))
    end = len(parts.layers)
    last = StageModule(parts, StageSpan(1, end, end, False, True), inputs, loss_chunk_tokens=shape.loss_chunk_tokens)
    own_weights, own_gradients = _memory_of(last, shape.dtype, device)
    loss = bench.seconds(
        lambda: last.loss(own_weights, own_gradients, hidden, tokens, num_targets=shape.tokens, loss_scale=1.0)
    )
    return forward, backward, loss


def _memory_of(
    stage: StageModule, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random weights and fp32 sums of a stage."""
    layout = StageLayout.of(stage.shapes)
    weights = torch.empty(layout.num_elements, device=device, dtype=dtype).normal_(std=0.02)
    return layout.views(weights), layout.views(torch.zeros(layout.num_elements, device=device))


class _Copies:
    """Page-locked and device memory with a stream for each direction; `close` gives it back."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._host = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2)]
        self._on_device = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(2)]
            # Not pin_memory: torch would keep the memory for good.
            for tensor in self._host:
                error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
                assert int(error) == 0, f"cudaHostRegister: {error}"

    def close(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            for tensor in self._host:
                torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())

    def down(self) -> None:
        self._run(0, self._on_device[0], self._host[0])

    def up(self) -> None:
        self._run(1, self._host[1], self._on_device[1])

    def both(self) -> None:
        self.down()
        self.up()

    def _run(self, index: int, target: Tensor, source: Tensor) -> None:
        if not self._streams:
            target.copy_(source)
            return
        with torch.cuda.stream(self._streams[index]):
            target.copy_(source, non_blocking=True)


def _measure_copies(bench: _Bench, copies: _Copies, num_bytes: int) -> CopyRates:
    both = num_bytes / bench.seconds(copies.both)
    return CopyRates(
        down=num_bytes / bench.seconds_alone(copies.down),
        up=num_bytes / bench.seconds_alone(copies.up),
        down_together=num_bytes / bench.seconds(copies.down),
        up_together=num_bytes / bench.seconds(copies.up),
        both_down=both,
        both_up=both,
    )


def _measure_messages(
    bench: _Bench, parts: ModelParts, shape: MicrobatchShape, *, is_through_host: bool
) -> MessageRates:
    """Messages round the ring, all edges at once; what latency they have is in the rate, at their real size."""
    transport, device = bench.transport, bench.device
    size = (shape.batch, shape.seq_length, parts.config.hidden_size)
    message = torch.zeros(size, dtype=shape.dtype, device=device)
    if transport.num_ranks == 1:
        return MessageRates(1e15, 0.0, is_through_host=False)  # handed over, not sent
    target, source = (transport.rank + 1) % transport.num_ranks, (transport.rank - 1) % transport.num_ranks

    def send_round() -> None:
        for _ in range(MESSAGES):
            transport.post_receive(source)
            transport.send(message, target)
            transport.receive(source)
        transport.finish_step()

    seconds = bench.seconds(send_round) / MESSAGES
    return MessageRates(message.nbytes / seconds, 0.0, is_through_host=is_through_host)


@dataclass(frozen=True)
class _CpuRates:
    alone: float
    together: float
    beside_copies: float
    bytes_moved: int


def _measure_cpu_optimizer(
    bench: _Bench, dtype: torch.dtype, kernel: AdamWKernel | None, num_parameters: int, copies: _Copies
) -> _CpuRates:
    """Parameters per second of a streamed stage's update, on the host with the run's threads."""
    layout = StageLayout.of({"weight": (num_parameters, 1)})
    state = HostArena({0: layout}, dtype=dtype, register=False).states[0]
    state.gradients.fill_(1e-3)
    adamw = FlatAdamW(SETTINGS, kernel)
    alone = bench.seconds_alone(lambda: _update(adamw, state))
    together = beside = bench.seconds(lambda: _update(adamw, state))
    if bench.device.type == "cuda":
        # Enough that the copies outlast the updates, which are `PART_SECONDS` long.
        num_copies = int(2 * max(PART_SECONDS, MIN_REPEATS * together) / bench.seconds(copies.both)) + 1

        def start_copies() -> None:
            for _ in range(num_copies):
                copies.both()

        beside = bench.seconds(lambda: _update(adamw, state), begin=start_copies)
    sizes = [tensor.element_size() for tensor in state.tensors]
    moved = 2 * sum(sizes) - state.gradients.element_size()
    count = layout.num_elements
    return _CpuRates(count / alone, count / together, count / beside, moved)


def _update(adamw: FlatAdamW, state: StageState) -> None:
    adamw.update(state, step=1, learning_rate=1e-5, gradient_factor=1.0)


def _measure_gpu_optimizer(bench: _Bench, dtype: torch.dtype, num_parameters: int) -> float:
    layout = StageLayout.of({"weight": (num_parameters, 1)})
    state = ResidentStages({0: layout}, dtype=dtype, device=bench.device).states[0]
    adamw = FlatAdamW(SETTINGS)
    return layout.num_elements / bench.seconds(lambda: _update(adamw, state))


def _measure_gpu_memory(bench: _Bench, num_bytes: int) -> float:
    """Bytes per second read and written by a copy within the device."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=bench.device) for _ in range(2))
    return 2 * num_bytes / bench.seconds(lambda: target.copy_(source))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return available_host_bytes()
