"""Attention of one slice to all keys up to the slice's end, forward and backward, without autograd.

The pieces' outputs o and log-sum-exps l are merged in fp32: l = log sum exp(l_i), o = sum o_i exp(l_i - l). A piece's
probabilities are exp(score - l). So a kernel's backward, called with the merged o and l, returns exactly its piece's
share of the gradients, with any kernel in forward. Gradients of queries, keys and values are summed in fp32.

    forward     cache after slice 0     after slice 1     after slice 2         a query attends to the keys
                k0 v0                   k0 v0 k1 v1       k0 v0 k1 v1 k2 v2     up to its position
    backward    slice 2 adds to the sums of 0, 1 and 2, then takes the sums of 2, which no other slice adds to;
                slice 1 adds to 0 and 1, then takes 1; slice 0 adds to 0 and takes 0: all sums are zero again

If a piece has more keys than queries, flash aligns its causal mask at the lower right corner. Other kernels align it at
the upper left, so their causal pieces are squares. Tiles run plain operations on tiles of queries and keys, on any
device, in fp32 at least: online softmax, and backward from output and log-sum-exp (Dao et al. 2022, arXiv:2205.14135,
algorithms 1 and 4). A query attends to the keys from its first visible key to its position, with windows and documents
alike. Scores exist for one tile at a time, so memory does not grow with queries x keys or with the window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from mobius.models.slice_pieces import AttentionKernel, AttentionPiece, SlicedAttentionSettings


@torch.no_grad()
def attend_slice(
    query: Tensor, cache: SequenceKVCache, start: int, settings: SlicedAttentionSettings
) -> tuple[Tensor, Tensor]:
    """Return output [B, T, H, D] and log-sum-exp fp32 [B, H, T] of queries [B, H, T, D]; the first is at `start`.

    `cache` holds keys and values up to the slice's end. Extra memory is linear in T and in the number of keys per call.
    """
    pieces = _pieces(query, cache, start, settings)
    if len(pieces) == 1:
        return _forward(pieces[0], query, cache, settings)
    merged = _Merged(query)
    for piece in pieces:
        merged.add(piece, *_forward(piece, query[piece.rows, :, piece.queries], cache, settings))
    return merged.output.to(query.dtype), merged.lse


@torch.no_grad()
def attend_slice_backward(
    d_output: Tensor,
    query: Tensor,
    output: Tensor,
    lse: Tensor,
    cache: SequenceKVCache,
    start: int,
    settings: SlicedAttentionSettings,
) -> Tensor:
    """Return the gradient [B, H, T, D] of the slice's queries; add gradients of visible keys and values to the cache.

    `d_output` is the gradient of `output` [B, T, H, D]; `attend_slice` returned `output` and `lse`. If all later slices
    are done, `cache.take_gradients` then returns the gradients of the slice's keys and values.
    """
    pieces = _pieces(query, cache, start, settings)
    if len(pieces) == 1:
        return _backward(pieces[0], d_output, query, output, lse, cache, settings).to(query.dtype)
    d_query = torch.zeros_like(query, dtype=torch.float32)
    for piece in pieces:
        rows, queries = piece.rows, piece.queries
        # The kernels assume a contiguous log-sum-exp.
        own_lse = lse[rows, :, queries].contiguous()
        given = d_output[rows, queries], query[rows, :, queries], output[rows, queries], own_lse
        d_query[rows, :, queries] += _backward(piece, *given, cache, settings)
    return d_query.to(query.dtype)


class _Merged:
    """Output and log-sum-exp merged from the pieces so far, in fp32."""

    def __init__(self, query: Tensor) -> None:
        batch, heads, length, size = query.shape
        self.output = torch.zeros(batch, length, heads, size, dtype=torch.float32, device=query.device)
        self.lse = torch.full((batch, heads, length), -torch.inf, dtype=torch.float32, device=query.device)

    def add(self, piece: AttentionPiece, output: Tensor, lse: Tensor) -> None:
        before = self.lse[piece.rows, :, piece.queries]
        after = torch.logaddexp(before, lse)
        weight = (lse - after).exp_().transpose(1, 2).unsqueeze(-1)
        self.output[piece.rows, piece.queries].lerp_(output.float(), weight)
        before.copy_(after)


def _pieces(
    query: Tensor, cache: SequenceKVCache, start: int, settings: SlicedAttentionSettings
) -> tuple[AttentionPiece, ...]:
    end = start + query.shape[2]
    assert end <= cache.length, f"a slice up to {end} in a sequence of {cache.length}"
    return settings.pieces(num_rows=query.shape[0], length=cache.length, start=start, end=end, device=query.device)


def _forward(
    piece: AttentionPiece, query: Tensor, cache: SequenceKVCache, settings: SlicedAttentionSettings
) -> tuple[Tensor, Tensor]:
    key, value = cache.key_value_views(piece.rows, piece.keys)
    if piece.kernel is AttentionKernel.TILES:
        return _tiles_forward(piece, query, key, value, settings)
    forward, _ = _KERNELS[piece.kernel]
    return forward(_Call(piece, (query, key, value), settings.scale))


def _backward(
    piece: AttentionPiece,
    d_output: Tensor,
    query: Tensor,
    output: Tensor,
    lse: Tensor,
    cache: SequenceKVCache,
    settings: SlicedAttentionSettings,
) -> Tensor:
    key, value = cache.key_value_views(piece.rows, piece.keys)
    sums = cache.gradient_sum_views(piece.rows, piece.keys)
    if piece.kernel is AttentionKernel.TILES:
        return _tiles_backward(piece, d_output, query, key, value, output, lse, sums, settings)
    _, backward = _KERNELS[piece.kernel]
    d_query, *d_seen = backward(_Call(piece, (query, key, value), settings.scale), d_output, output, lse)
    for own_sum, part in zip(sums, d_seen, strict=True):
        own_sum += part
    return d_query


class SequenceKVCache:
    """Keys and values [B, Hk, L, D] and their gradient sums, allocated once and reused for every sequence.

    The cache has 2 x B x Hk x L x D elements in the working dtype, and as many in fp32.
    """

    def __init__(self, shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.key, self.value = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self._sums = tuple(torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(2))

    @property
    def length(self) -> int:
        return self.shape[2]

    def put(self, start: int, key: Tensor, value: Tensor) -> None:
        """Copy the keys and values [B, Hk, T, D] of a slice into the cache; recomputation may repeat the copy."""
        end = start + key.shape[2]
        assert end <= self.length, f"a slice up to {end} in a sequence of {self.length}"
        self.key[:, :, start:end].copy_(key)
        self.value[:, :, start:end].copy_(value)

    def key_value_views(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """Views of cached keys and values, [b, Hk, K, D]."""
        return self.key[rows, :, keys], self.value[rows, :, keys]

    def gradient_sum_views(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """Views of the fp32 gradient sums of keys and values, [b, Hk, K, D], to add to in place."""
        of_key, of_value = self._sums
        return of_key[rows, :, keys], of_value[rows, :, keys]

    def take_gradients(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the gradient sums [B, Hk, T, D] of keys and values, rounded to the working dtype, and zero them."""
        gradients = []
        for gradient_sum_views in self.gradient_sum_views(slice(None), slice(start, end)):
            gradients.append(gradient_sum_views.to(self.key.dtype, copy=True))
            gradient_sum_views.zero_()
        return gradients[0], gradients[1]


_aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value, in the working dtype."""


class _Call(NamedTuple):
    """Arguments of a kernel: a piece, its query [b, H, T, D], key and value [b, Hk, K, D], and the scale of scores.

    Forward functions return the piece's output [b, T, H, D] and log-sum-exp [b, H, T]. Backward functions also get the
    output and log-sum-exp that were merged from all pieces, and the gradient of the output.
    """

    piece: AttentionPiece
    heads: tuple[Tensor, Tensor, Tensor]
    scale: float


def _cudnn_forward(call: _Call) -> tuple[Tensor, Tensor]:
    piece, (query, key, value), scale = call
    output, lse = _aten._scaled_dot_product_cudnn_attention(
        _token_major(query), key, value, None, True, 0.0, piece.is_causal, False, scale=scale
    )[:2]
    return output.transpose(1, 2), lse.reshape(query.shape[:3])


def _cudnn_backward(call: _Call, d_output: Tensor, output: Tensor, lse: Tensor) -> Gradients:
    piece, (query, key, value), scale = call
    # cuDNN finds cached plans by the layout of query, key and value only, so the other layouts must be constant.
    heads = [each.contiguous().transpose(1, 2) for each in (d_output, output)]
    statistics = lse.unsqueeze(-1) if _cudnn_statistics_rank(query.device) == 4 else lse
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # required, but unused without dropout
    result: Gradients = _aten._scaled_dot_product_cudnn_attention_backward(
        heads[0], _token_major(query), key, value, heads[1], statistics, seed, seed, None, None, None,
        query.shape[2], key.shape[2], 0.0, piece.is_causal, scale=scale,
    )  # fmt: skip
    return result


@functools.cache
def _cudnn_statistics_rank(device: torch.device) -> int:
    """Number of dimensions of cuDNN's log-sum-exp: 4 in torch's fake kernel, but 3 in some versions of the kernel."""
    probe = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    given = _aten._scaled_dot_product_cudnn_attention(probe, probe, probe, None, True, 0.0, False, False, scale=1.0)
    return int(given[1].dim())


def _token_major(heads: Tensor) -> Tensor:
    """Heads [b, H, T, D] in memory layout [b, T, H, D], as a projection returns them; copies only other layouts."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def _flash_forward(call: _Call) -> tuple[Tensor, Tensor]:
    piece, heads, scale = call
    given = [_flash_layout(each, piece) for each in heads]
    output, lse = _aten._flash_attention_forward(
        *given, *_flash_lengths(piece), 0.0, piece.is_causal and piece.window is None, False,
        scale=scale, **_flash_window(piece),
    )[:2]  # fmt: skip
    return (output, lse) if piece.cu_seqlens is None else (output.unsqueeze(0), lse.unsqueeze(0))


