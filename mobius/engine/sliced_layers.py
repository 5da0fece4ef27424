"""Runs a stage's layers on slices of sequences: forward in order, backward in reverse (`schedule/breadth_first.py`).

    forward    slice 0, 1, 2   project, store keys and values, attend to all so far, finish; save each layer's input
    keys       slice 0, 1, 2   project, store keys and values again, because other stages have used their memory
    backward   slice 2, 1, 0   recompute, add to the gradients of earlier keys and values, then use the slice's

The model's last stage starts backward right after forward. So its keys and values are still in memory, and its last
layer finishes only in backward. A layer with mixers hands on its states instead (models/mixers.py), and backward hands
their gradients back. If attention results are saved with each layer's input, backward does not recompute
attention. Attention reads all earlier keys; for long sequences it takes more time than the rest of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mobius.engine.embedder import Embedder
from mobius.engine.stage_layers import MicrobatchContext, SavedForBackward, SequenceSlice, tensors_of
from mobius.engine.tiles import TiledLayer
from mobius.models.attention_split import Heads, LayerAttention, SplitBlocks, without_attention_arguments
from mobius.models.block_autograd import NamedTensors, recomputed_backward, run_many_without_graph
from mobius.models.blocks import ModelParts
from mobius.models.compiled import KeywordArguments, Tensors
from mobius.models.mixers import StatefulBlocks
from mobius.models.sinks import SINKS, add_sinks, sinks_gradient
from mobius.models.slice_attention import SequenceKVCache, attend_slice, attend_slice_backward
from mobius.models.slice_pieces import SlicedAttentionSettings, choose_kernel
from mobius.schedule.partition import StageCut

_WHOLE_SLICE = 2**62
"""Tile size in tokens, larger than every slice."""


class SliceMemory:
    """Memory for what slices hand on, for each layer of one stage; the stages of a rank take turns with it."""

    def __init__(self, *, begins_anywhere: bool = False) -> None:
        """`begins_anywhere`: a slice whose earlier slices have not run begins with new states, to be measured alone."""
        self._begins_anywhere = begins_anywhere
        self._caches: dict[tuple[int, tuple[int, int, int, int], torch.dtype], SequenceKVCache] = {}
        self._states: dict[int, _LayerStates] = {}

    def kv_cache(self, position: int, heads: Heads, length: int) -> SequenceKVCache:
        """Return the cache of the stage's layer at `position`, for `heads` and sequences of `length` tokens."""
        batch, num_heads, _, size = heads.key.shape
        shape = batch, num_heads, length, size
        key = position, shape, heads.key.dtype
        if key not in self._caches:
            assert heads.value.shape == heads.key.shape, "keys and values differ in shape"
            self._caches[key] = SequenceKVCache(shape, dtype=heads.key.dtype, device=heads.key.device)
        return self._caches[key]

    def states(self, position: int) -> _LayerStates:
        """Return the states of the stage's layer at `position`."""
        return self._states.setdefault(position, _LayerStates(begins_anywhere=self._begins_anywhere))


class _LayerStates:
    """States of a layer where slices meet, by the first token of the later slice."""

    def __init__(self, *, begins_anywhere: bool) -> None:
        self._begins_anywhere = begins_anywhere
        self._at: dict[int, Tensors] = {}
        self._gradients: tuple[int, Tensors] = 0, ()

    def before(self, token: int) -> Tensors:
        """Return the states before `token`; none at the start of the sequences."""
        begins = token == 0 or (self._begins_anywhere and token not in self._at)
        return () if begins else self._at[token]

    def put(self, token: int, states: Tensors) -> None:
        self._at[token] = states

    def gradients(self, sequence_slice: SequenceSlice) -> Tensors:
        """Return the gradients of the states at the end of a slice: zeros at the end of the sequences."""
        place, gradients = self._gradients
        if place == sequence_slice.end:
            return gradients
        is_last = sequence_slice.end == sequence_slice.length
        assert is_last or self._begins_anywhere, "backward has run for the slice behind it"
        likes = self._at.get(sequence_slice.end) or self.before(sequence_slice.start)
        return tuple(torch.zeros_like(each) for each in likes)

    def put_gradients(self, token: int, gradients: Tensors) -> None:
        self._gradients = token, gradients


