"""Attention of a slice with plain operations on tiles of queries and keys, on any device, in fp32 at least.

Online softmax, and backward from output and log-sum-exp: Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4. A query
attends to the keys from its first visible one to its own, which covers windows and documents alike. Scores exist for
one tile at a time: memory grows with neither queries x keys nor the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mobius.models.sliced_attention.attention_pieces import AttentionPiece, SlicedAttentionSettings


def tiles_forward(
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
            # The tile with the queries' own keys comes first, so the running maximum is finite from then on.
            new = torch.maximum(scores.amax(-1, keepdim=True), largest)
            shrink, largest = (largest - new).exp_(), new
            weights = scores.sub_(new).exp_()
            total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
            result.mul_(shrink).add_(weights @ value[:, :, keys].to(exact))
        output[:, rows.own] = _heads(result / total, query.shape[1]).transpose(1, 2)
        lse[:, :, rows.own] = _heads(largest + total.log(), query.shape[1]).squeeze(-1)
    return output, lse.float()


def tiles_backward(
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
    """Return the gradient [B, H, T, D] of queries, in fp32 at least; add those of keys and values to `sums`."""
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
    """A tile of queries, the minimum and maximum of their first visible keys, and its position in the sequence."""

    own: slice
    span: tuple[int, int]
    place: int

    def key_tiles(self, piece: AttentionPiece, tile: int) -> Iterator[slice]:
        """Ranges of the piece's keys, from the queries' own keys backwards to the first visible key."""
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
    """[B, H, t, n] -> [B, Hk, G * t, n]: stacks queries that share a key head, so no key is expanded."""
    return cast(Tensor, heads.unflatten(1, (num_keys, -1))).flatten(2, 3).to(dtype)


def _heads(grouped: Tensor, num_heads: int) -> Tensor:
    """[B, Hk, G * t, n] -> [B, H, t, n]."""
    groups = num_heads // grouped.shape[1]
    return cast(Tensor, grouped.unflatten(2, (groups, -1))).flatten(1, 2)
