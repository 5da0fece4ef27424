"""Runs a stage's layers on slices of sequences: forward in order, backward in reverse (`schedule/breadth_first.py`).

    forward    slice 0, 1, 2   project, store keys and values, attend to all so far, finish; save each layer's input
    keys       slice 0, 1, 2   project, store keys and values again, because other stages have used their memory
    backward   slice 2, 1, 0   recompute, add to the gradients of earlier keys and values, then use the slice's

The model's last stage starts backward right after forward. So its keys and values are still in memory, and its last
layer finishes only in backward. If attention results are saved with each layer's input, backward does not recompute
attention. Attention reads all earlier keys; for long sequences it takes more time than the rest of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mobius.engine.embedder import Embedder
from mobius.engine.stage_layers import MicrobatchContext, SavedForBackward, SequenceSlice, tensors_of
from mobius.engine.tiles import TiledLayer
from mobius.models.attention_split import Heads, LayerAttention, without_attention_arguments
from mobius.models.block_autograd import NamedTensors
from mobius.models.blocks import ModelParts
from mobius.models.sinks import SINKS, add_sinks, sinks_gradient
from mobius.models.slice_attention import SequenceKVCache, attend_slice, attend_slice_backward
from mobius.models.slice_pieces import SlicedAttentionSettings, choose_kernel
from mobius.schedule.partition import StageCut

_WHOLE_SLICE = 2**62
"""Tile size in tokens, larger than every slice."""


class SequenceKVCaches:
    """Memory for the keys and values of one stage's layers; the stages of a rank take turns with it."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, tuple[int, int, int, int], torch.dtype], SequenceKVCache] = {}

    def of(self, position: int, heads: Heads, length: int) -> SequenceKVCache:
        """Return the cache of the stage's layer at `position`, for `heads` and sequences of `length` tokens."""
        batch, num_heads, _, size = heads.key.shape
        shape = batch, num_heads, length, size
        key = position, shape, heads.key.dtype
        if key not in self._made:
            assert heads.value.shape == heads.key.shape, "keys and values differ in shape"
            self._made[key] = SequenceKVCache(shape, dtype=heads.key.dtype, device=heads.key.device)
        return self._made[key]


class SlicedLayers:
    """Layers of a stage whose microbatches are slices; `StageModule` runs norm, head and the embedding's backward."""

    def __init__(
        self,
        parts: ModelParts,
        cut: StageCut,
        caches: SequenceKVCaches,
        *,
        tile_tokens: int | None = None,
        saves_attention: bool = False,
    ) -> None:
        """Raises CheckpointError if the layers of the model family cannot be split at attention."""
        self._parts, self._cut, self._caches = parts, cut, caches
        self._embedder = Embedder(parts.embedding)
        self._saves_attention = saves_attention
        blocks = [parts.split_at_attention(index) for index in cut.layers]
        self._blocks = blocks
        self._layers = [TiledLayer(each, tile_tokens=tile_tokens or _WHOLE_SLICE) for each in blocks]

    def forward(
        self, weights: NamedTensors, inputs: Tensor, context: MicrobatchContext
    ) -> tuple[Tensor, list[SavedForBackward]]:
        """Run the layers on a slice. The model's last layer stops after storing keys and values.

        Returns the hidden states and the tensors for `backward`: each layer's input and, if `saves_attention`, its
        attention result [B, T, heads, D] and log-sum-exp fp32 [B, heads, T]; of the model's last layer, only the input.
        """
        hidden = self._embedder.run(weights, inputs, context) if self._cut.is_first else inputs
        saved_for_backward: list[SavedForBackward] = []
        if self._cut.is_last and not self._layers:
            saved_for_backward.append(hidden)  # a stage without layers: norm and head read this input
        for position, layer in enumerate(self._layers):
            own = self._arguments(position, context)
            if self._is_last(position):
                saved_for_backward.append(hidden)
                self._put(position, layer.run_pre_attention(weights, hidden, own), _sequence_slice_of(context))
                continue
            attention = _SliceAttention(self, position, _sequence_slice_of(context), weights)
            (output,) = layer.run(weights, hidden, own, attention)
            mine = [hidden, *(attention.result if self._saves_attention else [])]
            saved_for_backward += mine if self._has_backward(position) else [each.new_empty(0) for each in mine]
            hidden = output
        return hidden, saved_for_backward

    def run(self, weights: NamedTensors, inputs: Tensor, context: MicrobatchContext) -> Tensor:
        hidden = self._embedder.run(weights, inputs, context) if self._cut.is_first else inputs
        for position, layer in enumerate(self._layers):
            attention = _SliceAttention(self, position, _sequence_slice_of(context), weights)
            (hidden,) = layer.run(weights, hidden, self._arguments(position, context), attention)
        return hidden

    def save_input(self, inputs: Tensor) -> list[SavedForBackward] | None:
        """Return None: every slice must run `forward`, because later slices need its keys and values."""
        return None

    def recompute_kv(
        self, weights: NamedTensors, saved_for_backward: Sequence[Tensor], context: MicrobatchContext
    ) -> None:
        """Recompute the keys and values of a slice from the saved inputs, and store them."""
        for position, layer in enumerate(self._layers):
            if self._has_backward(position):
                hidden = saved_for_backward[position * self._per_layer]
                self._put(
                    position,
                    layer.run_pre_attention(weights, hidden, self._arguments(position, context)),
                    _sequence_slice_of(context),
                )

    def finish_forward(
        self, weights: NamedTensors, saved_for_backward: list[SavedForBackward], context: MicrobatchContext
    ) -> tuple[Tensor, list[SavedForBackward]]:
        hidden, position = tensors_of(saved_for_backward)[-1], len(self._layers) - 1
        if position < 0:
            return hidden, saved_for_backward
        attention = _SliceAttention(self, position, _sequence_slice_of(context), weights)
        (hidden,) = self._layers[position].run(weights, hidden, self._arguments(position, context), attention)
        return hidden, [*saved_for_backward, *(attention.result if self._saves_attention else [])]

    def backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        saved_for_backward: list[SavedForBackward],
        gradient: Tensor,
        context: MicrobatchContext,
    ) -> Tensor:
        """Add the layers' gradients; backward must have run for all later slices of the sequences."""
        for position in reversed(range(len(self._layers))):
            if not self._has_backward(position):
                break
            hidden, *result = tensors_of(saved_for_backward[-self._per_layer :])
            del saved_for_backward[-self._per_layer :]
            attention = _SliceAttention(self, position, _sequence_slice_of(context), weights, gradients, result)
            given = weights, gradients, hidden, gradient, self._arguments(position, context), attention
            gradient = self._layers[position].backward(*given)
        return gradient

    def _has_backward(self, position: int) -> bool:
        return self._cut.layers[position] >= self._parts.first_trained_layer

    def _is_last(self, position: int) -> bool:
        """Whether this is the model's last layer, which finishes only in backward."""
        return self._cut.is_last and position == len(self._layers) - 1

    def _arguments(self, position: int, context: MicrobatchContext) -> dict[str, Any]:
        """Return a layer's arguments for the tokens of the slice."""
        return _cut_arguments(context.arguments[self._cut.layers[position]], _sequence_slice_of(context))

    @property
    def _per_layer(self) -> int:
        """Number of tensors saved per layer."""
        return 3 if self._saves_attention else 1

    def _put(self, position: int, heads: Heads, sequence_slice: SequenceSlice) -> SequenceKVCache:
        cache = self._caches.of(position, heads, sequence_slice.length)
        cache.put(sequence_slice.start, heads.key, heads.value)
        return cache

    def _settings(self, position: int, heads: Heads, sequence_slice: SequenceSlice) -> SlicedAttentionSettings:
        scale, window, softcap = _constants(self._blocks[position].attention, heads)
        key = scale, window, softcap
        if key not in sequence_slice.settings:
            kernel = choose_kernel(
                heads.query.device, heads.query.dtype, head_size=heads.query.shape[-1], window=window, softcap=softcap
            )
            sequence_slice.settings[key] = SlicedAttentionSettings(
                kernel, scale, window, softcap, sequence_slice.documents
            )
        return sequence_slice.settings[key]


