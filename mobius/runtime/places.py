"""Where microbatches are in their sequences, if they are slices of them, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from mobius.models.sliced_attention.pieces import SliceSettings


@dataclass(frozen=True)
class Place:
    """A microbatch among its sequences."""

    start: int
    """Its first token in each sequence."""
    end: int
    length: int
    """Tokens of a sequence."""
    documents: Tensor | None = None
    """Bounds of the sequences' documents (`attention.Documents`), on the host; None: each is one."""
    settings: dict[Any, SliceSettings] = field(default_factory=dict)
    """Attention of these sequences by kind of layer; shared by their slices, made when one is asked for."""


def cut_rows(rows: Tensor, *, num_groups: int, num_slices: int) -> list[Tensor]:
    """Slices [B / groups, L / slices] of `rows` [B, L], those of the first group's rows first."""
    return [part.contiguous() for group in rows.chunk(num_groups) for part in group.chunk(num_slices, dim=1)]


def place_slices(length: int, bounds: Sequence[Tensor | None], *, num_slices: int) -> list[Place]:
    """The place of each slice of sequences of `length` tokens, a multiple of `num_slices`, group by group.

    `bounds` are those of the documents of each group of rows (`attention.Documents`), on the host.
    """
    step, places = length // num_slices, list[Place]()
    for documents in bounds:
        first = Place(0, step, length, documents)
        places += [replace(first, start=start, end=start + step) for start in range(0, length, step)]
    return places