class SliceLayer(Protocol):
    """A layer that runs on slices of sequences; what later slices need of a slice is in the stage's `SliceMemory`.

    `arguments` are the layer's, for the tokens of the slice.
    """

    num_saved: int
    """Number of tensors that `forward` saves besides the layer's input."""

    def forward(
        self, weights: NamedTensors, hidden: Tensor, arguments: Mapping[str, Any], sequence_slice: SequenceSlice
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the output, and the tensors to save besides `hidden`."""

    def hand_on(
        self, weights: NamedTensors, hidden: Tensor, arguments: Mapping[str, Any], sequence_slice: SequenceSlice
    ) -> None:
        """Compute only what later slices need."""

    def backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        saved: Sequence[Tensor],
        gradient: Tensor,
        arguments: Mapping[str, Any],
        sequence_slice: SequenceSlice,
    ) -> Tensor:
        """Add the layer's gradients; return the gradient of its input, `saved[0]`; later slices come first."""


class SlicedLayers:
    """Layers of a stage whose microbatches are slices; `StageModule` runs norm, head and the embedding's backward."""

    def __init__(
        self,
        parts: ModelParts,
        cut: StageCut,
        memory: SliceMemory,
        *,
        tile_tokens: int | None = None,
        saves_attention: bool = False,
    ) -> None:
        """Raises CheckpointError if the layers of the model family cannot be split at attention."""
        self._parts, self._cut, self._embedder = parts, cut, Embedder(parts.embedding)
        self._layers = list[SliceLayer]()
        for position, index in enumerate(cut.layers):
            if (blocks := parts.with_states(index)) is not None:
                self._layers.append(_StatefulLayer(blocks, memory.states(position)))
                continue
            split = parts.split_at_attention(index)
            cache, tokens = partial(memory.kv_cache, position), tile_tokens or _WHOLE_SLICE
            self._layers.append(_AttentionLayer(split, cache, tile_tokens=tokens, saves_attention=saves_attention))

    def forward(
        self, weights: NamedTensors, inputs: Tensor, context: MicrobatchContext
    ) -> tuple[Tensor, list[SavedForBackward]]:
        """Run the layers on a slice. The model's last layer stops after what later slices need.

        Returns the hidden states and the tensors for `backward`: each layer's input and what else it saves; of the
        model's last layer, only the input.
        """
        hidden = self._embedder.run(weights, inputs, context) if self._cut.is_first else inputs
        saved_for_backward: list[SavedForBackward] = []
        if self._cut.is_last and not self._layers:
            saved_for_backward.append(hidden)  # a stage without layers: norm and head read this input
        for position, layer in enumerate(self._layers):
            given = weights, hidden, *self._of_slice(position, context)
            if self._is_last(position):
                saved_for_backward.append(hidden)
                layer.hand_on(*given)
                continue
            output, saved = layer.forward(*given)
            mine = [hidden, *saved]
            saved_for_backward += mine if self._has_backward(position) else [each.new_empty(0) for each in mine]
            hidden = output
        return hidden, saved_for_backward

    def run(self, weights: NamedTensors, inputs: Tensor, context: MicrobatchContext) -> Tensor:
        hidden = self._embedder.run(weights, inputs, context) if self._cut.is_first else inputs
        for position, layer in enumerate(self._layers):
            hidden, _ = layer.forward(weights, hidden, *self._of_slice(position, context))
        return hidden

    def save_input(self, inputs: Tensor) -> list[SavedForBackward] | None:
        """Return None: every slice must run `forward`, because later slices need what it hands on."""
        return None

    def recompute_kv(
        self, weights: NamedTensors, saved_for_backward: Sequence[Tensor], context: MicrobatchContext
    ) -> None:
        """Recompute from the saved inputs what a slice hands on: keys and values, or states."""
        place = 0
        for position, layer in enumerate(self._layers):
            if self._has_backward(position):
                layer.hand_on(weights, saved_for_backward[place], *self._of_slice(position, context))
            place += 1 + layer.num_saved

    def finish_forward(
        self, weights: NamedTensors, saved_for_backward: list[SavedForBackward], context: MicrobatchContext
    ) -> tuple[Tensor, list[SavedForBackward]]:
        hidden, position = tensors_of(saved_for_backward)[-1], len(self._layers) - 1
        if position < 0:
            return hidden, saved_for_backward
        hidden, saved = self._layers[position].forward(weights, hidden, *self._of_slice(position, context))
        return hidden, [*saved_for_backward, *saved]

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
            layer = self._layers[position]
            saved = tensors_of(saved_for_backward[-1 - layer.num_saved :])
            del saved_for_backward[-1 - layer.num_saved :]
            gradient = layer.backward(weights, gradients, saved, gradient, *self._of_slice(position, context))
        return gradient

    def _has_backward(self, position: int) -> bool:
        return self._cut.layers[position] >= self._parts.first_trained_layer

    def _is_last(self, position: int) -> bool:
        """Whether this is the model's last layer, which finishes only in backward."""
        return self._cut.is_last and position == len(self._layers) - 1

    def _of_slice(self, position: int, context: MicrobatchContext) -> tuple[dict[str, Any], SequenceSlice]:
        """Return a layer's arguments for the tokens of the slice, and the slice."""
        sequence_slice = context.sequence_slice
        assert sequence_slice is not None, "the microbatch is not a slice of a sequence"
        return _cut_arguments(context.arguments[self._cut.layers[position]], sequence_slice), sequence_slice


class _StatefulLayer:
    """A layer whose mixers hand on states."""

    num_saved = 0

    def __init__(self, blocks: StatefulBlocks, states: _LayerStates) -> None:
        self._blocks, self._states = blocks, states

    def forward(
        self, weights: NamedTensors, hidden: Tensor, arguments: Mapping[str, Any], sequence_slice: SequenceSlice
    ) -> tuple[Tensor, Sequence[Tensor]]:
        inputs = hidden, *self._states.before(sequence_slice.start)
        output, *after = run_many_without_graph(self._blocks.whole, weights, inputs, KeywordArguments(arguments))
        self._states.put(sequence_slice.end, tuple(after))
        return output, ()

    def hand_on(
        self, weights: NamedTensors, hidden: Tensor, arguments: Mapping[str, Any], sequence_slice: SequenceSlice
    ) -> None:
        inputs = hidden, *self._states.before(sequence_slice.start)
        after = run_many_without_graph(self._blocks.mixing, weights, inputs, KeywordArguments(arguments))
        self._states.put(sequence_slice.end, after)

    def backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        saved: Sequence[Tensor],
        gradient: Tensor,
        arguments: Mapping[str, Any],
        sequence_slice: SequenceSlice,
    ) -> Tensor:
        inputs = saved[0], *self._states.before(sequence_slice.start)
        output_gradients = gradient, *self._states.gradients(sequence_slice)
        given = self._blocks.whole, weights, inputs, KeywordArguments(arguments), gradients
        hidden_gradient, *before = recomputed_backward(*given, *output_gradients)
        self._states.put_gradients(sequence_slice.start, tuple(before))
        return hidden_gradient