def _flash_backward(call: _Call, d_output: Tensor, output: Tensor, lse: Tensor) -> Gradients:
    piece, heads, scale = call
    is_packed = piece.cu_seqlens is not None
    given = [_flash_layout(each, piece) for each in heads]
    after = [each[0] if is_packed else each for each in (d_output.contiguous(), output.contiguous())]
    state = torch.zeros(2, dtype=torch.uint64, device=lse.device), torch.empty(0, device=lse.device)
    results = _aten._flash_attention_backward(
        after[0], *given, after[1], lse[0] if is_packed else lse, *_flash_lengths(piece), 0.0,
        piece.is_causal and piece.window is None, *state, scale=scale, **_flash_window(piece),
    )  # fmt: skip
    back = [(each.unsqueeze(0) if is_packed else each).transpose(1, 2) for each in results]
    return back[0], back[1], back[2]


def _flash_layout(heads: Tensor, piece: AttentionPiece) -> Tensor:
    """Convert heads [b, H, T, D] to the kernel's layout: [b, T, H, D], or [T, H, D] for a row with documents."""
    if piece.cu_seqlens is None:
        return heads.transpose(1, 2)
    assert heads.shape[0] == 1, "documents are attended row by row"
    return heads[0].transpose(0, 1)


def _flash_lengths(piece: AttentionPiece) -> tuple[Tensor | None, Tensor | None, int, int]:
    return (*(piece.cu_seqlens or (None, None)), *piece.longest)


def _flash_window(piece: AttentionPiece) -> dict[str, int]:
    return {} if piece.window is None else {"window_size_left": piece.window - 1, "window_size_right": 0}


def _cpu_forward(call: _Call) -> tuple[Tensor, Tensor]:
    piece, heads, scale = call
    output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, piece.is_causal, scale=scale)
    return output.transpose(1, 2), lse


def _cpu_backward(call: _Call, d_output: Tensor, output: Tensor, lse: Tensor) -> Gradients:
    piece, heads, scale = call
    result: Gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_output.transpose(1, 2), *heads, output.transpose(1, 2), lse, 0.0, piece.is_causal, scale=scale
    )
    return result


_Forward = Callable[[_Call], tuple[Tensor, Tensor]]
_Backward = Callable[[_Call, Tensor, Tensor, Tensor], Gradients]
_KERNELS: Mapping[AttentionKernel, tuple[_Forward, _Backward]] = {
    AttentionKernel.CUDNN: (_cudnn_forward, _cudnn_backward),
    AttentionKernel.FLASH: (_flash_forward, _flash_backward),
    AttentionKernel.CPU: (_cpu_forward, _cpu_backward),
}


def _tiles_forward(
    piece: AttentionPiece, query: Tensor, key: Tensor, value: Tensor, settings: SlicedAttentionSettings
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, D] and log-sum-exp [B, H, T] of queries [B, H, T, D] and the piece's keys [B, Hk, K, D]."""
    exact = _exact(query)
    output = torch.empty(query.transpose(1, 2).shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=exact, device=query.device)
    for rows in _query_tiles(piece, query.shape[2], settings.tile):
        own = _grouped(query[:, :, rows.own], key.shape[1], exact)
        largest, total = own.new_full((*own.shape[:3], 1), -torch.inf), own.new_zeros((*own.shape[:3], 1))
        result = torch.zeros_like(own)
        for keys in rows.key_tiles(piece, settings.tile):
            scores, _ = _scores(piece, rows, keys, own, key, settings)
            # In the first tile, each query sees the key at its position, so the running maximum is finite.
            new = torch.maximum(scores.amax(-1, keepdim=True), largest)
            shrink, largest = (largest - new).exp_(), new
            weights = scores.sub_(new).exp_()
            total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
            result.mul_(shrink).add_(weights @ value[:, :, keys].to(exact))
        output[:, rows.own] = _heads(result / total, query.shape[1]).transpose(1, 2)
        lse[:, :, rows.own] = _heads(largest + total.log(), query.shape[1]).squeeze(-1)
    return output, lse.float()


