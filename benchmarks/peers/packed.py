"""Packs samples of given lengths as TRL does by default, and joins those of a microbatch into one row.

    row of seq_length     | sample 4      | sample 0    | 9 |    best fit decreasing in windows of 1,000 samples
    microbatch            | 4 | 0 | 9 | 7 | 2 | 11 | ...         rows joined by DataCollatorWithFlattening, no padding
    positions             0.. 0.. 0.. 0.. 0.. 0..                restart, from which transformers makes its mask

TRL is not installed: its packing is written anew here, its collator is the one of transformers. Tokens are random.
"""

import bisect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening
from transformers.utils import is_flash_attn_2_available

WINDOW = 1000
"""Samples that TRL packs at a time: as many as `datasets` hands to one call of a mapped function."""
ATTENTIONS = ("flash_attention_2", "flex_attention", "sdpa")
Microbatch = dict[str, Tensor | int]


def read_lengths(path: Path, seq_length: int) -> list[int]:
    """Token counts from a JSON list; longer ones are cut to `seq_length`, as all systems do."""
    return [min(int(length), seq_length) for length in json.loads(path.read_text())]


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of `lengths` whose sums are at most `capacity`: the longest first, each where the least room is left."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is free, and the row; sorted
    for length in sorted(lengths, reverse=True):
        place = bisect.bisect_left(room, (length, -1))
        free, row = room.pop(place) if place < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(length)
        bisect.insort(room, (free - length, row))
    return rows


def best_attention(device: torch.device) -> str:
    """The fastest implementation here that keeps samples apart: FlashAttention needs a package of its own."""
    if device.type == "cpu":
        return "sdpa"  # FlexAttention has no backward there
    return "flash_attention_2" if is_flash_attn_2_available() else "flex_attention"


class PackedSteps:
    """Makes the steps of a rank: the next rows of the shuffled packing, over and over."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        seq_length: int,
        rows_per_microbatch: int,
        accumulations: int,
        rank: int,
        num_ranks: int,
        vocab_size: int,
        attention: str,
        device: torch.device,
    ) -> None:
        """`attention` decides on the form: FlexAttention, compiled for one shape, gets microbatches filled up."""
        windows = [lengths[first : first + WINDOW] for first in range(0, len(lengths), WINDOW)]
        self._rows = [row for window in windows for row in best_fit_decreasing(window, seq_length)]
        np.random.default_rng(0).shuffle(self._rows)
        self._rows_per_microbatch, self._accumulations = rows_per_microbatch, accumulations
        self._rank, self._num_ranks, self._vocab_size = rank, num_ranks, vocab_size
        self._positions = rows_per_microbatch * seq_length if attention == "flex_attention" else None
        self._collate = DataCollatorWithFlattening(return_flash_attn_kwargs=attention == "flash_attention_2")
        self._device, self._random, self._next = device, np.random.default_rng([1, rank]), 0
        self.tokens: list[int] = []
        self.positions: list[int] = []

    def next(self) -> list[Microbatch]:
        """The microbatches of this rank's next step; the numbers of all ranks are kept in `tokens` and `positions`."""
        parts = [[self._take() for _ in range(self._num_ranks)] for _ in range(self._accumulations)]
        totals = [sum(samples) for ranks in parts for samples in ranks]
        self.tokens.append(sum(totals))
        self.positions.append(sum(totals) if self._positions is None else self._positions * len(totals))
        return [self._microbatch(ranks[self._rank]) for ranks in parts]

    def facts(self, step_seconds: Sequence[float], warmup: int) -> dict[str, Any]:
        """Numbers for the result: real tokens of all steps, and of a second of those behind the first `warmup`."""
        seconds = sum(step_seconds[warmup:])
        return {
            "step_tokens": self.tokens,
            "step_positions": self.positions,
            "padding": 1 - sum(self.tokens) / sum(self.positions),
            "real_tokens_per_second": sum(self.tokens[warmup:]) / seconds if seconds else None,
        }

    def _take(self) -> list[int]:
        """Lengths of the samples in the next microbatch."""
        chosen = [(self._next + index) % len(self._rows) for index in range(self._rows_per_microbatch)]
        self._next += self._rows_per_microbatch
        return [length for row in chosen for length in self._rows[row]]

    def _microbatch(self, lengths: Sequence[int]) -> Microbatch:
        samples = [self._sample(length, is_target=True) for length in lengths]
        if self._positions is not None and sum(lengths) < self._positions:
            samples.append(self._sample(self._positions - sum(lengths), is_target=False))
        made = self._collate(samples, return_tensors="pt")
        return {name: value.to(self._device) if isinstance(value, Tensor) else value for name, value in made.items()}

    def _sample(self, length: int, *, is_target: bool) -> dict[str, list[int]]:
        tokens = self._random.integers(0, self._vocab_size, length).tolist()
        return {"input_ids": tokens, "labels": tokens if is_target else [-100] * length}
