"""Measures a Profile on the device with the run's shapes: layers, loss, copies, messages, optimizers. Collective.

Ranks measure at the same time if they slow each other down. Results are averaged, so that all ranks get the same
profile. The run reuses the layers that were compiled here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mobius.distributed.transport import Transport
from mobius.engine.adamw import FlatAdamW
from mobius.engine.adamw_cpu import CPUAdamW
from mobius.engine.adamw_gpu import GPUAdamW
from mobius.engine.documents import typical_arguments
from mobius.engine.pipelined_router_loss import PipelinedRouterLoss, sent_shape
from mobius.engine.sliced_layers import SequenceKVCaches, SlicedLayers
from mobius.engine.stage import StageModule
from mobius.engine.stage_layers import MicrobatchContext, SequenceSlice
from mobius.engine.stage_state import StageState
from mobius.models.blocks import ModelParts
from mobius.models.layout import StageLayout
from mobius.planner.gpu_specs import STEP_OVERHEAD, SUSTAINED_SHARE, action_launch
from mobius.planner.host_rates import (
    SETTINGS,
    UPDATES_WITHIN_STEP,
    Copies,
    measure_copies,
    measure_cpu_optimizer,
    update_once,
)
from mobius.planner.profile import LayerSeconds, MessageRates, Profile, Source
from mobius.planner.timer import CollectiveTimer, Work
from mobius.schedule.action import Direction
from mobius.schedule.packed_rows import PackedRows
from mobius.schedule.partition import StageCut

GPU_PARAMETERS, MESSAGES = 2**26, 8
"""Parameters of one update, and messages sent in a row to a neighbour."""
PRODUCT_SIZE = 8192
"""Rows and columns of the matrices of a large product."""


@dataclass(frozen=True)
class MicrobatchShape:
    """Shape of a microbatch, and how it is computed."""

    batch: int
    seq_length: int
    """Tokens of each sequence in the microbatch; of a slice if sequences are sliced."""
    dtype: torch.dtype
    loss_chunk_tokens: int
    packed: PackedRows | None = None
    """None: rows are one document each."""
    tile_tokens: int | None = None
    """None: recomputed layers run whole."""
    reduced_format: str = ""
    """Format of the layers' optimizer states, if it is not the usual one."""
    full_seq_length: int | None = None
    """Tokens of a whole sequence if microbatches are slices; None: they hold whole sequences."""

    @property
    def is_sliced(self) -> bool:
        """Whether slices are measured as such; slices of packed rows attend to few earlier tokens."""
        return self.full_seq_length is not None and self.packed is None

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_length

    def hidden_size(self, parts: ModelParts) -> tuple[int, int, int]:
        """Shape [B, L, H] of the hidden states."""
        return self.batch, self.seq_length, parts.config.hidden_size


def measure_profile(
    parts: ModelParts,
    shape: MicrobatchShape,
    *,
    device: torch.device,
    transport: Transport,
    kernel: CPUAdamW | None,
    messages_through_host: bool = False,
) -> Profile:
    """Measure everything and release all memory; collective over `transport`, made for the model's messages.

    `kernel` is the CPU optimizer's; None measures torch's.
    """
    timer = CollectiveTimer(device, transport)
    # Layers of one kind share a module; their masks may differ.
    modules = [id(layer.module) for layer in parts.layers]
    kinds = list(dict.fromkeys(modules))
    attention: LayerSeconds | None = None
    indices = list(map(modules.index, kinds))
    if shape.is_sliced:
        both = [_slice_seconds(timer, parts, shape, index) for index in indices]
        layers, (attention, *_) = [layer for layer, _ in both], [own for _, own in both]
    else:
        layers = [_layer_seconds(timer.seconds, _layer_work(timer, parts, shape, index)) for index in indices]
    launch_overhead = measure_launches(timer, parts, shape)
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
        layer_kinds=tuple(layer.times(1 / SUSTAINED_SHARE) for layer in layers),  # a GPU that is always busy is slower
        kind_of_layer=tuple(map(kinds.index, modules)),
        embedding_forward=embedding_forward,
        embedding_backward=embedding_backward,
        loss=loss / SUSTAINED_SHARE,
        copies=copies,
        messages=_message_rates(timer, parts, shape, is_through_host=messages_through_host),
        cpu_adamw=UPDATES_WITHIN_STEP * updates_alone,
        gpu_adamw=_measure_gpu_optimizer(timer, shape.dtype),
        gpu_bandwidth=_measure_gpu_memory(timer, memory.num_bytes),
        step_overhead=STEP_OVERHEAD + 2 * timer.seconds(transport.barrier),
        launch_overhead=launch_overhead,
        action_launch=action_launch(launch_overhead),
        **rates.profile_fields(transport.num_ranks),
    )
    timer.forget()
    if attention is not None:
        own = attention.times(1 / SUSTAINED_SHARE)
        return replace(profile, attention=own, attention_length=shape.full_seq_length)
    return profile