def _tiles_backward(
    piece: AttentionPiece,
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    sums: tuple[Tensor, Tensor],
    settings: SlicedAttentionSettings,
) -> Tensor:
    """Return the gradient [B, H, T, D] of queries, in fp32 at least; add gradients of keys and values to `sums`."""
    exact, num_keys = _exact(query), key.shape[1]
    d_query = torch.empty(query.shape, dtype=exact, device=query.device)
    for rows in _query_tiles(piece, query.shape[2], settings.tile):
        own = _grouped(query[:, :, rows.own], num_keys, exact)
        given = _grouped(d_output[:, rows.own].transpose(1, 2), num_keys, exact)
        made = _grouped(output[:, rows.own].transpose(1, 2), num_keys, exact)
        delta = (given * made).sum(-1, keepdim=True)
        own_lse = _grouped(lse[:, :, rows.own].unsqueeze(-1), num_keys, exact)
        total = torch.zeros_like(own)
        for keys in rows.key_tiles(piece, settings.tile):
            scores, slope = _scores(piece, rows, keys, own, key, settings)
            weights = scores.sub_(own_lse).exp_()
            sums[1][:, :, keys] += weights.transpose(2, 3) @ given
            of_scores = (given @ value[:, :, keys].to(exact).transpose(2, 3)).sub_(delta).mul_(weights)
            if slope is not None:
                of_scores.mul_(slope)
            of_scores.mul_(settings.scale)
            sums[0][:, :, keys] += of_scores.transpose(2, 3) @ own
            total += of_scores @ key[:, :, keys].to(exact)
        d_query[:, :, rows.own] = _heads(total, query.shape[1])
    return d_query


@dataclass(frozen=True)
class _QueryTile:
    """Queries of a tile, minimum and maximum of their first visible keys, and the tile's position in the sequence."""

    own: slice
    span: tuple[int, int]
    place: int

    def key_tiles(self, piece: AttentionPiece, tile: int) -> Iterator[slice]:
        """Ranges of the piece's keys: at the queries' positions, then backward to the first visible key."""
        end, base = self.place + self.own.stop - self.own.start, piece.keys.start
        yield slice(self.place - base, end - base)
        for last in range(self.place, self.span[0], -tile):
            yield slice(max(last - tile, self.span[0]) - base, last - base)


def _query_tiles(piece: AttentionPiece, length: int, tile: int) -> Iterator[_QueryTile]:
    assert piece.visible_keys is not None
    for first, span in zip(range(0, length, tile), piece.visible_keys.spans, strict=True):
        yield _QueryTile(slice(first, min(first + tile, length)), span, piece.visible_keys.start + first)


def _scores(
    piece: AttentionPiece, rows: _QueryTile, keys: slice, own: Tensor, key: Tensor, settings: SlicedAttentionSettings
) -> tuple[Tensor, Tensor | None]:
    """Scores [B, Hk, G * t, k] of a tile, -inf where masked, and the derivative of the softcap at each score."""
    scores, slope = (own @ key[:, :, keys].to(own.dtype).transpose(2, 3)).mul_(settings.scale), None
    if settings.softcap is not None:
        bounded = scores.div_(settings.softcap).tanh_()
        slope = 1 - bounded * bounded
        scores = bounded * settings.softcap
    first = piece.keys.start + keys.start
    if first >= rows.place or rows.span[1] > first:
        assert piece.visible_keys is not None
        places = torch.arange(first, piece.keys.start + keys.stop, device=own.device)
        own_places = torch.arange(rows.place, rows.place + rows.own.stop - rows.own.start, device=own.device)
        seen = places >= piece.visible_keys.first_keys[:, rows.own].unsqueeze(-1)
        hidden = seen.logical_and_(places <= own_places.unsqueeze(-1)).logical_not_()
        split = cast(Tensor, scores.unflatten(2, (-1, len(own_places))))
        split.masked_fill_(hidden[:, None, None], -torch.inf)
    return scores, slope


def _exact(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _grouped(heads: Tensor, num_keys: int, dtype: torch.dtype) -> Tensor:
    """[B, H, t, n] -> [B, Hk, G * t, n]: stack queries that share a key head, so that keys need not be expanded."""
    return cast(Tensor, heads.unflatten(1, (num_keys, -1))).flatten(2, 3).to(dtype)


def _heads(grouped: Tensor, num_heads: int) -> Tensor:
    """[B, Hk, G * t, n] -> [B, H, t, n]."""
    groups = num_heads // grouped.shape[1]
    return cast(Tensor, grouped.unflatten(2, (groups, -1))).flatten(1, 2)
