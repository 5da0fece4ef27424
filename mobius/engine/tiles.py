"""Runs a layer in tiles of tokens, except for its attention, so that memory in a layer does not grow with the length.

    forward     project 0 1 2 ..   attention of all tokens   finish 0 1 2 ..
    backward    project 0 1 2 ..   attention of all tokens   finish' 0 1 2 ..   attention'   project' 0 1 2 ..

A tile is a range of the microbatch's tokens, with all rows concatenated. Only attention's tensors grow with the length:
query, key, value, result, and their gradients. Activations of the feed-forward part and the norms exist for one tile at
a time, and are recomputed in backward. Tiles add gradients in a fixed order, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mobius.models.attention_split import Heads, SplitBlocks, without_attention_arguments
from mobius.models.block_autograd import NamedTensors
from mobius.models.compiled import Tensors

_WHOLE = 128
"""Tiles have nearly equal lengths, in multiples of this many tokens: the tile size of GPU matrix products."""


class TokenAttention(Protocol):
    """Attention of the tokens on which a layer runs; they may also attend to earlier tokens."""

    def attend(self, heads: Heads) -> Tensor:
        """Return the attention result [B, T, H, D], without a graph."""

    def backward(self, gradient: Tensor) -> Heads:
        """Return the gradients of the heads that `attend` got last, from the `gradient` of its result; only once."""


class _WholeRows:
    """Attention of complete rows, by the layer itself."""

    def __init__(
        self, layer: SplitBlocks, arguments: Mapping[str, Any], weights: NamedTensors, gradients: NamedTensors
    ) -> None:
        self._attention, self._arguments = layer.attention, arguments
        self._parameters, self._sums = (layer.attention_parameters(each) for each in (weights, gradients))
        self._graph: tuple[Tensor, Heads, list[Tensor]] | None = None

    def attend(self, heads: Heads) -> Tensor:
        leaves = Heads(*(each.detach().requires_grad_() for each in heads))
        parameters = {name: each.detach().requires_grad_() for name, each in self._parameters.items()}
        with torch.enable_grad():
            output = self._attention(*leaves, self._arguments, parameters)
        self._graph = output, leaves, [parameters[name] for name in self._sums]
        return output.detach()

    def backward(self, gradient: Tensor) -> Heads:
        assert self._graph is not None
        (output, leaves, parameters), self._graph = self._graph, None
        query, key, value, *found = torch.autograd.grad(output, [*leaves, *parameters], gradient)
        for total, own in zip(self._sums.values(), found, strict=True):
            total += own
        return Heads(query, key, value)


class TiledLayer:
    """A layer of a stage, run in tiles of at most `tile_tokens` tokens."""

    def __init__(self, layer: SplitBlocks, *, tile_tokens: int) -> None:
        self._layer, self._tile_tokens = layer, tile_tokens

    def run_pre_attention(self, weights: NamedTensors, hidden: Tensor, arguments: Mapping[str, Any]) -> Heads:
        """Return query, key and value of all tokens, without a graph."""
        return self._project(weights, hidden, _Rows(hidden, arguments, self._tile_tokens))

    def run(
        self,
        weights: NamedTensors,
        hidden: Tensor,
        arguments: Mapping[str, Any],
        attention: TokenAttention | None = None,
    ) -> Tensors:
        """Return the layer's output [B, L, hidden], without a graph; `arguments` are the layer's arguments.

        `attention` replaces the layer's attention. If `arguments` request router sums, the layer's sums over all tiles
        follow the output.
        """
        rows = _Rows(hidden, arguments, self._tile_tokens)
        heads = self._project(weights, hidden, rows)
        with torch.no_grad():
            if attention is None:
                attended = self._layer.attention(*heads, arguments, self._layer.attention_parameters(weights))
            else:
                attended = attention.attend(heads)
        del heads  # otherwise they stay in memory together with the output
        output = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        sums: list[Tensor] = []
        for tile in rows.tiles():
            made, *own = self._layer.run_post_attention(weights, tile.of(hidden), tile.of(attended), tile.arguments)
            tile.of(output).copy_(made)
            sums = [before + each for before, each in zip(sums, own, strict=True)] if sums else own
        return output, *sums

    def backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        hidden: Tensor,
        gradient: Tensor,
        arguments: Mapping[str, Any],
        attention: TokenAttention | None = None,
        other_gradients: Sequence[Tensor] = (),
    ) -> Tensor:
        """Add the parameters' gradients to `gradients`, fp32 sums by Hugging Face name; return `hidden`'s gradient.

        `gradient` is the gradient of the output; `gradient` and the result are [B, L, hidden]. `other_gradients` are
        the gradients of the router sums. Recomputes the layer from `hidden`, with `attention` as in `run`.
        """
        rows = _Rows(hidden, arguments, self._tile_tokens)
        heads = self._project(weights, hidden, rows)
        graph = _WholeRows(self._layer, arguments, weights, gradients) if attention is None else attention
        attended = graph.attend(heads)
        del heads
        hidden_gradient, attended_gradient = self._finish_backward(
            weights, gradients, hidden, attended, gradient, rows, other_gradients
        )
        head_gradients = Heads(*(each.transpose(1, 2) for each in graph.backward(attended_gradient)))
        del graph, attended, attended_gradient
        for tile in rows.tiles():
            own = Heads(*(tile.of(each).transpose(1, 2) for each in head_gradients))
            part = self._layer.pre_attention_backward(weights, gradients, tile.of(hidden), own, tile.arguments)
            tile.of(hidden_gradient).add_(part)
        return hidden_gradient

    def _finish_backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        hidden: Tensor,
        attended: Tensor,
        gradient: Tensor,
        rows: _Rows,
        other_gradients: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return two gradients: of the layer's input, without the path through attention, and of attention's result.

        `gradient` is the gradient of the output; `other_gradients` are the gradients of the router sums, the same for
        each tile. All tiles are freed before attention's backward begins.
        """
        hidden_gradient, attended_gradient = (
            torch.empty_like(each, memory_format=torch.contiguous_format) for each in (hidden, attended)
        )
        for tile in rows.tiles():
            made = self._layer.post_attention_backward(
                weights,
                gradients,
                tile.of(hidden),
                tile.of(attended),
                tile.of(gradient),
                tile.arguments,
                *other_gradients,
            )
            tile.of(hidden_gradient).copy_(made[0])
            tile.of(attended_gradient).copy_(made[1])
        return hidden_gradient, attended_gradient

    def _project(self, weights: NamedTensors, hidden: Tensor, rows: _Rows) -> Heads:
        """Return query, key and value of all tokens."""
        whole: list[Tensor] = []
        for tile in rows.tiles():
            parts = [
                each.transpose(1, 2) for each in self._layer.run_pre_attention(weights, tile.of(hidden), tile.arguments)
            ]
            if not whole:
                whole = [each.new_empty(*hidden.shape[:2], *each.shape[2:]) for each in parts]
            for each, part in zip(whole, parts, strict=True):
                tile.of(each).copy_(part)
        return Heads(*(each.transpose(1, 2) for each in whole))


