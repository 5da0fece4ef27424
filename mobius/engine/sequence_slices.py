"""Slices of sequences: the position of each microbatch within its sequences, and its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from mobius.models.slice_pieces import SlicedAttentionSettings


@dataclass(frozen=True)
class SequenceSlice:
    """Position of a microbatch within its sequences."""

    start: int
    """First token of the slice in each sequence."""
    end: int
    length: int
    """Tokens per sequence."""
    documents: Tensor | None = None
    """Document bounds of the sequences (`attention.DocumentLayout`), on the host; None: one document each."""
    settings: dict[Any, SlicedAttentionSettings] = field(default_factory=dict)
    """Attention settings by kind of layer, created on first use and shared by all slices of these sequences."""


def cut_rows(rows: Tensor, *, num_groups: int, num_slices: int) -> list[Tensor]:
    """Return slices [B / groups, L / slices] of `rows` [B, L], group by group."""
    return [part.contiguous() for group in rows.chunk(num_groups) for part in group.chunk(num_slices, dim=1)]


def slice_sequences(length: int, cu_seqlens: Sequence[Tensor | None], *, num_slices: int) -> list[SequenceSlice]:
    """Return the position of every slice of sequences of `length` tokens, group by group.

    `num_slices` must divide `length`. `cu_seqlens`: document bounds of each group (`attention.DocumentLayout`), on the
    host.
    """
    step, sequence_slices = length // num_slices, list[SequenceSlice]()
    for documents in cu_seqlens:
        first = SequenceSlice(0, step, length, documents)
        sequence_slices += [replace(first, start=start, end=start + step) for start in range(0, length, step)]
    return sequence_slices
