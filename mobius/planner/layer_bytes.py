"""Measures the GPU memory of layers by running one of each kind as in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mobius.engine.documents import typical_arguments, typical_documents
from mobius.engine.pipelined_router_loss import PipelinedRouterLoss
from mobius.engine.sliced_layers import SequenceKVCaches, SlicedLayers
from mobius.engine.stage_layers import MicrobatchContext, SequenceSlice
from mobius.engine.tiles import TiledLayer
from mobius.limits import KEYS_PER_CALL
from mobius.models.attention import DocumentAttention
from mobius.models.block_autograd import Block, NamedTensors, backward, recomputed_backward, run_with_graph
from mobius.models.blocks import LayerArguments, ModelParts
from mobius.models.compiled import KeywordArguments
from mobius.planner.peak_memory import LayerBytes
from mobius.schedule.packed_rows import PackedRows
from mobius.schedule.partition import StageCut
from mobius.schedule.plan import RecomputeLevel


def measure_layer_bytes(
    parts: ModelParts,
    *,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    packed: PackedRows | None = None,
    tile_tokens: int | None = None,
    sliced_length: int | None = None,
    with_products: bool = False,
) -> LayerBytes:
    """Return the GPU memory of one layer for one microbatch of `shape` [B, L, H]: its graph and its peak in backward.

    Each number is the maximum over the kinds of layers. Backward is measured with saved and with recomputed
    activations. With tiles, a whole layer may not fit, so it is measured on about one tile's tokens and scaled up in
    proportion. `with_products` also measures a forward that saves only its matrix products, if layers can; this
    compiles once more. Layers run on zeros; all memory is freed afterwards.

    `sliced_length`: microbatches are slices of sequences of this many tokens. The recomputed slice then attends to as
    many earlier tokens as one attention call takes; keys, values and their gradient sums are not counted.
    """
    levels = [RecomputeLevel.NONE]
    if with_products and parts.attention is not DocumentAttention.FLEX:
        levels.append(RecomputeLevel.ELEMENTWISE)
    tokens, whole = shape[0] * shape[1], shape
    tile_tokens = min(tile_tokens or tokens, tokens)
    if tokens > tile_tokens:
        whole = (max(1, tile_tokens // shape[1]), min(shape[1], tile_tokens), shape[2])
    share = tokens / (whole[0] * whole[1])
    held, peak, recomputed = dict.fromkeys(levels, 0), dict.fromkeys(levels, 0), 0
    for index in {id(layer.module): index for index, layer in enumerate(parts.layers)}.values():
        bench = _LayerBench(parts, index, dtype, device, packed)
        for level in levels:
            own_held, own_peak = bench.measure_saved(whole, level)
            held[level] = max(held[level], int(share * own_held))
            peak[level] = max(peak[level], int(share * own_peak))
        if sliced_length is None:
            recomputed = max(recomputed, bench.measure_recomputed(shape, tile_tokens))
        else:
            recomputed = max(recomputed, bench.measure_slice(shape, sliced_length, tile_tokens))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)  # reset so that a run's peak does not include this measurement
    everything, products = RecomputeLevel.NONE, RecomputeLevel.ELEMENTWISE
    return LayerBytes(held[everything], peak[everything], recomputed, held.get(products), peak.get(products))


@dataclass(frozen=True)
class _LayerBench:
    """A layer that runs on zeros while GPU memory is measured."""

    parts: ModelParts
    index: int
    dtype: torch.dtype
    device: torch.device
    packed: PackedRows | None

    @property
    def layer(self) -> Block:
        return self.parts.layers[self.index]

    def measure_saved(self, shape: tuple[int, int, int], level: RecomputeLevel) -> tuple[int, int]:
        """Return the bytes of its graph and the peak of its backward, for hidden states of `shape`."""
        layer, (arguments, other_gradients) = self.layer, self._arguments(shape)

        def play(weights: NamedTensors, sums: NamedTensors, inputs: Tensor, gradient: Tensor) -> int:
            graph = run_with_graph(layer, weights, inputs, arguments, level)
            held = torch.cuda.memory_allocated(self.device)
            backward(layer, graph, sums, gradient, *other_gradients)
            return held

        return self._measure(shape, play)

    def measure_recomputed(self, shape: tuple[int, int, int], tile_tokens: int) -> int:
        """Return the peak bytes of a backward that recomputes the forward, in tiles if there are more tokens."""
        layer, (arguments, other_gradients) = self.layer, self._arguments(shape)
        tiled = None
        if shape[0] * shape[1] > tile_tokens:
            tiled = TiledLayer(self.parts.split_at_attention(self.index), tile_tokens=tile_tokens)

        def play(weights: NamedTensors, sums: NamedTensors, inputs: Tensor, gradient: Tensor) -> int:
            if tiled is None:
                recomputed_backward(layer, weights, (inputs,), arguments, sums, gradient, *other_gradients)
            else:
                tiled.backward(weights, sums, inputs, gradient, arguments, other_gradients=other_gradients)
            return torch.cuda.memory_allocated(self.device)

        return self._measure(shape, play)[1]

    def measure_slice(self, shape: tuple[int, int, int], length: int, tile_tokens: int) -> int:
        """Return the peak bytes of a slice's forward and backward in tiles, for hidden states of `shape`."""
        tokens = shape[1]
        start = min(length // tokens - 1, -(-KEYS_PER_CALL // tokens)) * tokens
        cut = StageCut(1, self.index, self.index + 1, is_first=False, is_last=False)
        stage = SlicedLayers(self.parts, cut, SequenceKVCaches(), tile_tokens=tile_tokens)
        seen, packed = start + tokens, self.packed
        cu_seqlens = None if packed is None else typical_documents(packed, batch=shape[0], seq_length=seen).cu_seqlens
        context = MicrobatchContext(
            self._all_arguments((shape[0], seen, shape[2])), SequenceSlice(start, seen, seen, cu_seqlens)
        )

        def play(weights: NamedTensors, sums: NamedTensors, inputs: Tensor, gradient: Tensor) -> int:
            _, saved_for_backward = stage.forward(weights, inputs, context)
            stage.backward(weights, sums, saved_for_backward, gradient, context)
            return torch.cuda.memory_allocated(self.device)

        return self._measure(shape, play)[1]

    def _arguments(self, shape: tuple[int, int, int]) -> tuple[KeywordArguments, list[Tensor]]:
        """Return the arguments as in a run, and the gradients of the layer's outputs after the hidden states."""
        own = self._all_arguments(shape)[self.index]
        if self.parts.router_loss is None or self.index not in self.parts.router_loss.layers:
            return own, []
        routers = PipelinedRouterLoss(self.parts.router_loss, self.device)
        context = routers.context(routers.token_mask(shape[:2]), None)
        return context.arguments(own), [context.router_sums]

    def _all_arguments(self, shape: tuple[int, int, int]) -> LayerArguments:
        return typical_arguments(
            self.parts, self.packed, batch=shape[0], seq_length=shape[1], dtype=self.dtype, device=self.device
        )

    def _measure(
        self, shape: tuple[int, int, int], play: Callable[[NamedTensors, NamedTensors, Tensor, Tensor], int]
    ) -> tuple[int, int]:
        """Return the bytes that `play` reports and the peak, both without the tensors passed to it."""
        shapes, frozen, dtype, device = (
            self.layer.parameter_shapes(),
            self.layer.frozen_names(),
            self.dtype,
            self.device,
        )
        weights = {name: torch.zeros(size, dtype=dtype, device=device) for name, size in shapes.items()}
        sums = {name: torch.zeros(size, device=device) for name, size in shapes.items() if name not in frozen}
        inputs = torch.zeros(shape, dtype=dtype, device=device)
        gradient = torch.zeros_like(inputs)
        held = peak = 0
        for _ in range(2):  # the first pass compiles and allocates what libraries retain
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            held = play(weights, sums, inputs, gradient) - before
            peak = torch.cuda.max_memory_allocated(device) - before
        return held, peak
