"""torch's attention kernels, called below autograd: each runs a piece of a slice and returns its log-sum-exp.

A piece's probabilities are exp(score - log-sum-exp of ALL pieces). A kernel's backward, given the merged output and the
merged log-sum-exp, therefore yields exactly its piece's share of the gradients, whichever kernel ran forward.

`kernel_choice.py` lists what each kernel supports. If a piece has more keys than queries, flash aligns its causal mask
at the lower right corner, other kernels at the upper left; these get squares only.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mobius.models.sliced_attention.attention_pieces import AttentionPiece

_aten = torch.ops.aten


def cudnn_forward(
    piece: AttentionPiece, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """cuDNN: output [b, T, H, D] and log-sum-exp [b, H, T] of a piece; query [b, H, T, D], key [b, Hk, K, D]."""
    output, lse = _aten._scaled_dot_product_cudnn_attention(
        _token_major(query), key, value, None, True, 0.0, piece.is_causal, False, scale=scale
    )[:2]
    return output.transpose(1, 2), lse.reshape(query.shape[:3])


def cudnn_backward(
    piece: AttentionPiece,
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in the working dtype; merged `output` and `d_output` are [b, T, H, D]."""
    # cuDNN caches plans by the layout of query, key and value only, so other layouts must follow from these.
    heads = [each.contiguous().transpose(1, 2) for each in (d_output, output)]
    statistics = lse.unsqueeze(-1) if _cudnn_statistics_rank(query.device) == 4 else lse
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # unused without dropout
    result: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_cudnn_attention_backward(
        heads[0], _token_major(query), key, value, heads[1], statistics, seed, seed, None, None, None,
        query.shape[2], key.shape[2], 0.0, piece.is_causal, scale=scale,
    )  # fmt: skip
    return result


@functools.cache
def _cudnn_statistics_rank(device: torch.device) -> int:
    """Rank of cuDNN's log-sum-exp in this torch: 4 by its fake kernel, 3 in the source of some versions."""
    probe = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    given = _aten._scaled_dot_product_cudnn_attention(probe, probe, probe, None, True, 0.0, False, False, scale=1.0)
    return int(given[1].dim())


def _token_major(heads: Tensor) -> Tensor:
    """Heads [b, H, T, D] in memory layout [b, T, H, D], as a projection makes them; copies other layouts only."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def flash_forward(
    piece: AttentionPiece, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """FlashAttention: output and log-sum-exp of a piece, shaped as with cuDNN; documents of a row in one call."""
    given = [_flash_layout(each, piece) for each in (query, key, value)]
    output, lse = _aten._flash_attention_forward(
        *given, *_flash_lengths(piece), 0.0, piece.is_causal and piece.window is None, False,
        scale=scale, **_flash_window(piece),
    )[:2]  # fmt: skip
    return (output, lse) if piece.cu_seqlens is None else (output.unsqueeze(0), lse.unsqueeze(0))


def flash_backward(
    piece: AttentionPiece,
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in the working dtype; merged `output` and `d_output` are [b, T, H, D]."""
    is_packed = piece.cu_seqlens is not None
    given = [_flash_layout(each, piece) for each in (query, key, value)]
    after = [each[0] if is_packed else each for each in (d_output.contiguous(), output.contiguous())]
    state = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    results = _aten._flash_attention_backward(
        after[0], *given, after[1], lse[0] if is_packed else lse, *_flash_lengths(piece), 0.0,
        piece.is_causal and piece.window is None, *state, scale=scale, **_flash_window(piece),
    )  # fmt: skip
    back = [(each.unsqueeze(0) if is_packed else each).transpose(1, 2) for each in results]
    return back[0], back[1], back[2]


def _flash_layout(heads: Tensor, piece: AttentionPiece) -> Tensor:
    """Heads [b, H, T, D] in the kernel's layout: [b, T, H, D], or [T, H, D] for a row with documents."""
    if piece.cu_seqlens is None:
        return heads.transpose(1, 2)
    assert heads.shape[0] == 1, "documents are attended row by row"
    return heads[0].transpose(0, 1)


def _flash_lengths(piece: AttentionPiece) -> tuple[Tensor | None, Tensor | None, int, int]:
    return (*(piece.cu_seqlens or (None, None)), *piece.longest)


def _flash_window(piece: AttentionPiece) -> dict[str, int]:
    return {} if piece.window is None else {"window_size_left": piece.window - 1, "window_size_right": 0}


def cpu_forward(
    piece: AttentionPiece, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """CPU kernel of torch: output and log-sum-exp of a piece, shaped as in `cudnn_forward`."""
    output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, piece.is_causal, scale=scale
    )
    return output.transpose(1, 2), lse


def cpu_backward(
    piece: AttentionPiece,
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in the working dtype; merged `output` and `d_output` are [b, T, H, D]."""
    heads = [each.transpose(1, 2) for each in (d_output, output)]
    result: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        heads[0], query, key, value, heads[1], lse, 0.0, piece.is_causal, scale=scale
    )
    return result
