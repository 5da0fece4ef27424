"""Where microbatches are in their sequences, if they are slices of them, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from mobius.models.sliced_attention.attention_pieces import SlicedAttentionSettings


@dataclass(frozen=True)
class SequenceSlice:
    """A microbatch among its sequences."""

    start: int
    """Its first token in each sequence."""
    end: int
    length: int
    """Tokens of a sequence."""
    documents: Tensor | None = None
    """Bounds of the sequences' documents (`attention.DocumentLayout`), on the host; None: each is one."""
    settings: dict[Any, SlicedAttentionSettings] = field(default_factory=dict)
    """Attention of these sequences by kind of layer; shared by their slices, made when one is asked for."""


def cut_rows(rows: Tensor, *, num_groups: int, num_slices: int) -> list[Tensor]:
    """Slices [B / groups, L / slices] of `rows` [B, L], those of the first group's rows first."""
    return [part.contiguous() for group in rows.chunk(num_groups) for part in group.chunk(num_slices, dim=1)]


def slice_sequences(length: int, cu_seqlens: Sequence[Tensor | None], *, num_slices: int) -> list[SequenceSlice]:
    """The place of each slice of sequences of `length` tokens, a multiple of `num_slices`, group by group.

    `cu_seqlens` are those of the documents of each group of rows (`attention.DocumentLayout`), on the host.
    """
    step, sequence_slices = length // num_slices, list[SequenceSlice]()
    for documents in cu_seqlens:
        first = SequenceSlice(0, step, length, documents)
        sequence_slices += [replace(first, start=start, end=start + step) for start in range(0, length, step)]
    return sequence_slices
