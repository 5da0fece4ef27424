"""Causal attention within documents for packed rows. The result is exact: no token attends to another document.

    row          d0 d0 d0 d1 d1 d2 d2 d2 d2 -- --      -- is padding: one more document, whose output is not used
    positions     0  1  2  0  1  0  1  2  3  0  1
    cu_seqlens   0        3     5           9    11    over all rows of a microbatch, int32; the last one repeats

transformers calls it as a registered attention implementation, so it works for every family. On a GPU there is no
[L, L] mask.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn import functional as F

from mobius.errors import PlanError, first_line

ATTENTION_IMPLEMENTATION = "mobius_documents"
"""Name by which transformers finds `attend_documents`."""
FLEX_BLOCK_SIZE = 128
"""Block size of FlexAttention's block masks, in tokens."""
_MOST_HEAD_SIZE = 256
_LEAST_FLEX_SIZE = 16
_MOST_FLEX_KERNELS = 256
"""Maximum number of compiled kernels, one per shape, window and cap; a run has one to three."""


class DocumentAttention(StrEnum):
    """Implementations of attention that separate documents."""

    VARLEN = "variable-length FlashAttention"
    FLEX = "FlexAttention"
    PER_DOCUMENT = "attention document by document"


@dataclass(frozen=True)
class DocumentLayout:
    """Document bounds of a microbatch, on the compute device."""

    position_ids: Tensor
    """int32 [B, L]: position of each token in its document."""
    cu_seqlens: Tensor
    """int32 [D + 1]: index of each document's first token among B * L tokens, then B * L up to the fixed size."""


def choose_attention(
    device: torch.device, dtype: torch.dtype, *, head_size: int, softcap: float | None
) -> DocumentAttention:
    """Return the fastest implementation. FlashAttention needs fp16 or bf16, a head size <= 256, and no softcap."""
    if device.type != "cuda":
        return DocumentAttention.PER_DOCUMENT
    major, minor = torch.cuda.get_device_capability(device)
    # Same rule as in torch: backward for these head sizes needs more shared memory than these GPUs have.
    is_too_wide = (major, minor) in ((8, 6), (8, 9), (12, 0), (12, 1)) and 192 < head_size <= 224
    fits = head_size <= _MOST_HEAD_SIZE and head_size % 8 == 0 and not is_too_wide
    if major >= 8 and dtype in (torch.bfloat16, torch.float16) and fits and softcap is None:
        return DocumentAttention.VARLEN
    return DocumentAttention.FLEX


def register_attention() -> None:
    """Register `attend_documents` with transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_IMPLEMENTATION, attend_documents)


def attend_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    documents: Tensor | BlockMasks | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents, called by transformers: heads [B, H, L, D] -> [B, L, H, D].

    `sliding_window` includes the token itself. `documents` are bounds (`DocumentLayout.cu_seqlens`), or block masks for
    FlexAttention. With None, each row is one document.
    """
    assert attention_mask is None, "documents need no mask"
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    if isinstance(documents, BlockMasks):
        return _flex(query, key, value, documents.of_window(sliding_window), scale, softcap).transpose(1, 2), None
    if documents is None:
        batch, length = query.shape[0], query.shape[2]
        documents = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
    if query.device.type != "cuda":
        # Operations take numbers only: 0 means no window or no cap.
        output = _operation()(query, key, value, documents, scale, sliding_window or 0, softcap or 0.0)
        return output.transpose(1, 2), None
    return _varlen(query, key, value, documents, scale, sliding_window), None


def _varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float, window: int | None) -> Tensor:
    length = query.shape[2]
    flat = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    seen = (-1 if window is None else window - 1, 0)
    # No document is longer than a row. With the length of the longest document, each microbatch would recompile.
    run = _flash(query.shape[1] != key.shape[1])
    output = run(*flat, cu_seqlens, cu_seqlens, length, length, scale=scale, window_size=seen)
    return cast(Tensor, output.unflatten(0, (-1, length)))


@functools.cache
def _flash(is_grouped: bool) -> Callable[..., Tensor]:
    """`varlen_attn` of torch. Torch 2.11 detects grouped-query attention; later versions have an argument for it."""
    from torch.nn.attention.varlen import varlen_attn

    flash = cast(Callable[..., Tensor], varlen_attn)
    takes_word = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(flash, enable_gqa=True) if is_grouped and takes_word else flash