class _Rows:
    """Rows of a microbatch, which `tiles` divides into tiles."""

    def __init__(self, hidden: Tensor, arguments: Mapping[str, Any], tile_tokens: int) -> None:
        self._shape = hidden.shape[:2]
        tokens = self._shape.numel()
        even = -(-tokens // -(-tokens // tile_tokens))
        self._step = min(tile_tokens, -(-even // _WHOLE) * _WHOLE)
        self._arguments = without_attention_arguments(arguments)

    def tiles(self) -> Iterator[_Tile]:
        batch, length = self._shape
        for start in range(0, batch * length, self._step):
            yield _Tile(self._arguments, batch, length, start, min(start + self._step, batch * length))


class _Tile:
    """Tokens `start` to `end` of a microbatch, counted over its concatenated rows."""

    def __init__(self, arguments: Mapping[str, Any], batch: int, length: int, start: int, end: int) -> None:
        self._batch, self._length, self._start, self._end = batch, length, start, end
        self.arguments: dict[str, Any] = tree_map_only(Tensor, self._cut, dict(arguments))

    def of(self, value: Tensor) -> Tensor:
        """Return the tile's tokens of `value` [B, L, ...], as [1, tokens, ...]: a view if rows are contiguous."""
        if value.shape[0] == 1 or value.stride(0) == value.stride(1) * self._length:
            return value.flatten(0, 1)[self._start : self._end].unsqueeze(0)
        return self._pieced(lambda row: value[row])

    def _cut(self, value: Tensor) -> Tensor:
        """Return the tile's tokens of an argument, which may have one row for all rows of the microbatch."""
        assert value.shape[:2] in ((1, self._length), (self._batch, self._length)), (
            "a layer argument has no token dimension"
        )
        return self._pieced(lambda _: value[0]) if value.shape[0] < self._batch else self.of(value)

    def _pieced(self, row_of: Callable[[int], Tensor]) -> Tensor:
        """Return the tile's tokens from the rows [L, ...] of `row_of`; a copy if they are in several rows."""
        pieces, start = list[Tensor](), self._start
        while start < self._end:
            row, first = divmod(start, self._length)
            taken = min(self._length - first, self._end - start)
            pieces.append(row_of(row)[first : first + taken])
            start += taken
        return (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).unsqueeze(0)