class _SliceAttention:
    """Attention of a slice to all keys so far; uses a saved result if there is one."""

    def __init__(
        self,
        stage: SlicedLayers,
        position: int,
        sequence_slice: SequenceSlice,
        weights: NamedTensors,
        gradients: NamedTensors = MappingProxyType({}),
        result: Sequence[Tensor] = (),
    ) -> None:
        self._stage, self._position, self._sequence_slice = stage, position, sequence_slice
        block = stage._blocks[position]
        self._sinks, self._sinks_sum = (block.attention_parameters(each).get(SINKS) for each in (weights, gradients))
        self.result = [*result]
        """Attention result [B, T, heads, D] and log-sum-exp [B, heads, T]; empty before attention has run."""
        self._attended: tuple[Tensor, SequenceKVCache, SlicedAttentionSettings] | None = None
        """Query, cache and settings of attention, for its backward."""

    def attend(self, heads: Heads) -> Tensor:
        cache = self._stage._put(self._position, heads, self._sequence_slice)
        settings = self._stage._settings(self._position, heads, self._sequence_slice)
        self._attended = heads.query, cache, settings
        if not self.result:
            made = attend_slice(heads.query, cache, self._sequence_slice.start, settings)
            made = made if self._sinks is None else add_sinks(*made, self._sinks)
            self.result = [each.contiguous() for each in made]
        return self.result[0]

    def backward(self, gradient: Tensor) -> Heads:
        assert self._attended is not None, "forward has run"
        sequence_slice, (output, lse), (query, cache, settings) = self._sequence_slice, self.result, self._attended
        query_gradient = attend_slice_backward(gradient, query, output, lse, cache, sequence_slice.start, settings)
        if self._sinks is not None and self._sinks_sum is not None:
            self._sinks_sum += sinks_gradient(gradient, output, lse, self._sinks)
        return Heads(query_gradient, *cache.take_gradients(sequence_slice.start, sequence_slice.end))


def _sequence_slice_of(context: MicrobatchContext) -> SequenceSlice:
    assert context.sequence_slice is not None, "the microbatch is not a slice of a sequence"
    return context.sequence_slice


def _constants(attention: LayerAttention, heads: Heads) -> tuple[float, int | None, float | None]:
    """Return scale, sliding window and softcap of a layer's attention."""
    constants = attention.constants
    scale = constants.get("scaling")
    scale = heads.query.shape[-1] ** -0.5 if scale is None else float(scale)
    return scale, constants.get("sliding_window"), constants.get("softcap")


def _cut_arguments(arguments: Mapping[str, Any], sequence_slice: SequenceSlice) -> dict[str, Any]:
    """Return a layer's arguments for the tokens of the slice, without arguments that only attention reads."""

    def cut(value: Tensor) -> Tensor:
        assert value.shape[1] == sequence_slice.length, "a layer argument has no token dimension"
        return value[:, sequence_slice.start : sequence_slice.end]

    return tree_map_only(Tensor, cut, without_attention_arguments(arguments))  # type: ignore[no-any-return]
