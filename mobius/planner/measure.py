"""Measures a Profile on the device with the run's shapes: layers, loss, copies, messages, optimizers. Collective.

If ranks slow each other down in a kind of work, it is measured on all ranks at once. Results are averaged, so that all
ranks get the same profile. The run uses the layers that were compiled here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mobius.engine.adamw import FlatAdamW
from mobius.engine.adamw_cpu import CPUAdamW
from mobius.engine.adamw_gpu import GPUAdamW
from mobius.engine.pipelined_router_loss import router_messages
from mobius.engine.stage import StageModule
from mobius.engine.stage_layers import MicrobatchContext
from mobius.engine.stage_state import StageState
from mobius.models.blocks import ModelParts
from mobius.models.layout import StageLayout
from mobius.models.loss import TargetRows
from mobius.objectives.cross_entropy import SUPERVISED
from mobius.objectives.objective import StepScale
from mobius.planner.gpu_specs import STEP_OVERHEAD, SUSTAINED_SHARE, action_launch
from mobius.planner.host_rates import (
    SETTINGS,
    Copies,
    measure_copies,
    measure_cpu_optimizer,
    update_once,
    updates_meanwhile,
)
from mobius.planner.layer_bench import LayerBench, MicrobatchShape, layer_seconds, make_weights_and_sums, slice_seconds
from mobius.planner.profile import LayerSeconds, MessageRates, Profile, Source
from mobius.planner.timer import CollectiveTimer, Work
from mobius.schedule.action import Direction
from mobius.schedule.partition import StageCut

GPU_PARAMETERS, MESSAGES = 2**26, 8
"""Number of parameters in one update; number of messages that a rank sends to its neighbour in a row."""
PRODUCT_SIZE = 8192
"""Rows and columns of the matrices of a large product."""


def measure_profile(
    timer: CollectiveTimer,
    parts: ModelParts,
    shape: MicrobatchShape,
    kernel: CPUAdamW | None,
    *,
    messages_through_host: bool = False,
) -> Profile:
    """Measure a profile and release all memory. Collective; the timer's transport must suit the model's messages.

    `kernel` is the CPU optimizer's kernel; None measures torch's optimizer.
    """
    device, transport = timer.device, timer.transport
    # Layers of one kind share a module, though their masks may differ.
    modules = [id(layer.module) for layer in parts.layers]
    kinds = list(dict.fromkeys(modules))
    benches = [LayerBench(parts, modules.index(kind), shape, device) for kind in kinds]
    attention: LayerSeconds | None = None
    if shape.is_sliced:
        both = [slice_seconds(bench, timer.seconds) for bench in benches]
        layers, (attention, *_) = [layer for layer, _ in both], [own for _, own in both]
    else:
        layers = [layer_seconds(bench, timer.seconds) for bench in benches]
    launches = measure_launches(timer, parts, shape, kernel)
    embedding_forward, embedding_backward, loss = _measure_ends(timer, parts, shape)
    with Copies(device) as memory:
        copies = measure_copies(timer, memory)
        updates_alone, rates = measure_cpu_optimizer(
            timer,
            shape.dtype,
            kernel,
            memory,
            each_way=copies.host_to_device_duplex,
            reduced_format=shape.reduced_format,
        )
    profile = Profile(
        source=Source.MEASURED,
        basis=f"{transport.num_ranks} x {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'cpu'}",
        num_ranks=transport.num_ranks,
        microbatch_tokens=shape.tokens,
        layer_kinds=tuple(layer.times(1 / SUSTAINED_SHARE) for layer in layers),  # in a step, a busy GPU is slower
        kind_of_layer=tuple(map(kinds.index, modules)),
        embedding_forward=embedding_forward,
        embedding_backward=embedding_backward,
        loss=loss / SUSTAINED_SHARE,
        copies=copies,
        messages=_message_rates(timer, parts, shape, is_through_host=messages_through_host),
        cpu_adamw=updates_alone,
        gpu_adamw=_measure_gpu_optimizer(timer, shape.dtype),
        gpu_bandwidth=_measure_gpu_memory(timer, memory.num_bytes),
        step_overhead=STEP_OVERHEAD + 2 * timer.seconds(transport.barrier),
        **launches.profile_fields(),
        **rates.profile_fields(),
    )
    timer.forget()
    if attention is not None:
        own = attention.times(1 / SUSTAINED_SHARE)
        return replace(profile, attention=own, attention_length=shape.full_seq_length)
    return profile


@dataclass(frozen=True)
class Launches:
    """Seconds that the host takes to enqueue work."""

    layer: LayerSeconds
    """Seconds for a layer while other cores are idle."""
    beside_updates: float = 1.0
    """Seconds while other cores update / seconds while other cores are idle, on the rank with the largest ratio."""

    def profile_fields(self) -> dict[str, Any]:
        """Return the fields of a profile by name."""
        return {
            "launch_overhead": self.layer,
            "action_launch": action_launch(self.layer),
            "launch_beside_updates": self.beside_updates,
        }


def measure_launches(
    timer: CollectiveTimer, parts: ModelParts, shape: MicrobatchShape, kernel: CPUAdamW | None
) -> Launches:
    """Measure how long the host takes to enqueue the first layer, alone and during updates; 0 on a CPU. Collective.

    Compiles the layer if it is not compiled yet.
    """

    def seconds(work: Work) -> float:
        work()  # the first call compiles kernels
        return timer.launch_seconds(work)

    bench = LayerBench(parts, 0, shape, timer.device)
    alone = layer_seconds(bench, seconds)
    if alone.recomputed_backward == 0:
        return Launches(alone)
    run = bench.on_rows()
    with updates_meanwhile(shape.dtype, kernel, reduced_format=shape.reduced_format):
        beside = timer.slowest_launch(run.backward)
    return Launches(alone, max(1.0, beside / alone.recomputed_backward))


def measure_product_rate(timer: CollectiveTimer, dtype: torch.dtype) -> float:
    """Return the operations per second of products of two large square matrices; equal on all ranks."""
    left, right = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=timer.device, dtype=dtype) for _ in range(2))
    rate = 2 * PRODUCT_SIZE**3 / timer.seconds(partial(torch.mm, left, right))
    del left, right
    timer.forget()
    return rate


def _measure_ends(timer: CollectiveTimer, parts: ModelParts, shape: MicrobatchShape) -> tuple[float, float, float]:
    """Return the seconds of the embedding's forward, of its backward, and of norm, head and loss with backward."""
    device, end = timer.device, len(parts.layers)
    tokens = torch.randint(0, parts.config.vocab_size, (shape.batch, shape.seq_length), device=device)
    hidden = torch.randn(shape.hidden_size(parts), device=device, dtype=shape.dtype)
    first = StageModule(parts, StageCut(0, 0, 0, True, False), loss_chunk_tokens=shape.loss_chunk_tokens)
    weights, gradients = make_weights_and_sums(first, shape.dtype, device)
    context = MicrobatchContext(())
    forward = timer.seconds(lambda: first.forward(weights, tokens, context))
    backward = timer.seconds(lambda: first.embedding_backward(weights, gradients, tokens, hidden, context))
    last = StageModule(parts, StageCut(1, end, end, False, True), loss_chunk_tokens=shape.loss_chunk_tokens)
    own_weights, own_gradients = make_weights_and_sums(last, shape.dtype, device)
    num_outputs = parts.head.shapes["weight"][0]  # 1 for a reward model; its loss takes no longer
    rows, scale = TargetRows(tokens.remainder(num_outputs)), StepScale(shape.tokens)
    loss = timer.seconds(lambda: last.loss(own_weights, own_gradients, hidden, rows, SUPERVISED, scale))
    return forward, backward, loss * shape.head_work