def measure_launches(timer: CollectiveTimer, parts: ModelParts, shape: MicrobatchShape) -> LayerSeconds:
    """Measure the host's seconds to enqueue the first layer; 0 on a CPU. Collective.

    Compiles the layer if that is not done yet.
    """
    work = _layer_work(timer, parts, shape, 0)
    for each in work:
        each()  # compiles its kernels
    return _layer_seconds(timer.launch_seconds, work)


def measure_product_rate(timer: CollectiveTimer, dtype: torch.dtype) -> float:
    """Return operations per second of products of two large square matrices, the same on all ranks."""
    left, right = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=timer.device, dtype=dtype) for _ in range(2))
    rate = 2 * PRODUCT_SIZE**3 / timer.seconds(partial(torch.mm, left, right))
    del left, right
    timer.forget()
    return rate


def _layer_seconds(seconds: Callable[[Work], float], work: Sequence[Work]) -> LayerSeconds:
    """Return the seconds of `_layer_work`; a forward with saved activations counts as one without."""
    forward, both, recomputed = map(seconds, work)
    return LayerSeconds(forward, max(both - forward, 0.0), recomputed)


def _layer_work(timer: CollectiveTimer, parts: ModelParts, shape: MicrobatchShape, index: int) -> Sequence[Work]:
    """Return the work of one layer with random weights: forward, forward and backward, and recomputed backward.

    In tiles, activations of all tokens may not fit: forward and backward then recompute as well.
    """
    span = StageCut(0, index, index + 1, is_first=False, is_last=False)
    arguments = typical_arguments(
        parts, shape.packed, batch=shape.batch, seq_length=shape.seq_length, dtype=shape.dtype, device=timer.device
    )
    make = partial(StageModule, parts, span, loss_chunk_tokens=shape.loss_chunk_tokens, tile_tokens=shape.tile_tokens)
    recomputing = make()
    is_tiled = shape.tile_tokens is not None and shape.tokens > shape.tile_tokens
    saving = recomputing if is_tiled else make(keep_graphs=True)
    weights, gradients = _memory_of(recomputing, shape.dtype, timer.device)
    hidden = torch.randn(shape.hidden_size(parts), device=timer.device, dtype=shape.dtype)

    routers = None if parts.router_loss is None else PipelinedRouterLoss(parts.router_loss, timer.device)
    tokens = None if routers is None else routers.token_mask((shape.batch, shape.seq_length))

    def new_context() -> MicrobatchContext:
        own = None if routers is None or tokens is None else routers.context(tokens, None)
        return MicrobatchContext(arguments, routers=own)

    def forward_and_backward() -> None:
        context = new_context()
        saved = saving.forward(weights, hidden, context)[1]
        saving.backward(weights, gradients, saved, hidden, context)

    return (
        lambda: recomputing.forward(weights, hidden, new_context()),
        forward_and_backward,
        lambda: recomputing.backward(weights, gradients, [hidden], hidden, new_context()),
    )


