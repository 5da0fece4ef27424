"""Attention per document on CPUs: one operation in a graph, which reads document bounds when it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_NAME = "mobius::attend_one_by_one"


def attend_per_document(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float, window: int, softcap: float
) -> Tensor:
    """Causal attention within each document, heads [B, H, L, D] in and out.

    `cu_seqlens` as in `attention.DocumentLayout`. `window` includes the token itself; `window` or `softcap` 0: none.
    """
    return _operation()(query, key, value, cu_seqlens, scale, window, softcap)


@functools.cache
def _operation() -> Callable[..., Tensor]:
    """The custom operation, registered at first use."""

    def like_tokens(heads: Tensor) -> Tensor:
        # Memory layout [B, L, H, D], because some families take a view of it.
        return torch.empty_like(heads.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)

    @torch.library.custom_op(_NAME, mutates_args=())
    def attend(
        query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float, window: int, softcap: float
    ) -> Tensor:
        output = like_tokens(query).zero_()
        for own in _spans(cu_seqlens, query.shape[2]):
            output[own] = _attend(query[own], key[own], value[own], scale, window, softcap)
        return output

    @torch.library.custom_op(f"{_NAME}_backward", mutates_args=())
    def differentiate(
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = query, key, value
        results = tuple(torch.zeros_like(each, memory_format=torch.contiguous_format) for each in given)
        for own in _spans(cu_seqlens, query.shape[2]):
            parts = _differentiate(gradient[own], query[own], key[own], value[own], scale, window, softcap)
            for result, part in zip(results, parts, strict=True):
                result[own] = part
        return results  # type: ignore[return-value]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.settings = inputs[4:]

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (*differentiate(gradient, *ctx.saved_tensors, *ctx.settings), None, None, None, None)

    attend.register_fake(lambda query, *_: like_tokens(query))
    differentiate.register_fake(
        lambda gradient, query, key, value, *_: tuple(
            torch.empty_like(each, memory_format=torch.contiguous_format) for each in (query, key, value)
        )
    )
    attend.register_autograd(backward, setup_context=keep)
    return attend


def _spans(cu_seqlens: Tensor, length: int) -> Iterator[tuple[slice, slice, slice]]:
    """Index [row, all heads, tokens] of each document in tensors [B, H, L, D]."""
    edges = cu_seqlens.tolist()
    for first, end in pairwise(edges):
        row, start = divmod(first, length)
        if end > first:
            yield slice(row, row + 1), slice(None), slice(start, start + end - first)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """Causal attention of one document, heads [1, H, n, D]."""
    length, is_grouped = query.shape[2], query.shape[1] != key.shape[1]
    if softcap:
        key, value = (each.float().repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        return (_weights(query.float(), key, scale, window, softcap)[0] @ value).to(query.dtype)
    is_plain = not window or length <= window
    mask = None if is_plain else _seen(length, window)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_plain, scale=scale, enable_gqa=is_grouped
    )


def _differentiate(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of `_attend`, in fp32; autograd cannot differentiate a custom operation."""
    groups = query.shape[1] // key.shape[1]
    gradient, query = gradient.float(), query.float()
    key, value = (each.float().repeat_interleave(groups, 1) for each in (key, value))
    weights, slope = _weights(query, key, scale, window, softcap)
    of_weights = gradient @ value.transpose(2, 3)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    if slope is not None:
        of_scores = of_scores * slope
    of_keys, of_values = scale * (of_scores.transpose(2, 3) @ query), weights.transpose(2, 3) @ gradient
    of_keys, of_values = (each.unflatten(1, (-1, groups)).sum(2) for each in (of_keys, of_values))
    return scale * (of_scores @ key), of_keys, of_values


def _weights(query: Tensor, key: Tensor, scale: float, window: int, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Attention weights [1, H, n, n], and the derivative of the softcap at each score."""
    scores, slope = (query @ key.transpose(2, 3)) * scale, None
    if softcap:
        bounded = torch.tanh(scores / softcap)
        scores, slope = softcap * bounded, 1 - bounded * bounded
    return scores.masked_fill(~_seen(query.shape[2], window), -torch.inf).softmax(-1), slope


def _seen(length: int, window: int) -> Tensor:
    """Boolean [n, n]: True where a query of a document attends to a key."""
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    return (distance >= 0) & (distance < (window or length))
