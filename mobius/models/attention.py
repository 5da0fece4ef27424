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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn import functional as F

from mobius.errors import PlanError, first_line
from mobius.models.sinks import SINKS, add_sinks, sinks_gradient

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
    **further: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents, called by transformers: heads [B, H, L, D] -> [B, L, H, D].

    `sliding_window` includes the token itself. `documents` are bounds (`DocumentLayout.cu_seqlens`), or block masks for
    FlexAttention. With None, each row is one document. `further` may have sinks.
    """
    assert attention_mask is None, "documents need no mask"
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    sinks = further.get(SINKS)
    if isinstance(documents, BlockMasks):
        return _flex(query, key, value, documents.of_window(sliding_window), scale, softcap, sinks), None
    if documents is None:
        batch, length = query.shape[0], query.shape[2]
        documents = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
    if query.device.type != "cuda":
        # Operations take numbers only: 0 means no window or no cap.
        output = _operation()(query, key, value, sinks, documents, scale, sliding_window or 0, softcap or 0.0)
        return output.transpose(1, 2), None
    return _varlen((query, key, value), sinks, documents, scale, sliding_window), None


def _varlen(
    heads: tuple[Tensor, ...], sinks: Tensor | None, cu_seqlens: Tensor, scale: float, window: int | None
) -> Tensor:
    query, key, _ = heads
    length = query.shape[2]
    flat = [each.transpose(1, 2).flatten(0, 1) for each in heads]
    if sinks is not None:
        output, _ = _flash_with_sinks()(*flat, sinks, cu_seqlens, length, scale, window or 0)
        return cast(Tensor, output.unflatten(0, (-1, length)))
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


@functools.cache
def _flash_with_sinks() -> Callable[..., tuple[Tensor, Tensor]]:
    """Custom operation: FlashAttention of documents with sinks, heads [T, H, D]; returns output and log-sum-exp."""

    def settings(length: int, scale: float, window: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        seen = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
        return (length, length, 0.0, not window), {"scale": scale, **seen}

    @torch.library.custom_op(f"{_NAME}_with_sinks", mutates_args=())
    def attend(
        query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bounds: Tensor, length: int, scale: float, window: int
    ) -> tuple[Tensor, Tensor]:
        fixed, named = settings(length, scale, window)
        output, lse = _aten._flash_attention_forward(query, key, value, bounds, bounds, *fixed, False, **named)[:2]
        output, lse = add_sinks(output.unsqueeze(0), lse.unsqueeze(0), sinks)
        return output[0].contiguous(), lse[0].contiguous()

    @torch.library.custom_op(f"{_NAME}_with_sinks_backward", mutates_args=())
    def differentiate(
        gradient: Tensor, saved: Sequence[Tensor], length: int, scale: float, window: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        query, key, value, sinks, bounds, output, lse = saved
        fixed, named = settings(length, scale, window)
        state = torch.zeros(2, dtype=torch.uint64, device=lse.device), torch.empty(0, device=lse.device)
        given = gradient.contiguous(), query, key, value, output, lse, bounds, bounds
        found = _aten._flash_attention_backward(*given, *fixed, *state, **named)
        of_sinks = sinks_gradient(gradient.unsqueeze(0), output.unsqueeze(0), lse.unsqueeze(0), sinks)
        return found[0].contiguous(), found[1].contiguous(), found[2].contiguous(), of_sinks.to(sinks.dtype)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:5], *output)
        ctx.settings = inputs[5:]

    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *differentiate(gradient, ctx.saved_tensors, *ctx.settings), None, None, None, None

    attend.register_fake(
        lambda query, *_: (query.new_empty(query.shape), query.new_empty(query.shape[1::-1], dtype=torch.float32))
    )
    differentiate.register_fake(lambda _, saved, *__: tuple(each.new_empty(each.shape) for each in saved[:4]))
    attend.register_autograd(backward, setup_context=keep)
    return attend


_aten = torch.ops.aten


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


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest

    length, size = query.shape[2:]
    settings = {} if sinks is None else {"return_aux": AuxRequest(lse=True)}
    # Zero padding of small heads changes neither scores nor the values that are used.
    filling = (0, max(0, _LEAST_FLEX_SIZE - size), 0, -length % FLEX_BLOCK_SIZE)
    given = [F.pad(each, filling) for each in (query, key, value)]
    is_grouped = query.shape[1] != key.shape[1]
    capped = None if softcap is None else functools.partial(_cap, softcap)
    # Beyond its recompile limit torch would fall back to eager mode, which materializes all scores.
    try:
        with torch._dynamo.config.patch(recompile_limit=_MOST_FLEX_KERNELS, fail_on_recompile_limit_hit=True):
            made = _compiled_flex()(
                *given, score_mod=capped, block_mask=mask, scale=scale, enable_gqa=is_grouped, **settings
            )
    except TorchDynamoException as error:
        raise PlanError(
            f"packed rows use FlexAttention on this GPU, and torch could not compile it: {first_line(error)}. Fix "
            "this error, or use --packing off, or --bf16 on Ampere or newer with a model of head size 256 or less"
        ) from error
    if sinks is None:
        return cast(Tensor, made)[:, :, :length, :size].transpose(1, 2)
    output, auxiliary = made
    return add_sinks(output[:, :, :length, :size].transpose(1, 2), auxiliary.lse[:, :, :length], sinks)[0]


def _cap(softcap: float, score: Tensor, *_: Tensor) -> Tensor:
    return softcap * torch.tanh(score / softcap)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


_NAME = "mobius::attend_one_by_one"


@functools.cache
def _operation() -> Callable[..., Tensor]:
    """Custom operation: causal attention within each document, heads [B, H, L, D] -> the same shape; sinks [H]."""

    def like_tokens(heads: Tensor) -> Tensor:
        # Memory layout [B, L, H, D], because some families make a view of the output that needs it.
        return torch.empty_like(heads.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)

    @torch.library.custom_op(_NAME, mutates_args=())
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        cu_seqlens: Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        output = like_tokens(query).zero_()
        for own in _spans(cu_seqlens, query.shape[2]):
            output[own] = _attend(query[own], key[own], value[own], sinks, scale, window, softcap)
        return output

    @torch.library.custom_op(f"{_NAME}_backward", mutates_args=())
    def differentiate(
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        cu_seqlens: Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        results = tuple(torch.zeros_like(each, memory_format=torch.contiguous_format) for each in (query, key, value))
        of_sinks = torch.zeros(0 if sinks is None else len(sinks))
        for own in _spans(cu_seqlens, query.shape[2]):
            *parts, part_of_sinks = _differentiate(
                gradient[own], query[own], key[own], value[own], sinks, scale, window, softcap
            )
            for result, part in zip(results, parts, strict=True):
                result[own] = part
            of_sinks += part_of_sinks
        return *results, of_sinks.to(query.dtype if sinks is None else sinks.dtype, copy=True)  # type: ignore[return-value]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.settings = inputs[5:]

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once, which checkpoints require
        *of_heads, of_sinks = differentiate(gradient, *saved, *ctx.settings)
        return *of_heads, None if saved[3] is None else of_sinks, None, None, None, None

    attend.register_fake(lambda query, *_: like_tokens(query))
    differentiate.register_fake(
        lambda gradient, query, key, value, sinks, *_: tuple(
            torch.empty_like(each, memory_format=torch.contiguous_format)
            for each in (query, key, value, query.new_empty(0) if sinks is None else sinks)
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


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, window: int, softcap: float
) -> Tensor:
    """Causal attention of one document, heads [1, H, n, D]."""
    length, is_grouped = query.shape[2], query.shape[1] != key.shape[1]
    if softcap or sinks is not None:
        key, value = (each.float().repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        return (_weights(query.float(), key, sinks, scale, window, softcap)[0] @ value).to(query.dtype)
    is_plain = not window or length <= window
    mask = None if is_plain else _seen(length, window)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_plain, scale=scale, enable_gqa=is_grouped
    )


def _differentiate(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks of `_attend`, in fp32; autograd cannot differentiate a custom operation.

    Without sinks, the last one is empty.
    """
    groups = query.shape[1] // key.shape[1]
    gradient, query = gradient.float(), query.float()
    key, value = (each.float().repeat_interleave(groups, 1) for each in (key, value))
    weights, of_sink, slope = _weights(query, key, sinks, scale, window, softcap)
    of_weights = gradient @ value.transpose(2, 3)
    delta = (of_weights * weights).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - delta)
    if slope is not None:
        of_scores = of_scores * slope
    of_keys, of_values = scale * (of_scores.transpose(2, 3) @ query), weights.transpose(2, 3) @ gradient
    of_keys, of_values = (each.unflatten(1, (-1, groups)).sum(2) for each in (of_keys, of_values))
    return scale * (of_scores @ key), of_keys, of_values, -(of_sink * delta).sum((0, 2)).flatten()


def _weights(
    query: Tensor, key: Tensor, sinks: Tensor | None, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention weights [1, H, n, n], the sinks' [1, H, n, 1 or 0], and the derivative of the softcap at each score."""
    scores, slope = (query @ key.transpose(2, 3)) * scale, None
    if softcap:
        bounded = torch.tanh(scores / softcap)
        scores, slope = softcap * bounded, 1 - bounded * bounded
    scores = scores.masked_fill(~_seen(query.shape[2], window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights, of_sinks = scores.softmax(-1).tensor_split([query.shape[2]], -1)
    return weights, of_sinks, slope


def _seen(length: int, window: int) -> Tensor:
    """Boolean [n, n]: True if a query (row) attends to a key (column) of the same document."""
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    return (distance >= 0) & (distance < (window or length))