def _slice_seconds(
    timer: CollectiveTimer, parts: ModelParts, shape: MicrobatchShape, index: int
) -> tuple[LayerSeconds, LayerSeconds]:
    """Return the seconds of a layer on a slice, and of its attention in them: means over the slices of a sequence.

    The first and the last slice are run. Attention's time grows linearly with the tokens before a slice: the mean of
    both is the mean of all, and their difference gives attention's part.
    """
    length, tokens = shape.full_seq_length, shape.seq_length
    assert length is not None
    span = StageCut(1, index, index + 1, is_first=False, is_last=False)
    stage = SlicedLayers(parts, span, SequenceKVCaches(), tile_tokens=shape.tile_tokens)
    weights, gradients = _memory_of(StageModule(parts, span, loss_chunk_tokens=1), shape.dtype, timer.device)
    hidden = torch.randn(shape.hidden_size(parts), device=timer.device, dtype=shape.dtype)
    arguments = typical_arguments(
        parts, None, batch=shape.batch, seq_length=length, dtype=shape.dtype, device=timer.device
    )

    def measure(start: int) -> tuple[float, float]:
        context = MicrobatchContext(arguments, SequenceSlice(start, start + tokens, length))
        return (
            timer.seconds(lambda: stage.forward(weights, hidden, context)),
            timer.seconds(lambda: stage.backward(weights, gradients, [hidden], hidden, context)),
        )

    ends = list(zip(measure(0), measure(length - tokens), strict=True))
    forward, recomputed = (sum(each) / 2 for each in ends)
    by_position = length / 2 / max(length - tokens, 1)
    own_forward, own_recomputed = (max(0.0, last - first) * by_position for first, last in ends)
    return (
        LayerSeconds(forward, max(recomputed - forward, 0.0), recomputed),
        LayerSeconds(own_forward, max(own_recomputed - own_forward, 0.0), own_recomputed),
    )


def _measure_ends(timer: CollectiveTimer, parts: ModelParts, shape: MicrobatchShape) -> tuple[float, float, float]:
    """Return the seconds of embedding forward, embedding backward, and norm, head and loss with their backward."""
    device, end = timer.device, len(parts.layers)
    tokens = torch.randint(0, parts.config.vocab_size, (shape.batch, shape.seq_length), device=device)
    hidden = torch.randn(shape.hidden_size(parts), device=device, dtype=shape.dtype)
    first = StageModule(parts, StageCut(0, 0, 0, True, False), loss_chunk_tokens=shape.loss_chunk_tokens)
    weights, gradients = _memory_of(first, shape.dtype, device)
    forward = timer.seconds(lambda: first.forward(weights, tokens, MicrobatchContext(())))
    backward = timer.seconds(lambda: first.embedding_backward(weights, gradients, tokens, hidden))
    last = StageModule(parts, StageCut(1, end, end, False, True), loss_chunk_tokens=shape.loss_chunk_tokens)
    own_weights, own_gradients = _memory_of(last, shape.dtype, device)
    loss = timer.seconds(
        lambda: last.loss(own_weights, own_gradients, hidden, tokens, num_targets=shape.tokens, loss_scale=1.0)
    )
    return forward, backward, loss


def _memory_of(stage: StageModule, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Tensor], ...]:
    """Make random weights and fp32 gradient sums of a stage."""
    layout = stage.layout()
    weights = torch.empty(layout.num_elements, device=device, dtype=dtype).normal_(std=0.02)
    return layout.views(weights), layout.trained_views(torch.zeros(layout.num_trained, device=device))


def _message_rates(
    timer: CollectiveTimer, parts: ModelParts, shape: MicrobatchShape, *, is_through_host: bool
) -> MessageRates:
    """Measure messages around the ring, all edges at once; the rate includes their latency."""
    transport = timer.transport
    if transport.num_ranks == 1:
        return MessageRates(1e15, 0.0, is_through_host=False)  # one rank sends no messages
    size = sent_shape(shape.hidden_size(parts), shape.dtype, parts.router_loss)
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
    return layout.num_elements / timer.seconds(lambda: update_once(adamw, state))


def _measure_gpu_memory(timer: CollectiveTimer, num_bytes: int) -> float:
    """Return bytes per second, read and written, of a copy within the device."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=timer.device) for _ in range(2))
    return 2 * num_bytes / timer.seconds(lambda: target.copy_(source))