class _AttentionLayer:
    """A layer whose attention reads the keys and values of earlier slices."""

    def __init__(
        self,
        split: SplitBlocks,
        cache: Callable[[Heads, int], SequenceKVCache],
        *,
        tile_tokens: int,
        saves_attention: bool,
    ) -> None:
        """`saves_attention`: `forward` saves attention's result [B, T, heads, D] and log-sum-exp fp32 [B, heads, T]."""
        self._layer, self._cache = TiledLayer(split, tile_tokens=tile_tokens), cache
        self.split = split
        self.num_saved = 2 if saves_attention else 0

    def forward(
        self, weights: NamedTensors, hidden: Tensor, arguments: Mapping[str, Any], sequence_slice: SequenceSlice
    ) -> tuple[Tensor, Sequence[Tensor]]:
        attention = _SliceAttention(self, sequence_slice, weights)
        (output,) = self._layer.run(weights, hidden, arguments, attention)
        return output, attention.result if self.num_saved else ()

    def hand_on(
        self, weights: NamedTensors, hidden: Tensor, arguments: Mapping[str, Any], sequence_slice: SequenceSlice
    ) -> None:
        self.put(self._layer.run_pre_attention(weights, hidden, arguments), sequence_slice)

    def backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        saved: Sequence[Tensor],
        gradient: Tensor,
        arguments: Mapping[str, Any],
        sequence_slice: SequenceSlice,
    ) -> Tensor:
        hidden, *result = saved
        attention = _SliceAttention(self, sequence_slice, weights, gradients, result)
        return self._layer.backward(weights, gradients, hidden, gradient, arguments, attention)

    def put(self, heads: Heads, sequence_slice: SequenceSlice) -> SequenceKVCache:
        """Store the keys and values of a slice; return the cache."""
        cache = self._cache(heads, sequence_slice.length)
        cache.put(sequence_slice.start, heads.key, heads.value)
        return cache

    def settings(self, heads: Heads, sequence_slice: SequenceSlice) -> SlicedAttentionSettings:
        """Return the settings of attention."""
        scale, window, softcap = _constants(self.split.attention, heads)
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
        layer: _AttentionLayer,
        sequence_slice: SequenceSlice,
        weights: NamedTensors,
        gradients: NamedTensors = MappingProxyType({}),
        result: Sequence[Tensor] = (),
    ) -> None:
        self._layer, self._sequence_slice = layer, sequence_slice
        own = layer.split.attention_parameters
        self._sinks, self._sinks_sum = (own(each).get(SINKS) for each in (weights, gradients))
        self.result = [*result]
        """Attention result [B, T, heads, D] and log-sum-exp [B, heads, T]; empty before attention has run."""
        self._attended: tuple[Tensor, SequenceKVCache, SlicedAttentionSettings] | None = None
        """Query, cache and settings of attention, for its backward."""

    def attend(self, heads: Heads) -> Tensor:
        cache = self._layer.put(heads, self._sequence_slice)
        settings = self._layer.settings(heads, self._sequence_slice)
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