def _message_rates(
    timer: CollectiveTimer, parts: ModelParts, shape: MicrobatchShape, *, is_through_host: bool
) -> MessageRates:
    """Measure messages around the ring of ranks, between all neighbours at once; the rate includes their latency."""
    transport = timer.transport
    if transport.num_ranks == 1:
        return MessageRates(1e15, 0.0, is_through_host=False)  # one rank sends no messages
    size = router_messages(parts.router_loss).sent_shape(shape.hidden_size(parts), shape.dtype)
    message = torch.zeros(size, dtype=shape.dtype, device=timer.device)
    target, source = (transport.rank + 1) % transport.num_ranks, (transport.rank - 1) % transport.num_ranks

    def send_round() -> None:
        for _ in range(MESSAGES):
            transport.post_receive(source, Direction.FORWARD)
            transport.send(message, target, Direction.FORWARD)
            transport.receive(source, Direction.FORWARD)
        transport.finish_step()

    seconds = timer.seconds(send_round) / MESSAGES
    return MessageRates(message.nbytes / seconds, 0.0, is_through_host=is_through_host)


def _measure_gpu_optimizer(timer: CollectiveTimer, dtype: torch.dtype) -> float:
    layout = StageLayout.of({"weight": (GPU_PARAMETERS, 1)})
    state = StageState.on_device(layout, timer.device, dtype)
    adamw = FlatAdamW(SETTINGS, fused=GPUAdamW())
    adamw.warm_up([state])
    return layout.num_units / timer.seconds(lambda: update_once(adamw, state))


def _measure_gpu_memory(timer: CollectiveTimer, num_bytes: int) -> float:
    """Return the bytes per second that a copy within the device reads and writes."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=timer.device) for _ in range(2))
    return 2 * num_bytes / timer.seconds(lambda: target.copy_(source))
