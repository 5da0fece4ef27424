"""Runs a stage's layers on slices of sequences, forward in order and backward in reverse (`schedule/looped.py`).

    forward    slice 0, 1, 2   project, put keys and values, attend to all so far, finish; keep each layer's input
    keys       slice 0, 1, 2   project, put keys and values: between, other stages have used their place
    backward   slice 2, 1, 0   recompute, add to the gradients of keys and values before, take one's own

The model's last stage turns at once: its keys and values are still there, and its last layer ends in backward only.
Where attention's result is kept beside each layer's input, backward does not attend again: that takes all the earlier
keys, and of a long sequence more time than the rest of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mobius.models.blocks import LayerArguments, ModelParts
from mobius.models.graph import Views, run
from mobius.models.halves import Heads, LayerHalves
from mobius.models.seam import Attention, without_attention
from mobius.models.sliced_attention.attend import attend_slice, attend_slice_backward
from mobius.models.sliced_attention.cache import SequenceCache
from mobius.models.sliced_attention.kernels import choose_kernel
from mobius.models.sliced_attention.pieces import SliceSettings
from mobius.plan.partition import StageCut
from mobius.runtime.tiles import TiledLayer

_WHOLE_SLICE = 2**62
"""Tokens of a tile where a slice is not cut any further."""


@dataclass(frozen=True)
class Place:
    """A microbatch among its sequences."""

    start: int
    """Its first token in each sequence."""
    end: int
    length: int
    """Tokens of a sequence."""
    documents: Tensor | None = None
    """Bounds of the sequences' documents (`attention.Documents`), on the host; None: each is one."""
    settings: dict[Any, SliceSettings] = field(default_factory=dict)
    """Attention of these sequences by kind of layer; shared by their slices, made when one is asked for."""


class SequenceCaches:
    """Owns keys and values of the layers of one stage at a time; all stages of a rank take turns."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, tuple[int, int, int, int], torch.dtype], SequenceCache] = {}

    def of(self, position: int, heads: Heads, length: int) -> SequenceCache:
        """The cache of the stage's layer at `position`, for sequences of `length` tokens with heads like these."""
        batch, num_heads, _, size = heads.key.shape
        shape = batch, num_heads, length, size
        key = position, shape, heads.key.dtype
        if key not in self._made:
            assert heads.value.shape == heads.key.shape, "keys and values differ in size"
            self._made[key] = SequenceCache(shape, dtype=heads.key.dtype, device=heads.key.device)
        return self._made[key]


