"""Attention of one slice to all keys up to its end, forward and backward, without autograd.

The pieces' outputs o and log-sum-exps l are merged in fp32: l = log sum exp(l_i), o = sum o_i exp(l_i - l). Backward
runs each piece with the merged o and l; gradients of queries, keys and values are summed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mobius.models.sliced_attention import kernels
from mobius.models.sliced_attention.attention_pieces import AttentionPiece, SlicedAttentionSettings
from mobius.models.sliced_attention.kernel_choice import AttentionKernel
from mobius.models.sliced_attention.kv_cache import SequenceKVCache
from mobius.models.sliced_attention.tiled_attention import tiles_backward, tiles_forward

_FORWARD: Mapping[AttentionKernel, Callable[[AttentionPiece, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]] = {
    AttentionKernel.CUDNN: kernels.cudnn_forward,
    AttentionKernel.FLASH: kernels.flash_forward,
    AttentionKernel.CPU: kernels.cpu_forward,
}
_BACKWARD: Mapping[
    AttentionKernel,
    Callable[[AttentionPiece, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]],
] = {
    AttentionKernel.CUDNN: kernels.cudnn_backward,
    AttentionKernel.FLASH: kernels.flash_backward,
    AttentionKernel.CPU: kernels.cpu_backward,
}


@torch.no_grad()
def attend_slice(
    query: Tensor, cache: SequenceKVCache, start: int, settings: SlicedAttentionSettings
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, D] and log-sum-exp fp32 [B, H, T] of queries [B, H, T, D] at positions from `start` on.

    `cache` holds keys and values up to the slice's end. Extra memory is linear in T and in the keys of a call.
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
    """Return the gradient [B, H, T, D] of the slice's queries; add those of visible keys and values to the cache.

    `d_output` is the gradient of `output` [B, T, H, D]; `attend_slice` returned `output` and `lse`. If all later slices
    are done, `cache.take_gradients` then returns the slice's own gradients of keys and values.
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
    """Output and log-sum-exp merged over the pieces so far, in fp32."""

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
    key_value_views = cache.key_value_views(piece.rows, piece.keys)
    if piece.kernel is AttentionKernel.TILES:
        return tiles_forward(piece, query, *key_value_views, settings)
    return _FORWARD[piece.kernel](piece, query, *key_value_views, settings.scale)


def _backward(
    piece: AttentionPiece,
    d_output: Tensor,
    query: Tensor,
    output: Tensor,
    lse: Tensor,
    cache: SequenceKVCache,
    settings: SlicedAttentionSettings,
) -> Tensor:
    key_value_views, gradient_sum_views = (
        cache.key_value_views(piece.rows, piece.keys),
        cache.gradient_sum_views(piece.rows, piece.keys),
    )
    if piece.kernel is AttentionKernel.TILES:
        return tiles_backward(piece, d_output, query, *key_value_views, output, lse, gradient_sum_views, settings)
    run = _BACKWARD[piece.kernel]
    d_query, *d_seen = run(piece, d_output, query, *key_value_views, output, lse, settings.scale)
    for own_sum, part in zip(gradient_sum_views, d_seen, strict=True):
        own_sum += part
    return d_query