@dataclass
class BlockMasks:
    """FlexAttention's block masks of a microbatch, one per window, created at first use."""

    documents: DocumentLayout
    _made: dict[int | None, Any] = field(default_factory=dict)

    def of_window(self, window: int | None) -> Any:
        """Block mask for a sliding window of `window` tokens, including the query; without a window if it is None."""
        if window not in self._made:
            self._made[window] = make_block_mask(self.documents, window)
        return self._made[window]


def make_block_mask(documents: DocumentLayout, window: int | None) -> Any:
    """Block mask (blocks of 128 x 128) for documents and `window`, computed from document bounds alone."""
    from torch.nn.attention.flex_attention import BlockMask

    position_ids = _in_whole_blocks(documents.position_ids)
    length = position_ids.shape[1]
    tokens = torch.arange(length, device=position_ids.device)
    before = position_ids if window is None else position_ids.clamp(max=window - 1)
    starts = (tokens - before)[
        :, ::FLEX_BLOCK_SIZE
    ] // FLEX_BLOCK_SIZE  # per query block: first key block to which its first token attends
    number = starts.shape[1]
    blocks = torch.arange(number, device=position_ids.device)
    counts = (blocks - starts + 1).to(torch.int32)
    indices = (starts.unsqueeze(-1) + blocks).clamp(max=number - 1).to(torch.int32)
    firsts = tokens - position_ids  # first token of each token's document; it identifies the document

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (q >= k) & (firsts[b, q] == firsts[b, k])
        return seen if window is None else seen & (q - k < window)

    return BlockMask.from_kv_blocks(
        counts.unsqueeze(1),
        indices.unsqueeze(1),
        BLOCK_SIZE=FLEX_BLOCK_SIZE,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def _in_whole_blocks(position_ids: Tensor) -> Tensor:
    """Positions padded to whole blocks; the padding of each row is one more document."""
    missing = -position_ids.shape[1] % FLEX_BLOCK_SIZE
    filling = torch.arange(missing, dtype=position_ids.dtype, device=position_ids.device)
    return torch.cat([position_ids, filling.expand(position_ids.shape[0], missing)], dim=1)


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, softcap: float | None) -> Tensor:
    length, size = query.shape[2:]
    # Zero padding of small heads changes neither scores nor the values that are used.
    filling = (0, max(0, _LEAST_FLEX_SIZE - size), 0, -length % FLEX_BLOCK_SIZE)
    given = [F.pad(each, filling) for each in (query, key, value)]
    is_grouped = query.shape[1] != key.shape[1]
    capped = None if softcap is None else functools.partial(_cap, softcap)
    # Beyond its recompile limit torch would fall back to eager mode, which materializes all scores.
    try:
        with torch._dynamo.config.patch(recompile_limit=_MOST_FLEX_KERNELS, fail_on_recompile_limit_hit=True):
            output = _compiled_flex()(*given, score_mod=capped, block_mask=mask, scale=scale, enable_gqa=is_grouped)
    except TorchDynamoException as error:
        raise PlanError(
            f"packed rows use FlexAttention on this GPU, and torch could not compile it: {first_line(error)}. Fix "
            "this error, or use --packing off, or --bf16 on Ampere or newer with a model of head size 256 or less"
        ) from error
    return output[:, :, :length, :size]


def _cap(softcap: float, score: Tensor, *_: Tensor) -> Tensor:
    return softcap * torch.tanh(score / softcap)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return cast(Callable[..., Tensor], torch.compile(flex_attention, dynamic=False))


_NAME = "mobius::attend_one_by_one"


@functools.cache
def _operation() -> Callable[..., Tensor]:
    """Custom operation: causal attention within each document, heads [B, H, L, D] -> the same shape."""

    def like_tokens(heads: Tensor) -> Tensor:
        # Memory layout [B, L, H, D], because some families make a view of the output that needs it.
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
    """Boolean [n, n]: True if a query (row) attends to a key (column) of the same document."""
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    return (distance >= 0) & (distance < (window or length))