class SlicedStage:
    """The layers of a stage whose microbatches are slices; norm, head and embedding are the whole stage's."""

    def __init__(
        self,
        parts: ModelParts,
        cut: StageCut,
        caches: SequenceCaches,
        *,
        tile_tokens: int | None = None,
        keeps_attention: bool = False,
    ) -> None:
        """Raises CheckpointError for a family whose layers cannot be cut at their attention."""
        self._parts, self._cut, self._caches = parts, cut, caches
        self._keeps_attention = keeps_attention
        blocks = [parts.halves(index) for index in cut.layers]
        self._attention = [each.attention for each in blocks]
        self._layers = [TiledLayer(LayerHalves(each), tile_tokens=tile_tokens or _WHOLE_SLICE) for each in blocks]

    def forward(
        self, weights: Views, inputs: Tensor, arguments: LayerArguments, place: Place
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the layers on a slice, of the last stage all but what follows the last one's keys and values.

        Args:
            inputs: token ids [B, T] in the first stage, hidden states [B, T, H] in the others.
            arguments: of whole sequences, for all layers of the model.

        Returns the hidden states [B, T, H] and what `backward` takes: of each layer its input and, if that is kept,
        attention's result [B, T, heads, D] and log-sum-exp fp32 [B, heads, T]; of the model's last one the input alone.
        """
        hidden = run(self._parts.embedding, weights, inputs, {}) if self._cut.is_first else inputs
        kept = [hidden] if self._cut.is_last and not self._layers else []  # which only norm and head then ask for
        for position, index in enumerate(self._cut.layers):
            kept.append(hidden)
            own = _cut_arguments(arguments[index], place)
            if self._cut.is_last and position == len(self._layers) - 1:
                self._put(position, self._layers[position].project(weights, hidden, own), place)
            else:
                attention = _SliceAttention(self, position, place)
                hidden = self._layers[position].run(weights, hidden, own, attention)
                kept += attention.result if self._keeps_attention else []
        return hidden, kept

    def make_keys(self, weights: Views, kept: Sequence[Tensor], arguments: LayerArguments, place: Place) -> None:
        """Put keys and values of a slice from what its forward kept."""
        for position, index in enumerate(self._cut.layers):
            own = _cut_arguments(arguments[index], place)
            self._put(position, self._layers[position].project(weights, kept[position * self._per_layer], own), place)

    def output(self, weights: Views, kept: list[Tensor], arguments: LayerArguments, place: Place) -> Tensor:
        """Hidden states [B, T, H] that the model's last stage gives to norm and head.

        Adds what `backward` takes of the last layer to `kept`.
        """
        position = len(self._layers) - 1
        if position < 0:
            return kept[0]
        own = _cut_arguments(arguments[self._cut.layers[position]], place)
        attention = _SliceAttention(self, position, place)
        hidden = self._layers[position].run(weights, kept[-1], own, attention)
        kept += attention.result if self._keeps_attention else []
        return hidden

    def backward(
        self,
        weights: Views,
        gradients: Views,
        kept: list[Tensor],
        gradient: Tensor,
        arguments: LayerArguments,
        place: Place,
    ) -> Tensor:
        """Add the layers' parameter gradients to `gradients`, as `StageModule.backward`; return the input's gradient.

        All later slices of the sequences must have had their turn. Empties `kept`.
        """
        for position, index in reversed([*enumerate(self._cut.layers)]):
            hidden, *result = kept[-self._per_layer :]
            del kept[-self._per_layer :]
            attention = _SliceAttention(self, position, place, result)
            given = weights, gradients, hidden, gradient, _cut_arguments(arguments[index], place), attention
            gradient = self._layers[position].backward(*given)
        return gradient

    @property
    def _per_layer(self) -> int:
        """Tensors that are kept of a layer."""
        return 3 if self._keeps_attention else 1

    def _put(self, position: int, heads: Heads, place: Place) -> SequenceCache:
        cache = self._caches.of(position, heads, place.length)
        cache.put(place.start, heads.key, heads.value)
        return cache

    def _settings(self, position: int, heads: Heads, place: Place) -> SliceSettings:
        attention = self._attention[position]
        scale, window, softcap = _constants(attention, heads)
        key = scale, window, softcap
        if key not in place.settings:
            kernel = choose_kernel(
                heads.query.device, heads.query.dtype, head_size=heads.query.shape[-1], window=window, softcap=softcap
            )
            place.settings[key] = SliceSettings(kernel, scale, window, softcap, place.documents)
        return place.settings[key]


class _SliceAttention:
    """Attention of a slice to all keys so far, with its result if that is known."""

    def __init__(self, stage: SlicedStage, position: int, place: Place, result: Sequence[Tensor] = ()) -> None:
        self._stage, self._position, self._place = stage, position, place
        self.result = [*result]
        """Result [B, T, heads, D] and log-sum-exp [B, heads, T], once it has attended."""

    def attend(self, heads: Heads) -> Tensor:
        self._cache = self._stage._put(self._position, heads, self._place)
        self._settings = self._stage._settings(self._position, heads, self._place)
        self._query = heads.query
        if not self.result:
            made = attend_slice(heads.query, self._cache, self._place.start, self._settings)
            self.result = [each.contiguous() for each in made]
        return self.result[0]

    def backward(self, gradient: Tensor) -> Heads:
        place, (output, lse) = self._place, self.result
        given = gradient, self._query, output, lse, self._cache, place.start, self._settings
        of_query = attend_slice_backward(*given)
        return Heads(of_query, *self._cache.take_gradients(place.start, place.end))


def _constants(attention: Attention, heads: Heads) -> tuple[float, int | None, float | None]:
    """Scale, window and cap of a layer's attention."""
    constants = attention.constants
    scale = constants.get("scaling")
    scale = heads.query.shape[-1] ** -0.5 if scale is None else float(scale)
    return scale, constants.get("sliding_window"), constants.get("softcap")


def _cut_arguments(arguments: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Arguments of a layer for the slice's tokens, without those that only attention reads."""

    def cut(value: Tensor) -> Tensor:
        assert value.shape[1] == place.length, "a layer's argument has no tokens"
        return value[:, place.start : place.end]

    return tree_map_only(Tensor, cut, without_attention(arguments))  # type: ignore[no-any-return]


def cut_rows(rows: Tensor, *, num_groups: int, num_slices: int) -> list[Tensor]:
    """Slices [B / groups, L / slices] of `rows` [B, L], those of the first group's rows first."""
    return [part.contiguous() for group in rows.chunk(num_groups) for part in group.chunk(num_slices, dim=1)]


def place_slices(length: int, bounds: Sequence[Tensor | None], *, num_slices: int) -> list[Place]:
    """The place of each slice of sequences of `length` tokens, a multiple of `num_slices`, group by group.

    `bounds` are those of the documents of each group of rows (`attention.Documents`), on the host.
    """
    step, places = length // num_slices, list[Place]()
    for documents in bounds:
        first = Place(0, step, length, documents)
        places += [replace(first, start=start, end=start + step) for start in range(0, length, step)]
    return places
