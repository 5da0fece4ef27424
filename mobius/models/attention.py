"""Attention of rows that hold several documents: causal within each, never from one to another, and exact.

    row          d0 d0 d0 d1 d1 d2 d2 d2 d2 -- --      -- is padding: a document of its own, which nobody reads
    positions     0  1  2  0  1  0  1  2  3  0  1
    bounds        0        3     5           9    11   of all rows of a microbatch in a row, int32; the last repeats

It is an attention implementation of transformers, so that every family takes it. A mask [S, S] is never made on a GPU.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn import functional as F

from mobius.errors import PlanError, first_line
from mobius.models.per_document_attention import attend_per_document

ATTENTION_IMPLEMENTATION = "mobius_documents"
"""Name by which transformers finds `attend_documents`."""
FLEX_BLOCK_SIZE = 128
"""Tokens of a block of FlexAttention's masks."""
_MOST_HEAD_SIZE = 256
_LEAST_FLEX_SIZE = 16
_MOST_FLEX_KERNELS = 256
"""Kernels of different shapes, windows and caps; a run has one to three."""


class DocumentAttention(StrEnum):
    """Means to keep documents apart."""

    VARLEN = "variable-length FlashAttention"
    FLEX = "FlexAttention"
    PER_DOCUMENT = "attention document by document"


@dataclass(frozen=True)
class DocumentLayout:
    """Where the documents of a microbatch lie, on the device that computes."""

    position_ids: Tensor
    """int32 [B, L]: each token's place in its document."""
    cu_seqlens: Tensor
    """int32 [D + 1]: first token of each document among the B * L, then B * L as often as documents are missing."""


def choose_attention(
    device: torch.device, dtype: torch.dtype, *, head_size: int, softcap: float | None
) -> DocumentAttention:
    """The fastest that can: FlashAttention takes formats of two bytes, heads of up to 256, and no capped scores."""
    if device.type != "cuda":
        return DocumentAttention.PER_DOCUMENT
    major, minor = torch.cuda.get_device_capability(device)
    # As in torch's own choice: backward of these widths asks for more shared memory than such cards have.
    is_too_wide = (major, minor) in ((8, 6), (8, 9), (12, 0), (12, 1)) and 192 < head_size <= 224
    fits = head_size <= _MOST_HEAD_SIZE and head_size % 8 == 0 and not is_too_wide
    if major >= 8 and dtype in (torch.bfloat16, torch.float16) and fits and softcap is None:
        return DocumentAttention.VARLEN
    return DocumentAttention.FLEX


def register_attention() -> None:
    """Make `attend_documents` known to transformers; once is enough."""
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
    document_cu_seqlens: Tensor | None = None,
    block_masks: BlockMasks | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents, as transformers calls it: heads [B, H, L, D] -> [B, L, H, D].

    `sliding_window` counts the token itself. Without `document_cu_seqlens` each row is one document.
    """
    assert attention_mask is None, "documents need no mask"
    if document_cu_seqlens is None:
        batch, length = query.shape[0], query.shape[2]
        document_cu_seqlens = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    if query.device.type != "cuda":
        output = attend_per_document(query, key, value, document_cu_seqlens, scale, sliding_window or 0, softcap or 0.0)
        return output.transpose(1, 2), None
    if block_masks is not None:
        return _flex(query, key, value, block_masks.of_window(sliding_window), scale, softcap).transpose(1, 2), None
    return _varlen(query, key, value, document_cu_seqlens, scale, sliding_window), None


def _varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float, window: int | None) -> Tensor:
    length = query.shape[2]
    flat = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    seen = (-1 if window is None else window - 1, 0)
    # No document is longer than its row; the longest of each microbatch would be another graph each time.
    run = _flash(query.shape[1] != key.shape[1])
    output = run(*flat, cu_seqlens, cu_seqlens, length, length, scale=scale, window_size=seen)
    return cast(Tensor, output.unflatten(0, (-1, length)))


@functools.cache
def _flash(is_grouped: bool) -> Callable[..., Tensor]:
    """`varlen_attn` of torch, which takes fewer key heads than query heads as they are in 2.11, later on demand."""
    from torch.nn.attention.varlen import varlen_attn

    flash = cast(Callable[..., Tensor], varlen_attn)
    takes_word = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(flash, enable_gqa=True) if is_grouped and takes_word else flash


@dataclass
class BlockMasks:
    """FlexAttention's masks of a microbatch, made when a window is first asked for."""

    documents: DocumentLayout
    _made: dict[int | None, Any] = field(default_factory=dict)

    def of_window(self, window: int | None) -> Any:
        """The mask for layers that see `window` tokens, itself included; None: all before it."""
        if window not in self._made:
            self._made[window] = make_block_mask(self.documents, window)
        return self._made[window]


def make_block_mask(documents: DocumentLayout, window: int | None) -> Any:
    """The blocks of 128 x 128 that documents touch, made from their bounds alone."""
    from torch.nn.attention.flex_attention import BlockMask

    position_ids = _in_whole_blocks(documents.position_ids)
    length = position_ids.shape[1]
    tokens = torch.arange(length, device=position_ids.device)
    reach = position_ids if window is None else position_ids.clamp(max=window - 1)
    starts = (tokens - reach)[
        :, ::FLEX_BLOCK_SIZE
    ] // FLEX_BLOCK_SIZE  # the block of the first token that a block's first one sees
    number = starts.shape[1]
    blocks = torch.arange(number, device=position_ids.device)
    counts = (blocks - starts + 1).to(torch.int32)
    indices = (starts.unsqueeze(-1) + blocks).clamp(max=number - 1).to(torch.int32)
    firsts = tokens - position_ids  # a token's document by its first token

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
    """Positions of whole blocks: what fills the last is a document of each row, which nobody else sees."""
    missing = -position_ids.shape[1] % FLEX_BLOCK_SIZE
    filling = torch.arange(missing, dtype=position_ids.dtype, device=position_ids.device)
    return torch.cat([position_ids, filling.expand(position_ids.shape[0], missing)], dim=1)


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, softcap: float | None) -> Tensor:
    length, size = query.shape[2:]
    # Zeros behind a small head change neither scores nor what is taken of the values.
    filling = (0, max(0, _LEAST_FLEX_SIZE - size), 0, -length % FLEX_BLOCK_SIZE)
    given = [F.pad(each, filling) for each in (query, key, value)]
    is_grouped = query.shape[1] != key.shape[1]
    capped = None if softcap is None else functools.partial(_cap, softcap)
    # Beyond its limit torch would run it uncompiled, and so make all scores.
    try:
        with torch._dynamo.config.patch(recompile_limit=_MOST_FLEX_KERNELS, fail_on_recompile_limit_hit=True):
            output = _compiled_flex()(*given, score_mod=capped, block_mask=mask, scale=scale, enable_gqa=is_grouped)
    except TorchDynamoException as error:
        raise PlanError(
            f"packed rows run by FlexAttention here, which torch could not compile: {first_line(error)}. Mend that, or "
            "use --packing off, or --bf16 on a GPU from Ampere on with a model whose heads are of at most 256"
        ) from error
    return output[:, :, :length, :size]


def _cap(softcap: float, score: Tensor, *_: Tensor) -> Tensor:
    return softcap * torch.tanh(score / softcap)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return cast(Callable[..., Tensor], torch.compile(flex_attention, dynamic=False))
